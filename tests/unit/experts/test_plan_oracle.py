"""The plan of one layer, checked by hand on small caches."""

from __future__ import annotations

import pytest

from headrace.experts.plan_oracle import (
    CpuItem,
    Entry,
    PlanShape,
    begin_step,
    decay_table,
    new_tables,
    plan_layer,
)

SHAPE = PlanShape(num_layers=2, num_experts=4, num_slices=2, num_slots=3, max_fetch=4, window=8)


def test_a_cold_cache_takes_what_is_fetched_and_leaves_the_rest_to_the_cpu() -> None:
    tables = new_tables(SHAPE, half_life=4.0)
    begin_step(SHAPE, tables)
    plan = plan_layer(
        SHAPE, tables, 0, [[2, 0], [0, -1]], [[0.75, 0.25], [1.0, 0.0]], [0, 1, 1, 2, 3]
    )
    # Pairs: expert 0 by tokens 0 and 1, then expert 2 by token 0. Equal scores: expert 0 first.
    assert plan.pairs == ((0, 0.25), (1, 1.0), (0, 0.75))
    assert plan.pair_of == (2, 0, 1, -1)
    assert plan.num_missing == 4
    assert plan.hits == ()
    assert plan.fetches == (Entry(0, 0, 0, 0, 2), Entry(1, 0, 1, 0, 2), Entry(2, 2, 0, 2, 1))
    assert plan.admitted == (True, True, True)
    assert plan.cpu == (CpuItem(2, 1, 2, 1),)
    assert tables.owner_of == [0, 1, 4]
    assert tables.slot_of[:6] == [0, 1, -1, -1, 2, -1]
    assert tables.cursor == 3


def test_what_does_not_beat_its_victim_passes_through_transit() -> None:
    tables = new_tables(SHAPE, half_life=4.0)
    begin_step(SHAPE, tables)
    everything = [0, 1, 2, 3, 4]
    plan_layer(SHAPE, tables, 0, [[0]], [[1.0]], everything)  # slots 0 and 1
    plan = plan_layer(SHAPE, tables, 1, [[3]], [[1.0]], everything)
    # One free slot; the ranking is then exhausted, so the second slice goes through transit slot 1.
    assert [entry.slot for entry in plan.fetches] == [2, SHAPE.num_slots + 1]
    assert plan.admitted == (True, False)
    # Next step, same experts: all scores equal, nobody beats anybody.
    begin_step(SHAPE, tables)
    assert plan_layer(SHAPE, tables, 0, [[0]], [[1.0]], everything).hits == (
        Entry(0, 0, 0, 0, 1),
        Entry(1, 0, 1, 0, 1),
    )
    plan = plan_layer(SHAPE, tables, 1, [[3]], [[1.0]], everything)
    assert [entry.slot for entry in plan.hits] == [2]
    # The victim by the ranking is slot 0, but its owner has just been used: 2 ** -0.25 + 1 each.
    assert plan.admitted == (False,)
    assert tables.score[0] == tables.score[7] == pytest.approx(2**-0.25 + 1, rel=1e-7)


def test_a_hit_of_this_layer_is_no_victim_and_fetches_go_by_score() -> None:
    tables = new_tables(SHAPE, half_life=4.0)
    everything = [0, 1, 2, 3, 4]
    for _ in range(2):  # expert 1 is warm in score
        begin_step(SHAPE, tables)
        plan_layer(SHAPE, tables, 0, [[1]], [[1.0]], [0, 0, 0])
    begin_step(SHAPE, tables)
    plan_layer(SHAPE, tables, 0, [[0]], [[1.0]], everything)
    begin_step(SHAPE, tables)
    assert tables.victims == [2, 0, 1]
    plan = plan_layer(SHAPE, tables, 0, [[0, 1, 2]], [[0.5, 0.25, 0.25]], [0, 1, 2, 2, 2])
    assert [entry.slot for entry in plan.hits] == [0, 1]
    # Expert 1 has the higher score; slots 0 and 1 are hits, so only slot 2 can be taken.
    assert [(e.slot, e.expert, e.slice_index) for e in plan.fetches] == [(2, 1, 0), (4, 1, 1)]
    assert plan.cpu == (CpuItem(2, 0, 2, 1), CpuItem(2, 1, 2, 1))


def test_an_eviction_forgets_the_owner() -> None:
    shape = PlanShape(num_layers=1, num_experts=3, num_slices=1, num_slots=1, max_fetch=1, window=4)
    tables = new_tables(shape, half_life=1.0)
    for expert in (0, 1, 1):
        begin_step(shape, tables)
        plan = plan_layer(shape, tables, 0, [[expert]], [[1.0]], [0, 1])
    # Step 2: 1.0 beats 0.5. Step 3 hits.
    assert [entry.expert for entry in plan.hits] == [1]
    assert tables.slot_of == [-1, 0, -1]


def test_nobody_routed_nothing_planned() -> None:
    tables = new_tables(SHAPE, half_life=4.0)
    begin_step(SHAPE, tables)
    plan = plan_layer(SHAPE, tables, 0, [[-1, -1]], [[0.0, 0.0]], [0])
    assert (plan.pairs, plan.hits, plan.fetches, plan.cpu) == ((), (), (), ())
    assert tables.score == [0.0] * 8


def test_the_decay_halves_and_ends_at_zero() -> None:
    table = decay_table(2.0)
    assert table[0] == 1.0
    assert table[2] == 0.5
    assert table[-1] == 0.0
    assert len(table) == 63
