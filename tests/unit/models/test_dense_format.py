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
from headrace.models.weights import to_dense
from headrace.ops.registry import resolve
from tests.fixtures.cpu_oracle import ALL_FORMATS, random_packed
from tests.fixtures.paging import Pages
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


def test_sizes_say_how_matrices_are_stored(tmp_path: Path):
    sizes = model_sizes(open_checkpoint(str(write_gpt_oss(tmp_path / "toy").path)))
    assert sizes.expert_formats == {"mxfp4"}
    assert sizes.dense_formats == {"bf16"}
    assert 0 < sizes.expert_nbytes < sizes.total_nbytes
