"""The simulated engine against the measured table of both paths in one graph, and by hand."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.cache_policy import CacheShape, LruPolicy, ValuePolicy
from headrace.experts.simulate import (
    SimulatedMachine,
    Simulation,
    machine_from_profile,
    simulate,
)
from headrace.experts.split import PathRates
from headrace.machine.profile import (
    GpuProfile,
    HostProfile,
    LinkProfile,
    MachineProfile,
    Rate,
)
from headrace.machine.virtual import VirtualClock

# KERNELS.md, section 6 (H200 machine, 2026-11-29): 18 layers of three missing experts of 13.2 MB,
# PCIe 51 GB/s, CPU 73 GB/s, no attention; 3.7 us a flag round trip.
EXPERT = 13_219_200
LAYERS = 18
MEASURED = SimulatedMachine(
    PathRates(51.0, 73.0, EXPERT, cpu_latency_s=3.7e-6), gpu_gbps=3500.0, plan_s=3e-6
)
COLD = [tuple(range(8 * layer, 8 * layer + 3)) for layer in range(LAYERS)]


def cold(table: list[int] | None) -> float:
    """Milliseconds of a step in which everything misses."""
    policy = ValuePolicy(CacheShape(LAYERS, 8, 0))
    found = simulate(COLD * 4, policy, MEASURED, table=table, promote=False)
    assert found.hit_rate == 0.0
    return 1e3 * found.step_s


@pytest.mark.parametrize(
    ("table", "measured_ms"),
    [([0, 1, 2, 3], 14.65), ([0, 0, 0, 0], 9.44), ([0, 0, 0, 1], 6.86), (None, 6.86)],
    ids=["all fetched", "all on the CPU", "one fetched", "our split"],
)
def test_the_measured_table_is_predicted(table: list[int] | None, measured_ms: float) -> None:
    assert cold(table) == pytest.approx(measured_ms, rel=0.10)


def test_the_measured_table_by_hand() -> None:
    """A layer's waits: 3 * 13.2192 MB / 51 GB/s = 777.6 us, 3 / 73: 543.3 us, 2 / 73: 362.2 us."""
    unit_us = EXPERT / 3500e3  # on the GPU
    assert cold([0, 1, 2, 3]) == pytest.approx(LAYERS * (3 + 777.60 + 3 * unit_us) / 1e3, rel=1e-4)
    assert cold([0, 0, 0, 0]) == pytest.approx(LAYERS * (3 + 543.25 + 3.7) / 1e3, rel=1e-4)
    assert cold([0, 0, 0, 1]) == pytest.approx(LAYERS * (3 + 362.17 + 3.7) / 1e3, rel=1e-4)


def test_one_layer_on_the_clock_by_hand() -> None:
    """Slices of 1 GB. PCIe 1 s and CPU 0.5 s each, GPU 0.1 s. 2 s of attention before the plan."""
    machine = SimulatedMachine(PathRates(1.0, 2.0, 10**9), gpu_gbps=10.0, dense_s=2.0, step_s=0.5)
    policy = LruPolicy(CacheShape(1, 8, 4))
    clock = VirtualClock(keep=True)
    run = Simulation(policy, machine, promote=False, clock=clock)
    run.step([(0, 1, 2)])  # q = 1 of 3: 1 s each way
    assert clock.free_s("gpu") == pytest.approx(2 + 1 + 0.1 + 0.5)
    run.step([(0, 3)])  # 0 hits; 3 alone: 0.5 s on the CPU
    assert [(s.resource, s.label, round(s.start_s, 3), round(s.end_s, 3)) for s in clock.spans] == [
        ("gpu", "dense and plan", 0.0, 2.0),
        ("pcie", "fetch", 2.0, 3.0),
        ("cpu", "experts", 2.0, 3.0),
        ("gpu", "fetched", 3.0, 3.1),
        ("gpu", "step", 3.1, 3.6),
        ("gpu", "dense and plan", 3.6, 5.6),
        ("cpu", "experts", 5.6, 6.1),
        ("gpu", "hits", 5.6, 5.7),
        ("gpu", "step", 6.1, 6.6),
    ]
    totals = run.totals
    assert (totals.lookups, totals.hits) == (5, 1)
    assert (totals.fetched, totals.computed, totals.gpu) == (10**9, 3 * 10**9, 2 * 10**9)


def test_promotion_warms_a_cache_that_the_split_would_leave_cold() -> None:
    """A link 20 times slower than the CPU: nothing is fetched, all is promoted, then nothing moves."""
    machine = SimulatedMachine(PathRates(5.0, 100.0, 10**6), gpu_gbps=1000.0)
    visits = [(0, 1), (4, 5)] * 200
    shape = CacheShape(2, 4, 4)
    without = simulate(visits, ValuePolicy(shape), machine, promote=False)
    assert (without.hit_rate, without.fetched_nbytes) == (0.0, 0)
    warm = simulate(visits, ValuePolicy(shape), machine, skip_steps=100)
    assert warm.hit_rate == 1.0
    assert warm.promoted_nbytes == 0
    assert warm.step_s < without.step_s / 2


def test_promotion_delays_nothing() -> None:
    """The same visits with no room to gain: promotion or not, the same seconds to the digit."""
    machine = SimulatedMachine(PathRates(50.0, 75.0, 10**6), gpu_gbps=1000.0, dense_s=1e-5)
    visits = [tuple(sorted({(7 * t) % 16, (3 * t + 1) % 16})) for t in range(300)]
    with_it, without = (
        simulate(visits, ValuePolicy(CacheShape(1, 16, 0)), machine, promote=p)
        for p in (True, False)
    )
    assert with_it.seconds == without.seconds


def test_a_table_too_short_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="3 slices miss; the table ends at 1"):
        simulate(COLD, ValuePolicy(CacheShape(LAYERS, 8, 0)), MEASURED, table=[0, 0])


def rate(value: float, *, overlapped: bool = False) -> Rate:
    return Rate(value, "GB/s", "overlapped" if overlapped else "alone", "test")


def test_a_machine_from_its_profile() -> None:
    profile = MachineProfile(
        "box",
        "measured",
        HostProfile("cpu", 16, 2**37),
        GpuProfile("gpu", 2**33),
        LinkProfile("PCIe 5.0 x16"),
        {
            "hbm_read": rate(3500.0),
            "pcie_gather": rate(51.0),
            "pcie_gather_overlapped": rate(49.0, overlapped=True),
            "cpu_experts_mxfp4": rate(84.0),
            "cpu_experts_mxfp4_overlapped": rate(73.0, overlapped=True),
            "flag_round_trip": Rate(3.7e-6, "s", "alone", "test"),
            "graph_kernel": Rate(0.6e-6, "s", "alone", "test"),
        },
    )
    machine = machine_from_profile(profile, "mxfp4", 4096, dense_s=1e-5)
    assert machine.paths == PathRates(49.0, 73.0, 4096, 0.0, 3.7e-6, 51.0, 84.0)
    assert (machine.gpu_gbps, machine.dense_s, machine.plan_s) == (3500.0, 1e-5, 0.6e-6)
    with pytest.raises(ConfigError, match="cpu_experts_bf16"):
        machine_from_profile(profile, "bf16", 4096)


def test_a_prefetch_on_the_clock_by_hand() -> None:
    """Slices of 1 GB. PCIe 1 s and CPU 0.5 s each, GPU 0.1 s; 2 s of attention, of which 0.4 pass before
    the first prefetch: 1.6 GB are there when the plan is made, 1 of expert 0 and 0.6 of expert 3."""
    machine = SimulatedMachine(
        PathRates(1.0, 2.0, 10**9), gpu_gbps=10.0, dense_s=2.0, guess_s=0.4, max_prefetch=2
    )
    clock = VirtualClock(keep=True)
    run = Simulation(LruPolicy(CacheShape(1, 8, 0)), machine, promote=False, clock=clock)
    run.step([(0, 1, 2, 3)], [(0, 3, 1)])
    # 2 slices' worth of 4 is done, so 2 are left to split: both on the CPU take 1 s, one of each 1 s;
    # equals fetch more. So 3 are fetched: 0.4 GB of expert 3 and 1 GB of expert 1 remain.
    assert [(s.resource, s.label, round(s.start_s, 3), round(s.end_s, 3)) for s in clock.spans] == [
        ("gpu", "dense and plan", 0.0, 2.0),
        ("pcie", "prefetch", 0.4, 2.0),
        ("pcie", "fetch", 2.0, 3.4),
        ("cpu", "experts", 2.0, 2.5),
        ("gpu", "fetched", 3.4, 3.7),
    ]
    assert (run.totals.prefetched, run.totals.ahead) == (1_600_000_000, 1_600_000_000)
    run.step([(0, 1)], [(5, 6)])  # a wrong guess brings nothing and delays nothing
    assert clock.spans[6].label == "prefetch"
    assert run.totals.prefetched == pytest.approx(3_200_000_000)
    assert run.totals.ahead == 1_600_000_000
    assert [s.start_s for s in clock.spans if s.label == "fetch"][1] == pytest.approx(5.7)
