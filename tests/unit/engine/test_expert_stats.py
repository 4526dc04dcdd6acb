"""Experts behind an executor, in step statistics and in what `headrace explain` makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.step import MovedBytes
from headrace.engine.expert_stats import expert_classes
from headrace.engine.explaining import Workload, report_of, run_steps
from headrace.experts.step_record import ExpertStep
from headrace.explain import leaf
from headrace.machine.profile import GpuProfile, HostProfile, MachineProfile, Rate
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_engine import SLICE_NBYTES, SLICES, ExpertEngine
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss


def test_bytes_and_flops_go_to_the_memory_that_they_came_from():
    step = ExpertStep(
        hits=6, fetched=3, computed=3, fetch_s=2e-3, compute_s=1e-3, num_layers=2, uses=24,
        slice_flops=100, slice_nbytes=4096,
    )  # fmt: skip
    gpu, fetch, cpu = expert_classes(step)
    assert (gpu.id, fetch.id, cpu.id) == (leaf.EXPERTS_GPU, leaf.EXPERT_FETCH, leaf.EXPERTS_CPU)
    # Two tokens a slice on average: 24 uses of 12 slices.
    assert (gpu.flops, fetch.flops, cpu.flops) == (9 * 2 * 100, 0, 3 * 2 * 100)
    assert gpu.bytes == MovedBytes(hbm=9 * 4096)
    assert fetch.bytes == MovedBytes(pcie=3 * 4096)
    assert cpu.bytes == MovedBytes(dram=3 * 4096)
    assert (fetch.seconds, cpu.seconds) == (2e-3, 0.0), "the shorter path is hidden by the longer"
    assert expert_classes(ExpertStep(0, 0, 0, 0.0, 0.0, 2, 0, 100, 4096)) == ()


def a_machine() -> MachineProfile:
    rates = {
        "dram_read": 40.0, "hbm_read": 400.0, "pcie_h2d": 20.0, "gpu_flops_bf16": 1e4,
        "gpu_flops_f32": 1e4, "cpu_flops_f32": 200.0, "cpu_flops_bf16": 200.0,
    }  # fmt: skip
    return MachineProfile(
        "made up", "catalogued", HostProfile("c", 4, 1 << 34), GpuProfile("g", 1 << 33),
        rates={
            n: Rate(v, "GFLOP/s" if "flops" in n else "GB/s", "alone", "made up")
            for n, v in rates.items()
        },
    )  # fmt: skip


@needs_native
def test_a_report_has_the_experts_and_what_more_slots_would_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # On a busy machine the rest of a step takes so long that the experts' part is hardly worth saying.
    monkeypatch.setattr("headrace.explain.report.WORTH_SAYING", 0.0)
    made = ExpertEngine(Path(write_gpt_oss(tmp_path / "toy").path), slots=6)
    try:
        watch = run_steps(made.engine, Workload(prompt=8, steps=12))
        report = report_of(made.engine, watch, "decode", a_machine())
        assert report is not None
        rows = {row.id: row for row in report.rows}
        step = watch.sample("decode")
        assert step is not None
        slices = 2 * 2 * SLICES  # two layers of two experts
        moved = sum(rows[i].nbytes for i in (leaf.EXPERTS_GPU, leaf.EXPERTS_CPU))
        assert moved == pytest.approx(slices * SLICE_NBYTES)
        assert rows[leaf.EXPERT_FETCH].nbytes > 0
        assert rows[leaf.EXPERTS_CPU].flops > 0
        lever = next(c for c in report.software if c.name == "twice the expert slots")
        assert lever.gain > 1
    finally:
        made.engine.close()
