"""The plan of one layer, checked by hand on small caches."""

from __future__ import annotations

import pytest

from headrace.experts.plan_oracle import (
    CacheTables,
    CpuItem,
    Entry,
    LayerPlan,
    PlanShape,
    begin_step,
    new_tables,
    plan_layer,
)

SHAPE = PlanShape(num_layers=2, num_experts=4, num_slices=2, num_slots=3, max_fetch=4, window=64)
EVERYTHING = list(range(9))
# One use, counters 1: the floors are rate / (1 - 2^(-1 / half-life)).
FLOORS = tuple(
    rate / (1 - 2 ** (-1 / half)) for rate, half in ((0.02, 2), (0.003, 16), (0.0005, 512))
)


def value(*counters: float) -> float:
    a, b, c = (f + g for f, g in zip(counters, FLOORS, strict=True))
    return a * (b * c) ** 2


def plan(shape: PlanShape, tables: CacheTables, layer: int, *experts: int) -> LayerPlan:
    """One token, everything fetched."""
    weights = [[1.0] * len(experts)]
    return plan_layer(shape, tables, layer, [list(experts)], weights, EVERYTHING)


def test_a_cold_cache_takes_what_is_fetched_and_leaves_the_rest_to_the_cpu() -> None:
    tables = new_tables(SHAPE)
    begin_step(SHAPE, tables)
    assert (tables.victims, tables.free) == ([0, 1, 2], 3)
    made = plan_layer(
        SHAPE, tables, 0, [[2, 0], [0, -1]], [[0.75, 0.25], [1.0, 0.0]], [0, 1, 1, 2, 3]
    )
    # Pairs: expert 0 by tokens 0 and 1, then expert 2 by token 0. Equal values: expert 0 first.
    assert made.pairs == ((0, 0.25), (1, 1.0), (0, 0.75))
    assert made.pair_of == (2, 0, 1, -1)
    assert made.num_missing == 4
    assert made.hits == ()
    assert made.fetches == (Entry(0, 0, 0, 0, 2), Entry(1, 0, 1, 0, 2), Entry(2, 2, 0, 2, 1))
    assert made.admitted == (True, True, True)
    assert made.cpu == (CpuItem(2, 1, 2, 1),)
    assert tables.owner_of == [0, 1, 4]
    assert tables.slot_of[:6] == [0, 1, -1, -1, 2, -1]
    assert (tables.cursor, tables.free) == (3, 0)


def test_an_expert_counts_once_a_step_whoever_asked() -> None:
    tables = new_tables(SHAPE)
    begin_step(SHAPE, tables)
    plan_layer(SHAPE, tables, 1, [[1], [1], [1]], [[1.0]] * 3, EVERYTHING)
    assert [f[5] for f in tables.counters] == [1.0, 1.0, 1.0]
    assert tables.values[5] == pytest.approx(value(1, 1, 1), rel=1e-6)
    assert tables.values[4] == pytest.approx(value(0, 0, 0), rel=1e-6)
    begin_step(SHAPE, tables)
    faded = [2**-0.5, 2 ** (-1 / 16), 2 ** (-1 / 512)]
    assert [f[5] for f in tables.counters] == pytest.approx(faded, rel=1e-6)
    assert tables.values[5] == pytest.approx(value(*faded), rel=1e-6)


def test_what_finds_no_victim_passes_through_transit() -> None:
    tables = new_tables(SHAPE)
    for _ in range(2):
        begin_step(SHAPE, tables)
        first = plan(SHAPE, tables, 0, 0)  # slots 0 and 1
        second = plan(SHAPE, tables, 1, 3)
        # One slot is left, and all others serve experts of this step.
        assert second.admitted[-1:] == (False,)
        assert second.fetches[-1].slot == SHAPE.num_slots + len(second.fetches) - 1
    assert [entry.slot for entry in first.hits] == [0, 1]
    assert [entry.slot for entry in second.hits] == [2]


def test_an_eviction_forgets_the_owner() -> None:
    shape = PlanShape(
        num_layers=1, num_experts=3, num_slices=1, num_slots=1, max_fetch=1, window=32
    )
    tables = new_tables(shape)
    for expert in (0, 1):
        begin_step(shape, tables)
        made = plan(shape, tables, 0, expert)
    assert made.admitted == (True,)
    assert tables.slot_of == [-1, 0, -1]


def test_a_newcomer_must_beat_its_victim_by_the_margins() -> None:
    """A victim that was used n times in a row is worth v * 2^-2.5 (the only layer: its turn has just
    passed), a newcomer's first use 2^-1.5 of its value."""
    shape = PlanShape(
        num_layers=1, num_experts=2, num_slices=1, num_slots=1, max_fetch=1, window=32
    )
    outcome = []
    for uses in (1, 2, 3):
        tables = new_tables(shape)
        counters = [0.0, 0.0, 0.0]
        decay = [2 ** (-1 / half) for half in (2, 16, 512)]
        for _ in range(uses):
            begin_step(shape, tables)
            plan(shape, tables, 0, 0)
            counters = [f * d + 1 for f, d in zip(counters, decay, strict=True)]
        begin_step(shape, tables)
        worth = value(*(f * d for f, d in zip(counters, decay, strict=True))) * 2**-2.5
        wins = value(1, 1, 1) * 2**-1.5 > worth
        assert plan(shape, tables, 0, 1).admitted == (wins,)
        outcome.append(wins)
    assert outcome == [True, False, False]


def _four_cold(shape: PlanShape) -> CacheTables:
    """Experts 0 to 3 of a layer each, equally cold, in slots 0 to 3."""
    tables = new_tables(shape)
    begin_step(shape, tables)
    for layer in range(4):
        plan(shape, tables, layer, 0)
    begin_step(shape, tables)
    assert tables.victims == [0, 1, 2, 3]
    return tables


def test_among_equals_the_layer_whose_turn_has_passed_goes_first() -> None:
    shape = PlanShape(4, 3, 1, num_slots=4, max_fetch=3, window=32)
    tables = _four_cold(shape)
    # At layer 2: layer 3 comes next (2^-0.625), then 0, then 1; layer 2 last (2^-2.5).
    made = plan(shape, tables, 2, 1, 2)
    assert [entry.slot for entry in made.fetches] == [2, 1]
    assert tables.cursor == 0
    # At layer 3 both slots are taken; 0 and 3 are left, and layer 3's own goes first.
    made = plan(shape, tables, 3, 1)
    assert [entry.slot for entry in made.fetches] == [3]


def test_only_the_window_competes() -> None:
    shape = PlanShape(4, 3, 1, num_slots=4, max_fetch=3, window=2)
    tables = _four_cold(shape)
    # Slots 0 and 1 are the ranking's first; layer 1's turn is farther away than layer 0's.
    assert [entry.slot for entry in plan(shape, tables, 2, 1).fetches] == [1]
    # What was taken makes room in the window: 0 and 2 compete.
    assert [entry.slot for entry in plan(shape, tables, 3, 1).fetches] == [2]
    tables = _four_cold(shape)
    plan(shape, tables, 0, 0)  # a hit: slot 0 is no victim, and 1 and 2 compete
    assert tables.cursor == 0
    assert [entry.slot for entry in plan(shape, tables, 3, 1).fetches] == [2]
    assert tables.cursor == 1


def test_fetches_go_by_value() -> None:
    tables = new_tables(SHAPE)
    for _ in range(2):  # expert 1 has a value and no slot
        begin_step(SHAPE, tables)
        plan_layer(SHAPE, tables, 0, [[1]], [[1.0]], [0] * 9)
    begin_step(SHAPE, tables)
    made = plan_layer(SHAPE, tables, 0, [[0, 1, 2]], [[0.5, 0.25, 0.25]], [0, 1, 2, 3, 3, 3, 4])
    assert [(e.slot, e.expert, e.slice_index) for e in made.fetches] == [
        (0, 1, 0), (1, 1, 1), (2, 0, 0), (6, 0, 1),
    ]  # fmt: skip
    assert made.cpu == (CpuItem(2, 0, 2, 1), CpuItem(2, 1, 2, 1))


def test_nobody_routed_nothing_planned() -> None:
    tables = new_tables(SHAPE)
    begin_step(SHAPE, tables)
    made = plan_layer(SHAPE, tables, 0, [[-1, -1]], [[0.0, 0.0]], [0])
    assert (made.pairs, made.hits, made.fetches, made.cpu) == ((), (), (), ())
    assert all(f == 0.0 for counter in tables.counters for f in counter)
