"""Whole toy models in every stored format against transformers on the exact dequantised values.

The same bound as in ``test_models_logits``: the weights are equal, only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops.registry import resolve, unavailable_reason
from tests.fixtures.paging import Pages
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.tiny_models import expected_logits, quiet
from tests.fixtures.toy import (
    QWEN3_NUMERICS,
    Toy,
    write_gpt_oss,
    write_gpt_oss_gguf,
    write_qwen3_moe,
)

BOUND = 1e-5
LENGTH = 60

CPU_REASON = unavailable_reason("cpu")
BACKENDS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(CPU_REASON is not None, reason=str(CPU_REASON))),
]


def compare(toy: Toy, backend: str) -> None:
    checkpoint = open_checkpoint(str(toy.path))
    names = ("reference",) if backend == "reference" else (backend, "reference")
    decoder = load_model(checkpoint, resolve(names), HostDevice(), max_positions=128)
    vocab = decoder.spec.vocab
    ids = torch.randint(0, vocab, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with quiet():
        model = toy.transformers_model()
        model.set_attn_implementation("eager")
    want = expected_logits(model, ids)
    pages = Pages(decoder.spec)
    sequence = pages.sequence()
    for count in (LENGTH - 7, 6, 1):
        start = sequence.length
        batch = pages.batch([(sequence, count)], decode=count == 1)
        hidden = decoder.forward(torch.tensor(ids[start : start + count]), batch, pages.kv)
        difference = (decoder.logits(hidden) - want[start : start + count]).abs().max()
        assert float(difference / want.abs().max()) <= BOUND


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numerics", QWEN3_NUMERICS)
def test_qwen3_moe(numerics: str, backend: str, tmp_path: Path) -> None:
    compare(write_qwen3_moe(tmp_path, numerics), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("write", [write_gpt_oss, write_gpt_oss_gguf])
def test_gpt_oss(write: Callable[..., Toy], tied: bool, backend: str, tmp_path: Path) -> None:
    target = tmp_path / "toy.gguf" if write is write_gpt_oss_gguf else tmp_path
    compare(write(target, tied=tied), backend)
