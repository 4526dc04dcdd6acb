"""The GPU's probe on the host's oracles: which rates it takes, and that predictions find all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headrace.engine.gpu_kernel_probe as probing
import headrace.engine.host_probe as host_probe
from headrace.engine.gpu_kernel_probe import GpuProbe
from headrace.engine.host_probe import probe_host
from headrace.explain.kernel_rates import predict
from headrace.explain.running_cost import Stored, decode_rows
from headrace.machine.device import HostDevice
from headrace.machine.profile import GpuProfile
from headrace.ops.registry import resolve
from tests.fixtures.host_marks import HostMarks
from tests.fixtures.running_models import dense_model, machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CALLS", 2), ("RUNS", 1), ("MANY", 4), ("HEAD_ROWS", 2)):
        monkeypatch.setattr(probing, name, value)
    monkeypatch.setattr(probing, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(host_probe, "STEPS", 8)
    monkeypatch.setattr(host_probe, "WARM_UP", 1)
    monkeypatch.setattr(host_probe, "LONG_TOKENS", 64)


def stored_model():
    """``dense_model`` with shapes, as a loaded one has them."""
    model = dense_model(gpu=True)
    shapes = {
        "q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8),
        "gate": (16, 8), "up": (16, 8), "down": (8, 16), "embed": (10, 8), "lm_head": (10, 8),
    }  # fmt: skip
    matrices = {
        kind: Stored(1 if kind in ("embed", "lm_head") else 2, 0, 0, "f32", *shapes[kind])
        for kind in model.matrices
    }
    matrices = {
        kind: replace(s, elements=s.count * s.rows * s.cols, nbytes=4 * s.count * s.rows * s.cols)
        for kind, s in matrices.items()
    }
    return replace(model, matrices=matrices)


def test_what_is_probed_is_what_predictions_need(quick: None):
    device, model, marks = HostDevice(), stored_model(), HostMarks()
    probe = GpuProbe(
        device, resolve(("reference",)), model, make_marks=lambda _: marks, cold_nbytes=1 << 10
    )
    rates = probe.rates() | probe_host(device, 4, marks)
    assert all(rate.value > 0 for rate in rates.values())
    on = replace(machine(), gpu=GpuProfile("g", 1 << 30), rates={**machine().rates, **rates})
    found = predict(model, decode_rows(1, 5), on)
    assert found.seconds > rates["step_host"].value
    assert rates["kernel_one_lm_head"].source.endswith("one row, in a graph, cold")


def test_a_matrix_that_is_too_large_is_extrapolated_from_two_smaller_ones(
    quick: None, monkeypatch: pytest.MonkeyPatch
):
    marks = HostMarks()
    probe = GpuProbe(
        HostDevice(), resolve(("reference",)), stored_model(), make_marks=lambda _: marks,
        cold_nbytes=1 << 10,
    )  # fmt: skip
    stored = [Stored(1, 80, 320, "f32", 10, 8)]
    monkeypatch.setattr(probing, "LARGEST_NBYTES", 160)
    monkeypatch.setattr(probe, "seconds", lambda _: 3e-6)  # of half of 160 bytes
    # 160 bytes took 5 us, the first 64 (two of ten rows, whole ones) 3 us; 320 go on at that rate.
    nbytes, seconds = probe._whole("lm-head", stored, probe._ones(1, 8), (160.0, 5e-6))
    assert nbytes == 320
    half = 2 * 8 * 4
    assert seconds == pytest.approx(5e-6 + 2e-6 / (160 - half) * 160)
