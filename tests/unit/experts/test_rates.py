"""Live rates: robust to outliers, led by lasting changes, and back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.experts.rates import (
    PATIENCE,
    RETURN_HALF,
    WINDOW,
    LayerTimes,
    Prior,
    RateEstimate,
    RateTracker,
    RequestSums,
)
from headrace.experts.split import PathRates, best_fetch_count, cpu_seconds

SLICE = 4_000_000


def copy(gbps: float, nbytes: int = SLICE) -> tuple[int, float]:
    return nbytes, nbytes / (gbps * 1e9)


def both(pcie_gbps: float, cpu_gbps: float) -> LayerTimes:
    return LayerTimes(*copy(pcie_gbps), *copy(cpu_gbps))


def test_outliers_change_nothing() -> None:
    path = RateEstimate(Prior(50.0))
    for at in range(60):
        path.observe(*copy(5.0 if at % 5 == 0 else 50.0))
    assert path.gbps == pytest.approx(50.0)


def test_a_lasting_change_is_followed_and_taken_back() -> None:
    path = RateEstimate(Prior(50.0))
    for _ in range(WINDOW):
        path.observe(*copy(50.0))
    for _ in range(WINDOW // 2):
        path.observe(*copy(20.0))
    assert path.gbps == pytest.approx(50.0)  # four of nine do not move a median
    for _ in range(30):
        path.observe(*copy(20.0))
    assert path.gbps == pytest.approx(20.0, rel=0.01)
    for _ in range(40):
        path.observe(*copy(50.0))
    assert path.gbps == pytest.approx(50.0, rel=0.01)


def test_latency_and_small_samples_do_not_look_like_a_slow_path() -> None:
    path = RateEstimate(Prior(50.0), latency_s=1e-3, least_nbytes=SLICE // 2)
    for _ in range(20):
        nbytes, seconds = copy(50.0)
        path.observe(nbytes, seconds + 1e-3)
        path.observe(SLICE // 4, 1.0)
    assert path.gbps == pytest.approx(50.0)


def test_a_full_window_replaces_a_probe() -> None:
    path = RateEstimate(Prior(10.0, probed=True))
    for at in range(WINDOW):
        assert path.gbps == 10.0, at
        path.observe(*copy(60.0))
    assert path.gbps == pytest.approx(60.0)


def test_a_path_without_samples_returns_to_its_profile() -> None:
    path = RateEstimate(Prior(50.0))
    for _ in range(60):
        path.observe(*copy(10.0))
    slow = path.gbps
    for _ in range(PATIENCE):
        path.rest()
    assert path.gbps == slow
    for _ in range(RETURN_HALF):
        path.rest()
    assert path.gbps == pytest.approx((50.0 + slow) / 2)


def test_a_busy_machine_changes_the_split_and_comes_back() -> None:
    rates = PathRates(50.0, 75.0, SLICE)
    tracker = RateTracker(rates)
    table = tracker.new_table(12)
    assert table is not None
    assert table[10] == 4
    tracker.observe(both(50.0, 75.0))
    assert tracker.new_table(12) is None  # nothing moved
    for _ in range(60):  # another program takes most of the CPU
        tracker.observe(both(50.0, 12.5))
    busy = tracker.new_table(12)
    assert busy is not None
    assert busy[10] == 8
    for _ in range(60):
        tracker.observe(both(50.0, 75.0))
    assert tracker.new_table(12) == table


def test_a_cpu_that_was_given_up_is_tried_again() -> None:
    """All fetched means no samples of the CPU: its estimate must not stay low for good."""
    tracker = RateTracker(PathRates(50.0, 75.0, SLICE))
    for _ in range(60):
        tracker.observe(both(50.0, 0.01))
    assert best_fetch_count(4, tracker.rates) == 4
    layers = 0
    while best_fetch_count(4, tracker.rates) == 4:
        tracker.observe(LayerTimes(*copy(50.0)))
        layers += 1
        assert layers < 2000
    for _ in range(60):
        tracker.observe(both(50.0, 75.0))
    assert tracker.rates.cpu_gbps == pytest.approx(75.0, rel=0.01)


def test_slow_only_under_overlap_moves_all_to_one_path() -> None:
    """A live machine whose paths starve each other, while the profile said that they do not."""
    tracker = RateTracker(PathRates(50.0, 60.0, SLICE, pcie_alone_gbps=55.0, cpu_alone_gbps=75.0))
    assert 0 < best_fetch_count(8, tracker.rates) < 8
    alone = overlapped = 0
    for _ in range(400):
        fetched = best_fetch_count(8, tracker.rates)
        if 0 < fetched < 8:
            overlapped += 1
            tracker.observe(
                LayerTimes(*copy(8.0, fetched * SLICE), *copy(8.0, (8 - fetched) * SLICE))
            )
        else:
            alone += 1
            assert fetched == 0  # the CPU alone is the faster one
            tracker.observe(LayerTimes(0, 0.0, *copy(75.0, 8 * SLICE)))
    assert tracker.rates.cpu_alone_gbps == pytest.approx(75.0, rel=0.01)
    assert overlapped < 80 < 320 < alone


def test_a_path_that_is_not_there_stays_away() -> None:
    tracker = RateTracker(PathRates(0.0, 75.0, SLICE))
    tracker.observe(LayerTimes(0, 0.0, *copy(75.0)))
    assert tracker.rates.pcie_gbps == 0.0
    assert tracker.new_table(3) == (0, 0, 0, 0)
    with pytest.raises(ConfigError, match=r"0\.0 GB/s"):
        RateEstimate(Prior(0.0))


def sums(nbytes: Sequence[float], seconds: Sequence[float]) -> RequestSums:
    b, t = np.array(nbytes, np.float64), np.array(seconds, np.float64)
    return RequestSums(len(b), b.sum(), t.sum(), (b * b).sum(), (b * t).sum())


def step(rng: np.random.Generator, gbps: float, fixed_s: float, noise_s: float = 0.0) -> LayerTimes:
    """A step of 18 layers on a CPU that reads at this rate after so many seconds."""
    slices = rng.integers(2, 12, 18)
    seconds = fixed_s + slices * SLICE / (gbps * 1e9) + rng.normal(0, noise_s, 18)
    requests = sums(slices * SLICE, seconds)
    nbytes = int(slices.sum()) * SLICE
    return LayerTimes(*copy(50.0, nbytes), nbytes, requests.seconds, requests)


def test_the_line_through_requests_is_found() -> None:
    """Two sizes, 10 us and 4 MB at 80 GB/s: 60 us for one slice and 160 for three."""
    line = sums([SLICE, 3 * SLICE] * 2, [60e-6, 160e-6] * 2)
    assert line.fixed_s == pytest.approx(10e-6)
    assert sums([SLICE, 3 * SLICE], [60e-6, 160e-6]).fixed_s is None, "two are only noise"
    assert sums([SLICE] * 9, [60e-6] * 9).fixed_s is None, "of one size"
    falling = sums([SLICE, 3 * SLICE] * 2, [160e-6, 60e-6] * 2)
    assert falling.fixed_s == pytest.approx(55e-6), "at most half of the mean"
    steep = sums([SLICE, 3 * SLICE] * 2, [10e-6, 160e-6] * 2)
    assert steep.fixed_s == 0.0


@pytest.mark.parametrize("fixed_us", [0.0, 8.0, 40.0])
@pytest.mark.parametrize("gbps", [30.0, 85.0])
def test_rate_and_fixed_cost_are_told_apart(gbps: float, fixed_us: float) -> None:
    tracker = RateTracker(PathRates(50.0, 65.0, SLICE, cpu_latency_s=8e-6, cpu_alone_gbps=70.0))
    rng = np.random.default_rng(3)
    for at in range(200):
        times = step(rng, gbps, fixed_us * 1e-6, noise_s=2e-6)
        if at % 5 == 0:  # interrupted: 3 ms in one request
            times = replace(times, compute_s=times.compute_s + 3e-3)
        latency = tracker.base.cpu_latency_s  # as LiveExperts adds it
        tracker.observe(replace(times, compute_s=times.compute_s + latency))
    assert tracker.rates.cpu_gbps == pytest.approx(gbps, rel=0.01)
    assert tracker.rates.cpu_latency_s == pytest.approx((8 + fixed_us) * 1e-6, abs=2e-6)
    assert tracker.rates.cpu_alone_gbps == 70.0
    # What the split expects of a layer is what the layer takes, whatever its size.
    for slices in (1, 4, 16):
        want = (8 + fixed_us) * 1e-6 + slices * SLICE / (gbps * 1e9)
        assert cpu_seconds(slices, tracker.rates) == pytest.approx(want, rel=0.02)


def test_noisy_lines_are_followed_slowly() -> None:
    """Requests that are disturbed by 20 us: one step's line says 0 to 80 us of a fixed 12."""
    tracker = RateTracker(PathRates(50.0, 85.0, SLICE))
    rng = np.random.default_rng(4)
    lines: list[float] = []
    late: list[float] = []
    for at in range(300):
        times = step(rng, 85.0, 12e-6, noise_s=20e-6)
        lines.append(times.requests.fixed_s or 0.0)
        tracker.observe(times)
        if at >= 60:
            late.append(tracker.rates.cpu_latency_s)
    assert max(lines) > 40e-6
    assert np.abs(np.array(late) - 12e-6).max() < 8e-6


def test_requests_of_one_size_give_the_rate_as_before() -> None:
    tracker = RateTracker(PathRates(50.0, 65.0, SLICE))
    for _ in range(60):
        nbytes, seconds = copy(40.0, 8 * SLICE)
        tracker.observe(
            LayerTimes(*copy(50.0), nbytes, seconds, sums([SLICE] * 8, [seconds / 8] * 8))
        )
    assert tracker.rates.cpu_gbps == pytest.approx(40.0, rel=0.01)
    assert tracker.rates.cpu_latency_s == 0.0
