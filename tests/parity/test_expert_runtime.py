"""The engine's experts in slots and on the CPU, put together as the engine does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.config import EngineConfig
from headrace.core.kv_formats import PoolShape
from headrace.engine.expert_runtime import ExpertPlace, supported_formats
from headrace.engine.memory_plan import MemoryPlan
from headrace.engine.resolved import Resolved
from headrace.engine.vram_plan import VramPlan
from headrace.experts.slab_pack import layout_of
from headrace.machine.device import HostDevice
from headrace.models.loader import load_model
from headrace.ops.registry import resolve
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_engine import gbps
from tests.fixtures.paging import Pages
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss
from tests.fixtures.triton_interpreter import needs_triton, only_interpreted

pytestmark = [needs_triton, needs_native, only_interpreted]


def resolved(mode: str, slots_nbytes: int) -> Resolved:
    seqs = 2 if mode == "cpu" else 1
    return Resolved(
        context=64, kv_format="f32", block_tokens=16, max_batch_tokens=64, max_num_seqs=seqs,
        num_blocks=8, threads=1, backend="triton", experts=mode,
        plan=MemoryPlan(0, 0, 0, 0, 1 << 30), choices=(), device="cuda", dense_format="f32",
        slots=True, vram=VramPlan(0, 0, 0, 0, slots_nbytes, 1 << 30), kv_pool=PoolShape(8, 16),
        expert_ram_nbytes=1 << 30, pin_budget_nbytes=1 << 30,
    )  # fmt: skip


def test_the_cache_serves_some_formats():
    assert {"mxfp4", "bf16"} <= supported_formats()
    assert EngineConfig("m").experts == "auto"


@pytest.mark.parametrize("mode", ["cpu", "hybrid"])
def test_a_model_with_its_experts_elsewhere(mode: str, tmp_path: Path):
    """A prompt of three tokens (in pieces of two) and a decoding step: the logits of all in memory.

    One token has to do for ``hybrid``, whose kernels take seconds in the interpreter.
    """
    checkpoint = open_checkpoint(str(write_gpt_oss(tmp_path / "toy").path))
    layouts = []

    def layout(spec, experts):
        layouts.append(layout_of(experts))
        raise KeyboardInterrupt

    ops = resolve(("reference",))
    with pytest.raises(KeyboardInterrupt):
        load_model(checkpoint, ops, HostDevice(), max_positions=64, executor_factory=layout)
    slots = 12 * layouts[0].num_slices * layouts[0].slice_nbytes
    place = ExpertPlace(
        resolved(mode, slots), HostDevice(), gbps(pcie_gather=10.0, cpu_experts_mxfp4=10.0), None
    )
    logits = []
    for factory in (None, place.factory):
        decoder = load_model(
            checkpoint, ops, HostDevice(), max_positions=64, executor_factory=factory
        )
        pages = Pages(decoder.spec)
        sequence = pages.sequence()
        with place.awake():
            for tokens in ([5, 9, 200], [17]) if mode == "cpu" else ([5],):
                batch = pages.batch([(sequence, len(tokens))], decode=len(tokens) == 1)
                hidden = decoder.forward(torch.tensor(tokens), batch, pages.kv)
                logits.append(decoder.logits(hidden))
    assert place.runtime is not None
    half = len(logits) // 2
    for found, expected in zip(logits[half:], logits[:half], strict=True):
        assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    place.runtime.step_ended()
    place.runtime.close()
