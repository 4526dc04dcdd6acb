"""The split against cases worked by hand."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.split import (
    PathRates,
    best_fetch_count,
    cpu_seconds,
    fetch_seconds,
    layer_seconds,
    split_table,
)

# Slices of 1 GB make seconds easy: 10 GB/s of PCIe is 0.1 s a slice, 20 GB/s of CPU 0.05 s.
EASY = PathRates(10.0, 20.0, 10**9)


def test_seconds_of_each_path() -> None:
    assert fetch_seconds(3, EASY) == pytest.approx(0.3)
    assert cpu_seconds(3, EASY) == pytest.approx(0.15)
    slow_start = PathRates(10.0, 20.0, 10**9, fetch_latency_s=0.5, cpu_latency_s=0.25)
    assert fetch_seconds(1, slow_start) == pytest.approx(0.6)
    assert cpu_seconds(1, slow_start) == pytest.approx(0.3)
    assert fetch_seconds(0, slow_start) == cpu_seconds(0, slow_start) == 0.0


def test_a_third_is_fetched_when_the_cpu_is_twice_as_fast() -> None:
    # q* = m * 10 / 30: exact at multiples of 3
    assert [best_fetch_count(m, EASY) for m in (3, 6, 12)] == [1, 2, 4]
    assert layer_seconds(3, 1, EASY) == pytest.approx(0.1)
    # m = 1: q = 0 takes 0.05 s, q = 1 takes 0.1. m = 4: q = 1 0.15, q = 2 0.2
    assert split_table(4, EASY) == (0, 0, 1, 1, 1)


def test_a_tie_is_fetched() -> None:
    # m = 2: q = 0 takes 2 * 0.05, q = 1 takes max(0.1, 0.05): both 0.1 s, and fetching warms
    assert best_fetch_count(2, EASY) == 1
    even = PathRates(10.0, 10.0, 4096)
    assert split_table(5, even) == (0, 1, 1, 2, 2, 3)


def test_latencies_move_the_split() -> None:
    # a fetch that starts 1 s late never pays for 3 slices of 0.05 s on the CPU
    late = PathRates(10.0, 20.0, 10**9, fetch_latency_s=1.0)
    assert best_fetch_count(3, late) == 0
    # q = 1: 1.1 s and 39 * 0.05 = 1.95; they meet at 1 + 0.1 q = 0.05 (40 - q): q = 6.67.
    # q = 6: max(1.6, 1.7), q = 7: max(1.7, 1.65): a tie
    assert best_fetch_count(40, late) == 7


def test_the_measured_machine_fetches_one_expert_of_three() -> None:
    # H200 machine, 51 and 73 GB/s, 13.2192 MB experts as one slice: max(13.2/51, 26.4/73)
    whole = PathRates(51.0, 73.0, 13_219_200)
    assert best_fetch_count(3, whole) == 1
    # in quarters 12 * 51 / 124 = 4.94: 5 quarters are 0.324 ms fetched, 7 0.317 ms computed
    quarters = PathRates(51.0, 73.0, 3_304_800)
    assert best_fetch_count(12, quarters) == 5
    assert layer_seconds(12, 5, quarters) == pytest.approx(0.324e-3, rel=1e-3)
    # a single miss uses both paths: 2 quarters over PCIe are 0.1296 ms, all four there 0.259
    assert best_fetch_count(4, quarters) == 2
    assert layer_seconds(4, 2, quarters) == pytest.approx(0.1296e-3, rel=1e-3)


def test_a_missing_path_leaves_all_to_the_other() -> None:
    assert split_table(3, PathRates(0.0, 5.0, 4096)) == (0, 0, 0, 0)
    assert split_table(3, PathRates(5.0, 0.0, 4096)) == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="neither"):
        PathRates(0.0, 0.0, 4096)


@pytest.mark.parametrize(
    "broken", [{"pcie_gbps": -1.0}, {"cpu_gbps": float("nan")}, {"slice_nbytes": 0}]
)
def test_broken_rates_are_refused(broken: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(broken))):
        PathRates(**{"pcie_gbps": 1.0, "cpu_gbps": 1.0, "slice_nbytes": 4096, **broken})


def test_one_path_alone_wins_where_both_together_collapse() -> None:
    # together 10 and 10 GB/s, but PCIe alone 50: 4 slices alone 0.08 s, split 2 and 2 0.2 s
    collapse = PathRates(10.0, 10.0, 10**9, pcie_alone_gbps=50.0, cpu_alone_gbps=30.0)
    assert best_fetch_count(4, collapse) == 4
    assert layer_seconds(4, 4, collapse) == pytest.approx(0.08)
    assert layer_seconds(4, 2, collapse) == pytest.approx(0.2)
    swapped = PathRates(10.0, 10.0, 10**9, pcie_alone_gbps=30.0, cpu_alone_gbps=50.0)
    assert best_fetch_count(4, swapped) == 0


def test_an_impossible_count_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="4 of 3"):
        layer_seconds(3, 4, EASY)
