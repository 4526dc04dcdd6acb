"""The KV cache's memory: reserved at once, touched on first use, refused legibly."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.core.errors import DoesNotFitError
from headrace.kv.storage import allocate_kv, copy_block, is_out_of_memory
from tests.fixtures.toy_engine import toy_spec

CPU = torch.device("cpu")


def test_allocation_touches_no_page_until_a_block_is_written():
    """In a process of its own: in a used one, freed pages that are still resident may serve."""
    code = """
import psutil
import torch
from headrace.kv.storage import allocate_kv
from tests.fixtures.toy_engine import toy_spec
resident = psutil.Process().memory_info
before = resident().rss
# 2 layers x 2 x 8192 blocks x 16 KiB = 512 MiB
caches = allocate_kv(toy_spec(), 8192, 256, "f32", torch.device("cpu"))
assert sum(c.keys.nbytes + c.values.nbytes for c in caches) == 512 * 2**20
allocated = resident().rss - before
caches[0].keys[:1024].fill_(1.0)  # 16 MiB
print(allocated, resident().rss - before)
"""
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    allocated, written = map(int, done.stdout.split())
    assert allocated < 8 * 2**20
    assert 12 * 2**20 < written < 40 * 2**20


@pytest.mark.parametrize(("kv_format", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_shapes_and_formats(kv_format, dtype):
    caches = allocate_kv(toy_spec(), 3, 32, kv_format, CPU)
    assert len(caches) == 2
    assert caches[0].keys.shape == caches[1].values.shape == (3, 1, 32, 16)
    assert caches[0].keys.dtype == dtype
    assert caches[0].block_tokens == 32


def test_b029_memory_that_is_not_granted_is_a_legible_error(monkeypatch):
    with pytest.raises(DoesNotFitError, match="KV cache") as caught:
        allocate_kv(toy_spec(), 2**40, 128, "f32", CPU)
    assert "--context" in caught.value.hint
    empty = torch.empty
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 12 bytes")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(DoesNotFitError, match="layer 1 of 2"):
        allocate_kv(toy_spec(), 4, 16, "f32", CPU)


def test_other_errors_are_not_taken_for_lack_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))  # of pages to lock
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "No such file"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_copy_block_copies_keys_and_values_of_every_layer():
    caches = allocate_kv(toy_spec(), 3, 16, "f32", CPU)
    for i, cache in enumerate(caches):
        for block in range(3):
            cache.keys[block] = 10 * i + block
            cache.values[block] = 100 + 10 * i + block
    copy_block(caches, 2, 0)
    for i, cache in enumerate(caches):
        assert (cache.keys[0] == 10 * i + 2).all()
        assert (cache.values[0] == 102 + 10 * i).all()
        assert (cache.keys[1] == 10 * i + 1).all()
