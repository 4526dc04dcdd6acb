"""Damaged files of every kind: an error that says so, or a checkpoint; nothing else, no memory."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint.open import open_checkpoint
from headrace.core.errors import CheckpointError, UnsupportedModelError
from tests.fixtures import toy
from tests.fixtures.gguf_bytes import tiny_llama

EXAMPLES = int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", "150"))
# Headers of the files here are a few kilobytes; what a claim could ask for is gigabytes.
PEAK_NBYTES = 16 << 20
_number = itertools.count()

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def damage(draw: st.DrawFn, length: int, focus: int) -> list[tuple[int, bytes]]:
    """Places and the bytes put there, most of them in the first ``focus`` bytes."""
    changes: list[tuple[int, bytes]] = []
    for _ in range(draw(st.integers(1, 3))):
        limit = draw(st.sampled_from([focus, focus, focus, length]))
        at = draw(st.integers(0, limit - 1))
        huge = [0, 1, 2**7, 2**16, 2**30, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
        patch = draw(
            st.one_of(
                st.binary(min_size=1, max_size=4),
                st.sampled_from(huge).map(lambda n: struct.pack("<Q", n)),
                st.sampled_from(huge[:6]).map(lambda n: struct.pack("<I", n)),
            )
        )
        changes.append((at, patch))
    return changes


def damaged(raw: bytes, changes: list[tuple[int, bytes]], cut: int | None) -> bytes:
    out = bytearray(raw)
    for at, patch in changes:
        out[at : at + len(patch)] = patch[: len(out) - at]
    return bytes(out if cut is None else out[:cut])


def open_all(path: Path) -> None:
    """Open and take every tensor; only the two errors of damaged files may come out."""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(str(path))
        for raw in checkpoint.tensors.values():
            assert raw.nbytes <= checkpoint.nbytes
            for part in raw.parts.values():
                assert len(part.tobytes()) == part.nbytes  # every byte can be read
    except (CheckpointError, UnsupportedModelError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < PEAK_NBYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fuzz")
    yield path
    shutil.rmtree(path)


GGUF = tiny_llama().to_bytes()
GGUF_HEADER = GGUF.index(b"output_norm.weight") + 60


@fuzz
@given(damage(len(GGUF), GGUF_HEADER), st.one_of(st.none(), st.integers(0, len(GGUF))))
def test_damaged_gguf(folder: Path, changes: list[tuple[int, bytes]], cut: int | None) -> None:
    path = folder / f"{next(_number)}.gguf"
    path.write_bytes(damaged(GGUF, changes, cut))
    open_all(path)
    path.unlink()


@pytest.fixture(scope="module")
def toy_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    made = toy.write_gpt_oss(tmp_path_factory.mktemp("toy") / "oss")
    return made.path, (made.path / "model.safetensors").read_bytes()


@fuzz
@given(st.data())
def test_damaged_safetensors(toy_bytes: tuple[Path, bytes], data: st.DataObject) -> None:
    source, raw = toy_bytes
    changes = data.draw(damage(len(raw), 8 + struct.unpack_from("<Q", raw)[0]))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(raw))))
    path = source / "model.safetensors"
    path.unlink(missing_ok=True)  # never write into a file that may still be mapped
    path.write_bytes(damaged(raw, changes, cut))
    open_all(source)


@fuzz
@given(st.data())
def test_damaged_index(folder: Path, data: st.DataObject) -> None:
    source = folder / "sharded"
    if not source.exists():
        toy.write_qwen3_moe(source, "nvfp4_compressed", shards=3)
        (source / "model.safetensors.index.json").rename(folder / "index.json")
    raw = (folder / "index.json").read_bytes()
    changes = data.draw(damage(len(raw), len(raw)))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(raw))))
    (source / "model.safetensors.index.json").write_bytes(damaged(raw, changes, cut))
    open_all(source)
