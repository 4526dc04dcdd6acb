"""Slots lent to the ring while a long prompt streams: the coldest ones, moved to the arena's end.

A ring of a few experts runs dry while attention of a long chunk runs; with some hundred megabytes more
PCIe never stops. What the chunk does not need for that long stays: hot slices at the arena's end change
places with cold ones. Lent slots are empty afterwards, and the first misses fill them.

Pure decisions: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.experts.plan_oracle import FREE

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Lending:
    """What makes the last slots free.

    moves: (from slot, to slot), no slot twice; slot_of, owner_of: the tables afterwards
    """

    moves: tuple[tuple[int, int], ...]
    slot_of: Ints
    owner_of: Ints


def lend(slot_of: Ints, owner_of: Ints, values: npt.NDArray[np.float32], count: int) -> Lending:
    """Free the last ``count`` slots by evicting as many slices of least value.

    Args:
        slot_of: of every key, -1: none; owner_of: key of every slot, -1: free; values: of every key
        count: at most the slots that there are
    """
    slot_of, owner_of = slot_of.copy(), owner_of.copy()
    first = len(owner_of) - count
    worth = np.where(owner_of == FREE, -np.inf, values[owner_of])
    # Of equals, those that are to be lent first: fewer moves.
    order = np.lexsort((-np.arange(len(owner_of)), worth))
    evicted = order[:count]
    keys = owner_of[evicted]
    slot_of[keys[keys != FREE]] = FREE
    owner_of[evicted] = FREE
    hot = np.flatnonzero(owner_of[first:] != FREE) + first
    cold = np.sort(evicted[evicted < first])
    moves = tuple((int(a), int(b)) for a, b in zip(hot, cold, strict=True))
    for source, target in moves:
        owner_of[target], owner_of[source] = owner_of[source], FREE
        slot_of[owner_of[target]] = target
    return Lending(moves, slot_of, owner_of)
