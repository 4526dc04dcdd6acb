"""What a step on a CPU allocates lies within what the plan has charged for it, counted tensor by tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.step import ScheduledChunk
from headrace.engine.batch import build_batch
from headrace.engine.memory_plan import workspace_nbytes
from headrace.kv.storage import allocate_kv
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops.registry import resolve
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.peak import Peak
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss, write_qwen3_moe

PAGE, SEQS = 32, 16


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_native), "reference"])
@pytest.mark.parametrize("model", ["gpt-oss", "qwen3-moe", "tiny"])
@pytest.mark.parametrize(
    ("tokens", "seqs", "past"), [(512, 1, 0), (64, 8, 0), (100, 1, 700), (1, 16, 700)]
)
def test_b119_the_largest_step_on_a_cpu(
    tmp_path: Path, model: str, backend: str, tokens: int, seqs: int, past: int
):
    name = model
    if model == "gpt-oss":
        name = str(write_gpt_oss(tmp_path / "toy").path)
    elif model == "qwen3-moe":
        name = str(write_qwen3_moe(tmp_path / "toy", "bf16").path)
    checkpoint, ops = open_checkpoint(name), resolve(tuple(dict.fromkeys((backend, "reference"))))
    decoder = load_model(checkpoint, ops, HostDevice(), max_positions=past + tokens)
    decoder._layers = decoder._layers[:2]
    spec, context = checkpoint.spec, past + tokens
    pages = -(-context // PAGE)
    short = dataclasses.replace(spec, layers=spec.layers[:2])
    kv = allocate_kv(short, seqs * pages, PAGE, "f32", torch.device("cpu"))
    for cache in kv:
        cache.keys.zero_()
        cache.values.zero_()
    chunks = [
        ScheduledChunk(s, (7,) * tokens, past, tuple(range(s * pages, (s + 1) * pages)), True)
        for s in range(seqs)
    ]
    ids, batch = build_batch(chunks, PAGE, torch.device("cpu"))
    with Peak() as peak, torch.inference_mode():
        hidden = decoder.forward(ids, batch, kv)
        decoder.logits(hidden[torch.arange(SEQS) % len(hidden)])
    planned = workspace_nbytes(
        spec, context=context, max_batch_tokens=tokens * seqs, max_num_seqs=SEQS, backend=backend
    )
    assert 0 < peak.nbytes <= planned
