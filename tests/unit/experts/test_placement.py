"""``--experts auto`` on machines that are stubs of two rates alone and two together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.placement import ExpertLoad, choose_placement, placement_seconds
from headrace.experts.split import PathRates

# One layer of one look-up that always misses, 1 GB experts of one slice: seconds are 1 / rate.
ONE = ExpertLoad(1, 4, 1, 1, 1, hit_rate=0.0, gpu_gbps=1000.0)
H200 = ExpertLoad(18, 128, 4, 4, 350, hit_rate=0.25, gpu_gbps=3500.0)


@dataclass
class StubMachine:
    """Delivers so much over each path; ``harmony`` is what is left of it when both are busy."""

    pcie: float
    cpu: float
    harmony: float

    def rates(self, slice_nbytes: int) -> PathRates:
        return PathRates(
            self.pcie * self.harmony,
            self.cpu * self.harmony,
            slice_nbytes,
            pcie_alone_gbps=self.pcie,
            cpu_alone_gbps=self.cpu,
        )


def test_seconds_by_hand() -> None:
    seconds = placement_seconds(ONE, StubMachine(50.0, 40.0, 1.0).rates(10**9))
    assert seconds["cpu"] == pytest.approx(1 / 40)
    assert seconds["stream"] == pytest.approx(1 / 50 + 1 / 1000)  # fetched, then computed
    assert seconds["hybrid"] == pytest.approx(1 / 50 + 1 / 1000)  # one slice: all or nothing
    assert "gpu" not in seconds


def test_hits_hide_behind_misses_and_misses_vary() -> None:
    # two look-ups, half miss: 0, 1, 2 misses with 1/4, 1/2, 1/4
    load = replace(ONE, lookups=2, hit_rate=0.5, gpu_gbps=10.0)
    rates = PathRates(5.0, 0.0, 10**9)
    # no miss: two hits of 0.1 s. One: 0.2 s of fetch over 0.1 s of hit, then 0.1. Two: 0.4 + 0.2
    expected = 0.25 * 0.2 + 0.5 * 0.3 + 0.25 * 0.6
    assert placement_seconds(load, rates) == {"stream": pytest.approx(expected)}


def test_both_paths_win_on_a_machine_that_bears_both() -> None:
    choice = choose_placement(H200, StubMachine(51.0, 75.0, 0.97).rates(3_304_800))
    assert choice.placement == "hybrid"
    assert "ms" in choice.reason


def test_slow_only_under_overlap_switches() -> None:
    harmonious = StubMachine(51.0, 45.0, 1.0)
    starved = replace(harmonious, harmony=0.3)
    assert choose_placement(H200, harmonious.rates(3_304_800)).placement == "hybrid"
    assert choose_placement(H200, starved.rates(3_304_800)).placement == "stream"
    # with a slow link the same collapse leaves the CPU alone
    cpu_only = choose_placement(replace(H200, hit_rate=0.0), StubMachine(12, 45, 0.3).rates(10**6))
    assert cpu_only.placement == "cpu"


def test_everything_fits() -> None:
    fits = replace(H200, num_slots=18 * 128, hit_rate=1.0)
    assert choose_placement(fits, PathRates(50.0, 75.0, 10**6)).placement == "gpu"


def test_what_was_asked_for_is_done_or_refused() -> None:
    rates = PathRates(50.0, 75.0, 10**6)
    assert choose_placement(H200, rates, "cpu").placement == "cpu"
    with pytest.raises(ConfigError, match="350 of 2304 experts fit"):
        choose_placement(H200, rates, "gpu")
    with pytest.raises(ConfigError, match="CPU's rate is 0"):
        choose_placement(H200, PathRates(50.0, 0.0, 10**6), "hybrid")
    with pytest.raises(ConfigError, match="no expert fits"):
        choose_placement(replace(H200, num_slots=0), rates, "stream")
    with pytest.raises(ConfigError, match="no place"):
        choose_placement(replace(H200, num_slots=0), PathRates(50.0, 0.0, 10**6))
    with pytest.raises(ConfigError, match="hit rate"):
        replace(H200, hit_rate=1.5)
