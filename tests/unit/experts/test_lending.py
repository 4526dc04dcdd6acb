"""Which slots are lent, by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.experts.lending import lend


def _ints(*values: int):
    return np.array(values, np.int32)


def test_cold_slices_leave_and_hot_ones_move() -> None:
    # Slots 0..4 hold keys 5, 3, 0, 1, free; worth by key.
    values = np.array([9.0, 2.0, 0.0, 1.0, 0.0, 7.0], np.float32)
    owner_of, slot_of = _ints(5, 3, 0, 1, -1), _ints(2, 3, -1, 1, -1, 0)
    found = lend(slot_of, owner_of, values, 3)
    # The free slot and the two coldest, keys 3 and 1, make room; key 0 moves to where key 3 was.
    assert found.moves == ((2, 1),)
    assert found.owner_of.tolist() == [5, 0, -1, -1, -1]
    assert found.slot_of.tolist() == [1, -1, -1, -1, -1, 0]
    assert owner_of.tolist() == [5, 3, 0, 1, -1], "what was given is left as it was"


def test_free_slots_cost_nothing() -> None:
    found = lend(_ints(0, 1), _ints(0, 1, -1, -1), np.ones(2, np.float32), 2)
    assert found.moves == ()
    assert found.owner_of.tolist() == [0, 1, -1, -1]


@given(st.integers(0, 8), st.lists(st.floats(0, 9), min_size=8, max_size=8), st.integers(0, 255))
def test_the_most_valuable_stay_and_the_tables_agree(
    count: int, worth: list[float], mask: int
) -> None:
    values = np.array(worth, np.float32)
    owner_of = _ints(*(key if mask >> key & 1 else -1 for key in range(8)))
    slot_of = _ints(*(key if mask >> key & 1 else -1 for key in range(8)))
    found = lend(slot_of, owner_of, values, count)
    assert (found.owner_of[8 - count :] == -1).all()
    held = [int(key) for key in found.owner_of if key >= 0]
    before = sorted((float(values[key]) for key in range(8) if mask >> key & 1), reverse=True)
    kept = min(len(before), 8 - count)
    assert sorted((float(values[key]) for key in held), reverse=True) == before[:kept]
    for key in range(8):
        slot = int(found.slot_of[key])
        assert (slot >= 0) == (key in held)
        assert slot < 0 or found.owner_of[slot] == key
