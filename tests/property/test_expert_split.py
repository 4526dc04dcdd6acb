"""The split against trying every q, and the absence of a dead zone on any pair of rates."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headrace.experts.promotion import (
    GAIN,
    PromotionQueue,
    Valued,
    choose_promotions,
    idle_nbytes,
)
from headrace.experts.split import (
    PathRates,
    best_fetch_count,
    layer_seconds,
    split_table,
)

# From a USB enclosure to a coherent link.
GBPS = st.floats(0.001, 1000.0)
LATENCY = st.sampled_from([0.0, 1e-6, 3.7e-6, 1e-4])
SLICES = st.integers(4096, 64 << 20)


@st.composite
def path_rates(draw: st.DrawFn) -> PathRates:
    pcie, cpu = draw(GBPS), draw(GBPS)
    more = st.none() | st.floats(1.0, 4.0)
    pcie_alone, cpu_alone = draw(more), draw(more)
    return PathRates(
        pcie,
        cpu,
        draw(SLICES),
        draw(LATENCY),
        draw(LATENCY),
        None if pcie_alone is None else pcie * pcie_alone,
        None if cpu_alone is None else cpu * cpu_alone,
    )


@given(missing=st.integers(0, 130), rates=path_rates())
def test_the_best_count_equals_trying_all(missing: int, rates: PathRates) -> None:
    q = best_fetch_count(missing, rates)
    every = [layer_seconds(missing, n, rates) for n in range(missing + 1)]
    assert every[q] <= min(every) * (1 + 1e-8)
    # no larger count is as fast, ties to fetching
    assert all(seconds > every[q] for seconds in every[q + 1 :])


@given(rates=path_rates())
@settings(max_examples=30)
def test_the_table_is_the_counts(rates: PathRates) -> None:
    assert split_table(9, rates) == tuple(best_fetch_count(m, rates) for m in range(10))


@given(missing=st.integers(1, 64), pcie=GBPS, cpu=GBPS, faster=st.floats(1.0, 10.0))
def test_a_faster_link_never_fetches_less(
    missing: int, pcie: float, cpu: float, faster: float
) -> None:
    slow, fast = PathRates(pcie, cpu, 10**6), PathRates(pcie * faster, cpu, 10**6)
    assert best_fetch_count(missing, slow) <= best_fetch_count(missing, fast)


@given(pcie=st.floats(0.1, 100.0), cpu=st.floats(1.0, 200.0), slice_nbytes=SLICES)
@settings(max_examples=40, deadline=None)
def test_a_cold_cache_warms_on_any_pair_of_rates(
    pcie: float, cpu: float, slice_nbytes: int
) -> None:
    """Eight slices asked for by every layer visit, eight free places. The number of visits needed
    grows with the ratio of the rates, as the bytes demand, and is finite."""
    rates = PathRates(pcie, cpu, slice_nbytes)
    resident: set[int] = set()
    queue = PromotionQueue(slice_nbytes)
    visits, idle_for = 0, 0.0
    while len(resident) < 8:
        missing = [key for key in range(8) if key not in resident]
        q = best_fetch_count(len(missing), rates)
        window_s = layer_seconds(len(missing), q, rates)
        fetched = missing[:q]
        for key in fetched:
            queue.drop(key)
        resident.update(fetched)
        budget = idle_nbytes(window_s, q, rates)
        left = [Valued(key, 8.0 - key) for key in missing[q:]]
        if queue.idle:
            queue.offer(choose_promotions(left, [], num_free=len(left), limit=2))
        pieces = queue.advance(budget)
        resident.update(p.promotion.key for p in pieces if p.last)
        # a guess never lasts longer than the time that demand leaves
        copied_s = sum(p.nbytes for p in pieces) / (rates.pcie_gbps * 1e9)
        demand_s = q * slice_nbytes / (rates.pcie_gbps * 1e9)
        assert demand_s + copied_s <= window_s * (1 + 1e-6)
        visits += 1
        idle_for += window_s
        # promotion gets 0.8 of PCIe's time: 8 slices need 10 slice times, and a few visits to start; budgets
        # are whole bytes, so that each visit may lose one, of two or three where the CPU is so much faster
        needed_s = (1.1 * 10 * slice_nbytes + visits / 0.8) / (pcie * 1e9)
        assert visits <= 16 or idle_for <= needed_s + 16 * window_s


@given(
    values=st.lists(st.floats(0.0, 16.0), min_size=1, max_size=24),
    places=st.integers(0, 12),
    limit=st.integers(1, 4),
)
def test_promotion_comes_to_rest(values: list[float], places: int, limit: int) -> None:
    """With scores that do not change, promotion ends, and what is left out beats nobody by the gain."""
    resident: dict[int, float] = {}
    for _ in range(2 * len(values) + 2):
        outside = [Valued(k, v) for k, v in enumerate(values) if k not in resident]
        inside = [Valued(k, v) for k, v in resident.items()]
        chosen = choose_promotions(outside, inside, num_free=places - len(resident), limit=limit)
        if not chosen:
            break
        for promotion in chosen:
            if promotion.victim is not None:
                assert values[promotion.key] > values[promotion.victim]
                del resident[promotion.victim]
            resident[promotion.key] = values[promotion.key]
        assert len(resident) <= places
    else:
        pytest.fail("promotion goes on for ever")
    if len(resident) == places and places:
        floor = min(resident.values())
        assert all(v <= GAIN * floor for k, v in enumerate(values) if k not in resident)
