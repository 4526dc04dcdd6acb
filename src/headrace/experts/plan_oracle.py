"""What one layer's plan decides, in plain Python: the oracle of ``ops.triton.expert_plan``.

A *key* names a slice of an expert over the whole model: (layer * experts + expert) * slices + slice.
An *owner* is the key whose bytes a slot holds, -1 for a free slot. A *pair* is one use of an expert by
a token, with the router's weight; pairs are numbered by (expert, token), so that those of an expert
follow each other.

In one layer:

1. Every expert that is used has its score renewed: score * 2 ** (-(now - last use) / half-life) + 1,
   in float32. Steps are the clock: a step runs up to 16 tokens through all layers.
2. A slice of a used expert that has a slot is a *hit*; the others are missing, m of them.
3. q = split_table[m] of the missing slices are fetched, those of the experts of highest score first
   (equal scores: the smaller expert first; within an expert by slice). The CPU computes the rest.
4. The f-th fetch is offered the f-th victim: the next slots of the ranking (made once a step, the
   least valuable first) that no expert used in this layer owns. It takes the slot if its score is
   higher than that of the victim's owner now; else it passes through transit slot f, and the cache
   stays as it is. The ranking is consumed up to the last slot taken, so that no slot is taken twice
   in a step.

Which bytes lie where never changes a result: the host has all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

FREE = -1
NO_PAIR = -1
# Steps after which a use no longer counts, in half-lives: 2 ** -31 of it is left, less than float32
# resolves beside the 1 of a new use.
FORGET_HALF_LIVES = 31


def float32(value: float) -> float:
    """``value`` rounded to float32. One operation on two float32 values in double, rounded once, is
    the operation in float32 (double has more than twice its digits)."""
    return struct.unpack("f", struct.pack("f", value))[0]


def decay_table(half_life: float) -> list[float]:
    """What is left of a use after 0, 1, 2, ... steps, float32; the last entry (0) serves all later ones."""
    steps = max(1, int(half_life * FORGET_HALF_LIVES))
    return [float32(2.0 ** (-dt / half_life)) for dt in range(steps)] + [0.0]


@dataclass(frozen=True)
class PlanShape:
    """Sizes that the plan works with.

    num_slots: slots that can own a slice; slots num_slots to num_slots + max_fetch - 1 are transit
    max_fetch: most slices fetched in a layer
    window: how many entries of the ranking a layer looks at
    """

    num_layers: int
    num_experts: int
    num_slices: int
    num_slots: int
    max_fetch: int
    window: int

    def key(self, layer: int, expert: int, slice_index: int) -> int:
        return (layer * self.num_experts + expert) * self.num_slices + slice_index


@dataclass
class CacheTables:
    """The cache's state; the kernel keeps the same on the GPU.

    slot_of: slot of every key, -1 if not resident; owner_of: key of every slot, -1 if free
    score, last_use: of every expert, [layer * experts + expert]; scores are float32
    victims, cursor: the step's ranking of slots and how much of it is consumed; now: the step
    """

    slot_of: list[int]
    owner_of: list[int]
    score: list[float]
    last_use: list[int]
    decay: Sequence[float]
    victims: list[int] = field(default_factory=list[int])
    cursor: int = 0
    now: int = 0

    def value(self, expert_row: int) -> float:
        """The score of ``layer * experts + expert`` at this step."""
        age = min(self.now - self.last_use[expert_row], len(self.decay) - 1)
        return float32(self.score[expert_row] * self.decay[age])


@dataclass(frozen=True)
class Entry:
    """A slice that the GPU computes: from ``slot``, for pairs first_pair to first_pair + num_pairs - 1."""

    slot: int
    expert: int
    slice_index: int
    first_pair: int
    num_pairs: int


@dataclass(frozen=True)
class CpuItem:
    """A slice that the CPU computes; the fields of ``request_block``'s items."""

    expert: int
    slice_index: int
    first_pair: int
    num_pairs: int


@dataclass(frozen=True)
class LayerPlan:
    """What the plan decided.

    pairs: (token, weight) by (expert, token)
    pair_of: for every id, token by token, its pair; -1 for the id -1
    hits, cpu: by (expert, slice); fetches: by falling score, ``admitted`` says which stay
    """

    pairs: tuple[tuple[int, float], ...]
    pair_of: tuple[int, ...]
    hits: tuple[Entry, ...]
    fetches: tuple[Entry, ...]
    admitted: tuple[bool, ...]
    cpu: tuple[CpuItem, ...]
    num_missing: int


def new_tables(shape: PlanShape, half_life: float) -> CacheTables:
    """A cold cache."""
    rows = shape.num_layers * shape.num_experts
    return CacheTables(
        slot_of=[FREE] * (rows * shape.num_slices),
        owner_of=[FREE] * shape.num_slots,
        score=[0.0] * rows,
        last_use=[0] * rows,
        decay=decay_table(half_life),
    )


def begin_step(shape: PlanShape, tables: CacheTables) -> None:
    """Start a step: advance the clock and rank all slots, free ones first, then by rising value of
    their owners; the smaller slot first among equals."""
    tables.now += 1
    tables.cursor = 0
    ranked = sorted((_slot_value(shape, tables, s), s) for s in range(shape.num_slots))
    tables.victims = [slot for _, slot in ranked]


def plan_layer(
    shape: PlanShape,
    tables: CacheTables,
    layer: int,
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    split_table: Sequence[int],
) -> LayerPlan:
    """Decide one layer and update ``tables``. ids, weights: [T][k]; -1 is nobody."""
    uses = sorted(
        (expert, token, place)
        for token, row in enumerate(ids)
        for place, expert in enumerate(row)
        if expert >= 0
    )
    top_k = len(ids[0]) if ids else 0
    pair_of = [NO_PAIR] * (len(ids) * top_k)
    ranges: dict[int, tuple[int, int]] = {}
    for pair, (expert, token, place) in enumerate(uses):
        pair_of[token * top_k + place] = pair
        first, count = ranges.get(expert, (pair, 0))
        ranges[expert] = (first, count + 1)
    for expert in ranges:
        row = layer * shape.num_experts + expert
        tables.score[row] = float32(tables.value(row) + 1.0)
        tables.last_use[row] = tables.now

    hits: list[Entry] = []
    missing: list[tuple[int, int]] = []
    for expert, pairs in ranges.items():
        for piece in range(shape.num_slices):
            slot = tables.slot_of[shape.key(layer, expert, piece)]
            if slot == FREE:
                missing.append((expert, piece))
            else:
                hits.append(Entry(slot, expert, piece, *pairs))

    def urgency(item: tuple[int, int]) -> tuple[float, int, int]:
        return -tables.score[layer * shape.num_experts + item[0]], *item

    num_fetch = min(split_table[len(missing)], len(missing), shape.max_fetch)
    fetched = sorted(missing, key=urgency)[:num_fetch]
    slots, admitted = _admit(shape, tables, layer, fetched, set(ranges))
    on_cpu = sorted(set(missing) - set(fetched))
    return LayerPlan(
        pairs=tuple((token, weights[token][place]) for _, token, place in uses),
        pair_of=tuple(pair_of),
        hits=tuple(hits),
        fetches=tuple(Entry(slot, e, s, *ranges[e]) for slot, (e, s) in zip(slots, fetched)),
        admitted=tuple(admitted),
        cpu=tuple(CpuItem(e, s, *ranges[e]) for e, s in on_cpu),
        num_missing=len(missing),
    )


def _slot_value(shape: PlanShape, tables: CacheTables, slot: int) -> float:
    owner = tables.owner_of[slot]
    return -1.0 if owner == FREE else tables.value(owner // shape.num_slices)


def _admit(
    shape: PlanShape,
    tables: CacheTables,
    layer: int,
    fetched: Sequence[tuple[int, int]],
    used: set[int],
) -> tuple[list[int], list[bool]]:
    """Give every fetch a slot, and write the admitted ones into the tables."""
    seen = tables.victims[tables.cursor : tables.cursor + shape.window]
    offered: list[tuple[int, int]] = []  # place in the window, slot
    for place, slot in enumerate(seen):
        owner_row, _ = divmod(tables.owner_of[slot], shape.num_slices)
        owner_layer, owner_expert = divmod(owner_row, shape.num_experts)
        if tables.owner_of[slot] == FREE or owner_layer != layer or owner_expert not in used:
            offered.append((place, slot))
    slots = [shape.num_slots + f for f in range(len(fetched))]
    admitted = [False] * len(fetched)
    consumed = 0
    for f, ((expert, piece), (place, slot)) in enumerate(zip(fetched, offered)):
        if tables.score[layer * shape.num_experts + expert] <= _slot_value(shape, tables, slot):
            continue
        if tables.owner_of[slot] != FREE:
            tables.slot_of[tables.owner_of[slot]] = FREE
        key = shape.key(layer, expert, piece)
        tables.slot_of[key], tables.owner_of[slot] = slot, key
        slots[f], admitted[f] = slot, True
        consumed = place + 1
    tables.cursor += consumed
    return slots, admitted
