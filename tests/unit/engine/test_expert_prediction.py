"""Experts of a step against sums by hand."""

import pytest

from headrace.core.errors import MachineError
from headrace.engine.expert_prediction import CachedExperts, expert_seconds, lateness
from headrace.experts.split import CPU_LATENCY_S, FETCH_LATENCY_S
from tests.fixtures.running_models import machine

MB = 10**6
RATES = {
    "experts_call": (10e-6, "s"),
    "kernel_one_slices": (2000.0, "GB/s"),
    "pcie_gather": (50.0, "GB/s"),
    "pcie_gather_overlapped": (50.0, "GB/s"),
    "cpu_experts_mxfp4": (100.0, "GB/s"),
    "cpu_experts_mxfp4_overlapped": (100.0, "GB/s"),
}


def cached(placement: str) -> CachedExperts:
    """Three layers that want 20 slices of 2 MB."""
    return CachedExperts(placement, 3, 20, 2 * MB, "mxfp4", 0.2)


def test_resident_experts_are_read_once():
    found = expert_seconds(cached("gpu"), 1.0, machine(**RATES))
    assert found.gpu_s == pytest.approx(3 * (10e-6 + 20 * 2 * MB / 2e12))
    assert (found.fetch_s, found.cpu_s) == (0, 0)


def test_a_stream_waits_for_what_it_fetches():
    found = expert_seconds(cached("stream"), 0.5, machine(**RATES))
    hits = 10 * 2 * MB / 2e12
    assert found.gpu_s == pytest.approx(3 * (10e-6 + hits))
    assert found.fetch_s == pytest.approx(3 * (FETCH_LATENCY_S + 10 * 2 * MB / 50e9 - hits))
    assert found.cpu_s == 0


def test_the_cpu_alone():
    found = expert_seconds(cached("cpu"), 0.0, machine(**RATES))
    assert found.cpu_s == pytest.approx(3 * (CPU_LATENCY_S + 20 * 2 * MB / 100e9))
    assert found.fetch_s == 0


def test_both_paths_run_beside_each_other():
    found = expert_seconds(cached("hybrid"), 0.25, machine(**RATES))
    # 15 misses: five of 40 us each over PCIe, ten of 20 us by the CPU, and what a path costs beside them
    hits = 5 * 2 * MB / 2e12
    fetch = FETCH_LATENCY_S + 5 * 40e-6
    cpu = CPU_LATENCY_S + 10 * 20e-6
    assert found.gpu_s + found.fetch_s == pytest.approx(3 * (10e-6 + fetch))
    assert found.fetch_s == pytest.approx(3 * (fetch - hits))
    assert found.cpu_s == pytest.approx(3 * max(0.0, cpu - fetch))
    assert found.seconds == pytest.approx(found.gpu_s + found.fetch_s + found.cpu_s)


def test_a_mean_between_two_counts_is_between_their_times():
    low, middle, high = (
        expert_seconds(cached("stream"), rate, machine(**RATES)).seconds
        for rate in (0.5, 0.525, 0.55)
    )
    assert low > middle > high
    assert middle == pytest.approx((low + high) / 2)


def test_a_link_twice_as_fast_shortens_the_step():
    slow = machine(**RATES)
    faster = machine(
        **{**RATES, "pcie_gather": (100.0, "GB/s"), "pcie_gather_overlapped": (100.0, "GB/s")}
    )
    assert (
        expert_seconds(cached("hybrid"), 0.25, faster).seconds
        < expert_seconds(cached("hybrid"), 0.25, slow).seconds
    )


def test_missing_rates_are_named():
    with pytest.raises(MachineError, match="kernel_one_slices"):
        expert_seconds(cached("gpu"), 1.0, machine())


def test_layers_that_were_tried_scale_what_misses_take():
    # 20 misses of 2 MB over PCIe: 20 us and 800 us; tried layers took 10 us (a call) and 902 us.
    tried = {"experts_layers": (3 * 912e-6, "s"), "experts_missed": (40e6 / 912e-6 / 1e9, "GB/s")}
    late = lateness(cached("stream"), machine(**RATES, **tried))
    assert late == pytest.approx(902 / 820)
    found = expert_seconds(cached("stream"), 0.5, machine(**RATES), late)
    hits = 10 * 2 * MB / 2e12
    assert found.gpu_s == pytest.approx(3 * (10e-6 + hits))
    assert found.fetch_s == pytest.approx(3 * 902 / 820 * (20e-6 + 10 * 40e-6 - hits))


def test_nothing_was_tried_or_nothing_waited():
    assert lateness(cached("hybrid"), machine(**RATES)) == 1.0
    at_once = {"experts_layers": (3 * 9e-6, "s"), "experts_missed": (1.0, "GB/s")}
    assert lateness(cached("hybrid"), machine(**RATES, **at_once)) == 1.0
