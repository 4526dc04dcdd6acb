"""What steps are priced by on the machine that they run on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine import this_machine as module
from headrace.explain.catalogue.roofline import roofs
from headrace.machine.probe import GpuInfo, probe_machine


def test_an_engine_on_the_cpu_stands_under_the_cpus_roof_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HEADRACE_PROFILES", str(tmp_path))  # no stored profile
    monkeypatch.setattr(module, "dram_read_gbps", lambda threads, passes: 20.0)
    monkeypatch.setattr(module, "_product_gflops", lambda: 100.0)
    machine = replace(probe_machine(), gpus=(GpuInfo(0, "a card", 8 << 30, 7 << 30, "580"),))
    found = module.this_machine(machine, 1)
    assert (found.gpu, found.link) == (None, None)
    assert roofs(found) == (100e9, 20e9)
