"""What one layer's plan decides, in plain Python: the oracle of ``ops.triton.expert_plan``.

A *key* names a slice of an expert over the whole model: (layer * experts + expert) * slices + slice.
An *owner* is the key whose bytes a slot holds, -1 for a free slot. A *pair* is one use of an expert by
a token, with the router's weight; pairs are numbered by (expert, token), so that those of an expert
follow each other.

When a step begins (it takes up to 16 tokens through all layers), counters decay, every expert is
valued anew and all slots are ranked: empty ones first, the others by (value, owner). The arithmetic is
that of ``cache_policy.ValuePolicy``, float32 throughout. Then in each layer:

1. Every expert that is used, by however many tokens, counts once more and has its value renewed.
2. A slice of a used expert that has a slot is a *hit*; the others are missing, m of them.
3. q = split_table[m] of the missing slices are fetched, those of the experts of highest value first
   (equal values: the smaller expert first; within an expert by slice). The CPU computes the rest.
4. If slices of this layer were prefetched (below), those that are needed are fetched first, in their
   order, and what has arrived of them is no longer work for anybody: with d slices' worth of it,
   rounded, q = d + split_table[m - d]. Such a fetch is computed where it was prefetched to.
5. Empty slots take the first fetches. The f-th of the others is offered the f-th victim: of the
   ranking's first ``window`` slots whose experts nobody used in this step, ordered by
   value * turn (``cache_policy``), the earlier in the ranking among equals. It takes the slot if
   its value * ADMISSION is higher; else it passes through transit slot f, and the cache stays as it
   is. What takes a slot was used, so no slot is taken twice in a step.

With batch 1, one slice an expert and everything fetched (q = m, at least top_k fetches in a layer) that
is ``ValuePolicy`` as ``replay.replay_policy`` drives it, hit for hit; with more tokens or slices it is
``ValuePolicy`` too, if ``look_up`` is given each step's distinct experts and every miss is offered.

Before a layer's plan, while attention runs, ``foresee`` turns a guess of its routing into a list of
slices to prefetch. They travel until the plan is made, in chunks, one slice after the other; the plan
knows how many chunks have arrived, a fetch of a slice that has begun brings only the rest.

Which bytes lie where never changes a result: the host has all of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.experts.cache_policy import ValueConstants, value_constants, values_of

FREE = -1
NO_PAIR = -1
NO_PLACE = -1


def _float32(value: float) -> float:
    """``value`` rounded to float32. One operation on two float32 values in double, rounded once, is
    the operation in float32 (double has more than twice its digits)."""
    return array("f", (value,))[0]


@dataclass(frozen=True)
class PlanShape:
    """Sizes that the plan works with.

    num_slots: slots that can own a slice; slots num_slots to num_slots + max_fetch - 1 are transit
    max_fetch: most slices fetched in a layer
    window: how many slots of the ranking compete to be a layer's victims, ``ValueConstants.window``
    max_prefetch: most slices prefetched for a layer; their slots follow the transit ones, twice as many:
        those of a layer are still computed when the next layer's begin to arrive
    """

    num_layers: int
    num_experts: int
    num_slices: int
    num_slots: int
    max_fetch: int
    window: int
    max_prefetch: int = 0

    @property
    def all_slots(self) -> int:
        """Slots that can own a slice, of transit and of prefetches."""
        return self.num_slots + self.max_fetch + 2 * self.max_prefetch

    def prefetch_slot(self, layer: int, place: int) -> int:
        return self.num_slots + self.max_fetch + layer % 2 * self.max_prefetch + place

    def key(self, layer: int, expert: int, slice_index: int) -> int:
        return (layer * self.num_experts + expert) * self.num_slices + slice_index


@dataclass
class CacheTables:
    """The cache's state; the kernel keeps the same on the GPU.

    slot_of: slot of every key, -1 if not resident; owner_of: key of every slot, -1 if free
    counters, values, last_use: of every expert, [layer * experts + expert]; three counters and the
        value as float32, as of the step's begin or of the use in this step; the step of the last use
    victims: the step's ranking of slots; cursor: nothing before it is a victim in this step;
    free: empty slots left, those at the cursor; now: the step, from 1
    """

    slot_of: list[int]
    owner_of: list[int]
    counters: list[array[float]]
    values: array[float]
    last_use: list[int]
    constants: ValueConstants
    victims: list[int] = field(default_factory=list[int])
    cursor: int = 0
    free: int = 0
    now: int = 0

    def use(self, expert_row: int) -> None:
        """Count a use of ``layer * experts + expert`` in this step."""
        for counter in self.counters:
            counter[expert_row] += 1.0
        own = [(counter[expert_row],) for counter in self.counters]
        self.values[expert_row] = values_of(own, self.constants)[0]
        self.last_use[expert_row] = self.now


@dataclass(frozen=True)
class Entry:
    """A slice that the GPU computes: from ``slot``, for pairs first_pair to first_pair + num_pairs - 1."""

    slot: int
    expert: int
    slice_index: int
    first_pair: int
    num_pairs: int


@dataclass(frozen=True)
class Prefetched:
    """What was sent on the way for a layer before its plan.

    items: (expert, slice) in the order in which they travel, at most ``max_prefetch``
    arrived: chunks that are there, counted through all of them; slice_chunks: of a slice
    """

    items: tuple[tuple[int, int], ...] = ()
    arrived: int = 0
    slice_chunks: int = 1

    def arrived_of(self, place: int) -> int:
        """Chunks of the ``place``-th slice that are there."""
        return min(max(self.arrived - place * self.slice_chunks, 0), self.slice_chunks)


NOTHING_PREFETCHED = Prefetched()


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
    hits, cpu: by (expert, slice); fetches: prefetched ones by place, then by falling value;
        ``admitted`` says which stay
    origins: of each fetch its place among the prefetched, -1 for none
    homes: of each prefetched slice the slot that keeps it once it was computed, -1 for none
    """

    pairs: tuple[tuple[int, float], ...]
    pair_of: tuple[int, ...]
    hits: tuple[Entry, ...]
    fetches: tuple[Entry, ...]
    admitted: tuple[bool, ...]
    cpu: tuple[CpuItem, ...]
    num_missing: int
    origins: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()


def new_tables(shape: PlanShape) -> CacheTables:
    """A cold cache."""
    rows = shape.num_layers * shape.num_experts
    constants = value_constants(shape.num_layers, shape.num_slices)
    counters = [array("f", bytes(4 * rows)) for _ in constants.decay]
    return CacheTables(
        slot_of=[FREE] * (rows * shape.num_slices),
        owner_of=[FREE] * shape.num_slots,
        counters=counters,
        values=values_of(counters, constants),
        last_use=[0] * rows,
        constants=constants,
    )


def begin_step(shape: PlanShape, tables: CacheTables) -> None:
    """Start a step: advance the clock, age the counters and rank all slots."""
    tables.now += 1
    for at, decay in enumerate(tables.constants.decay):
        tables.counters[at] = array("f", [f * decay for f in tables.counters[at]])
    tables.values = values_of(tables.counters, tables.constants)
    owner_of, values, slices = tables.owner_of, tables.values, shape.num_slices

    def rank(slot: int) -> tuple[float, int, int]:
        owner = owner_of[slot]
        return (-1.0, owner, slot) if owner == FREE else (values[owner // slices], owner, slot)

    tables.victims = sorted(range(shape.num_slots), key=rank)
    tables.cursor = 0
    tables.free = owner_of.count(FREE)


def plan_layer(
    shape: PlanShape,
    tables: CacheTables,
    layer: int,
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    split_table: Sequence[int],
    prefetched: Prefetched = NOTHING_PREFETCHED,
) -> LayerPlan:
    """Decide one layer, once a step, and update ``tables``. ids, weights: [T][k]; -1 is nobody."""
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
        tables.use(layer * shape.num_experts + expert)

    hits: list[Entry] = []
    missing: list[tuple[int, int]] = []
    for expert, pairs in ranges.items():
        for piece in range(shape.num_slices):
            slot = tables.slot_of[shape.key(layer, expert, piece)]
            if slot == FREE:
                missing.append((expert, piece))
            else:
                hits.append(Entry(slot, expert, piece, *pairs))

    place_of = {item: place for place, item in enumerate(prefetched.items)}
    needed = [place_of[item] for item in missing if item in place_of]
    chunks = sum(prefetched.arrived_of(place) for place in needed)
    ahead = (chunks + prefetched.slice_chunks // 2) // prefetched.slice_chunks

    def urgency(item: tuple[int, int]) -> tuple[float, float, int, int]:
        value = tables.values[layer * shape.num_experts + item[0]]
        return place_of.get(item, len(place_of)), 0.0 if item in place_of else -value, *item

    wanted = ahead + split_table[len(missing) - ahead]
    num_fetch = min(wanted, len(missing), shape.max_fetch)
    fetched = sorted(missing, key=urgency)[:num_fetch]
    origins = [place_of.get(item, NO_PLACE) for item in fetched]
    slots, admitted = _admit(shape, tables, layer, fetched, len(needed))
    homes = [FREE] * len(prefetched.items)
    for f, place in enumerate(origins):
        if place != NO_PLACE:
            homes[place] = slots[f] if admitted[f] else FREE
            slots[f] = shape.prefetch_slot(layer, place)
    on_cpu = sorted(set(missing) - set(fetched))
    return LayerPlan(
        pairs=tuple((token, weights[token][place]) for _, token, place in uses),
        pair_of=tuple(pair_of),
        hits=tuple(hits),
        fetches=tuple(Entry(slot, e, s, *ranges[e]) for slot, (e, s) in zip(slots, fetched)),
        admitted=tuple(admitted),
        cpu=tuple(CpuItem(e, s, *ranges[e]) for e, s in on_cpu),
        num_missing=len(missing),
        origins=tuple(origins),
        homes=tuple(homes),
    )


def foresee(
    shape: PlanShape, tables: CacheTables, layer: int, guesses: Sequence[Sequence[int]]
) -> tuple[tuple[int, int], ...]:
    """``Prefetched.items`` for these experts: [T][k], the surest of a token first, -1 is nobody.

    First choices of all tokens come before second ones. Only what has no slot travels.
    """
    top_k = len(guesses[0]) if guesses else 0
    order = [row[place] for place in range(top_k) for row in guesses if row[place] >= 0]
    items = [
        (expert, piece)
        for expert in dict.fromkeys(order)
        for piece in range(shape.num_slices)
        if tables.slot_of[shape.key(layer, expert, piece)] == FREE
    ]
    return tuple(items[: shape.max_prefetch])


def _admit(
    shape: PlanShape,
    tables: CacheTables,
    layer: int,
    fetched: Sequence[tuple[int, int]],
    num_foreseen: int,
) -> tuple[list[int], list[bool]]:
    """Give every fetch a slot, and write the admitted ones into the tables. The ``num_foreseen`` first
    are in no order of value."""
    slots = [shape.num_slots + f for f in range(len(fetched))]
    admitted = [False] * len(fetched)

    def move_in(f: int, slot: int) -> None:
        if tables.owner_of[slot] != FREE:
            tables.slot_of[tables.owner_of[slot]] = FREE
        key = shape.key(layer, *fetched[f])
        tables.slot_of[key], tables.owner_of[slot] = slot, key
        slots[f], admitted[f] = slot, True

    empty = min(tables.free, len(fetched))
    for f in range(empty):
        move_in(f, tables.victims[tables.cursor + f])
    tables.free -= empty
    tables.cursor += empty
    if empty == len(fetched):
        return slots, admitted
    victims = iter(_victims(shape, tables, layer))
    victim = next(victims, None)
    for f in range(empty, len(fetched)):
        if victim is None:
            break
        worth, slot = victim
        value = tables.values[layer * shape.num_experts + fetched[f][0]]
        if _float32(value * tables.constants.admission) > worth:
            move_in(f, slot)
            victim = next(victims, None)
        elif f >= num_foreseen:
            break  # later fetches are worth no more, later victims no less
    return slots, admitted


def _victims(shape: PlanShape, tables: CacheTables, layer: int) -> list[tuple[float, int]]:
    """(worth, slot) of this layer's victims, the first to go first. Moves the cursor to that of
    them which is first in the ranking."""
    found: list[tuple[float, int]] = []
    for place in range(tables.cursor, shape.num_slots):
        slot = tables.victims[place]
        row = tables.owner_of[slot] // shape.num_slices
        if tables.last_use[row] == tables.now:
            continue
        if not found:
            tables.cursor = place
        distance = (row // shape.num_experts - layer - 1) % shape.num_layers
        found.append((_float32(tables.values[row] * tables.constants.turn[distance]), slot))
        if len(found) == shape.window:
            break
    return sorted(found, key=lambda victim: victim[0])
