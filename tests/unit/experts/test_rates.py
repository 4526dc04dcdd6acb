"""Live rates: robust to outliers, led by lasting changes, and back again."""

from __future__ import annotations

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
)
from headrace.experts.split import PathRates, best_fetch_count

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
