"""Matrices that are converted when a model is loaded, as a GPU wants them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.engine.loading import model_sizes
from headrace.formats.base import dequantize
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.models.weights import to_dense, to_packed
from headrace.ops.registry import resolve
from tests.fixtures.cpu_oracle import ALL_FORMATS, random_packed
from tests.fixtures.paging import Pages
from tests.fixtures.random_gguf import write_random
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss, write_gpt_oss_gguf, write_qwen3_moe


def logits_of(path: Path, dense_format: str | None) -> torch.Tensor:
    decoder = load_model(
        open_checkpoint(str(path)),
        resolve(("reference",)),
        HostDevice(),
        max_positions=64,
        dense_format=dense_format,
    )
    pages = Pages(decoder.spec)
    batch = pages.batch([(pages.sequence(), 20)])
    ids = torch.arange(20) * 7 % 250
    return decoder.logits(decoder.forward(ids, batch, pages.kv))


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_gguf", "fp8_block", "nvfp4_modelopt", "bf16"])
def test_a_model_in_float32_gives_the_logits_of_the_stored_one(name: str, tmp_path: Path):
    """Stored bytes become exactly the numbers that they stand for; bf16 rounds them."""
    if name == "gpt_oss":
        path = write_gpt_oss(tmp_path / "toy").path
    elif name == "gpt_oss_gguf":
        path = write_gpt_oss_gguf(tmp_path / "toy.gguf").path
    else:
        path = write_qwen3_moe(tmp_path / "toy", name).path
    expected = logits_of(path, None)
    largest = expected.abs().max()
    assert (logits_of(path, "f32") - expected).abs().max() <= 1e-5 * largest
    rounded = (logits_of(path, "bf16") - expected).abs().max()
    assert rounded <= 0.1 * largest
    # only what is not bfloat16 already is rounded
    # E2M1 times a power of two is a bfloat16; FP8 and NVFP4 have finer scales
    assert (rounded == 0) == (name in ("bf16", "gpt_oss", "gpt_oss_gguf"))


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_every_format_becomes_dense(name: str):
    import numpy as np

    packed = random_packed(name, 300, 256, np.random.default_rng(1))
    for target, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        dense = to_dense(packed, target)
        assert (dense.format, dense.shape) == (target, packed.shape)
        assert torch.equal(dense.parts["data"], dequantize(packed).to(dtype))
    assert to_dense(dense, "bf16") is dense


def test_packed_bytes_are_those_of_the_file(tmp_path: Path):
    """Two layers of width 256, a vocabulary of 272; superblocks of 144 (Q4_K) and 210 bytes (Q6_K)."""
    path = write_random(tmp_path / "toy.gguf", (("q4_k", "q4_k", "q6_k"), ("q4_k", "q4_k", "q4_k")))
    checkpoint = open_checkpoint(str(path))
    matrices = 272 * (144 + 210) + 2 * ((256 + 128 + 256) * 144 + 128 * 210)
    vectors = 2 * (256 + 256 + 64 + 64 + 4 * 256) + 256
    assert model_sizes(checkpoint).packed_nbytes == matrices + 4 * vectors
    ops = resolve(("reference",))
    decoder = load_model(checkpoint, ops, HostDevice(), max_positions=64, dense_format="packed")
    found = [w for kind, w in decoder.matrices() if "expert" not in kind and kind != "router"]
    assert sum(w.nbytes for w in found) == matrices
    assert {(w.format, *sorted(w.parts)) for w in found} == {
        ("q4_k", "blocks"), ("q6_k", "codes", "scales")
    }  # fmt: skip


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_what_is_packed_stands_for_the_same_numbers(name: str):
    import numpy as np

    stored = random_packed(name, 300, 256, np.random.default_rng(1))
    packed = to_packed(stored, torch.device("cpu"))
    want = dequantize(stored)
    if name in ("f32", "fp8_e4m3", "nvfp4"):
        want = want.to(torch.bfloat16).float()
    assert torch.equal(dequantize(packed), want)


def test_sizes_say_how_matrices_are_stored(tmp_path: Path):
    sizes = model_sizes(open_checkpoint(str(write_gpt_oss(tmp_path / "toy").path)))
    assert sizes.expert_formats == {"mxfp4"}
    assert sizes.dense_formats == {"bf16"}
    assert 0 < sizes.expert_nbytes < sizes.total_nbytes
