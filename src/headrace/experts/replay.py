"""Replays recorded routing against expert caches: any policy of ``cache_policy``, and by formulas of
their own decayed frequency, the best static set and Belady's optimum.

A *visit* is what one token asks of one layer: the experts it was routed to, as keys that are unique
over the model (``layer * num_experts + expert``). All of a visit's experts are looked up at once,
against the cache as the visit finds it; then the cache changes. One cache serves all layers.

A miss need not be admitted (the CPU can compute the expert where it lies), so the optimum here is
Belady's with bypass: after each visit it keeps, of what was resident and what was just used, the
experts whose next use is nearest. No policy has more hits with as many slots (Belady 1966, for unit
sizes; tests compare it with exhaustive search).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from headrace.experts.cache_policy import CachePolicy

Visit = Sequence[int]
LARGEST_WEIGHT = 1e100  # where the scores of decayed frequency are scaled down again
NEVER = 1 << 62  # the next use of what is not used again


@dataclass(frozen=True)
class Replay:
    """Counts over one replay; an expert that a visit names twice is one look-up."""

    num_lookups: int
    num_hits: int

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups, cold start included; 0 without look-ups."""
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


def visits_of(ids: Sequence[Sequence[Sequence[int]]], num_experts: int) -> list[tuple[int, ...]]:
    """Visits in the order in which a decoder makes them: token by token, each through all layers.

    Args:
        ids: [layers][tokens][k], as ``RoutingTrace.ids.tolist()`` gives them; -1 is nobody.
        num_experts: of one layer.
    """
    visits: list[tuple[int, ...]] = []
    for token in zip(*ids, strict=True):
        for layer, chosen in enumerate(token):
            keys = {layer * num_experts + e: None for e in chosen if e >= 0}
            visits.append(tuple(keys))
    return visits


def slots_for(residency: float, num_layers: int, num_experts: int) -> int:
    """Slots that hold this share (0 to 1) of a model's experts, rounded to the nearest."""
    return round(residency * num_layers * num_experts)


def replay_lru(visits: Iterable[Visit], num_slots: int) -> Replay:
    """The least recently used expert makes room; every miss is admitted."""
    resident: OrderedDict[int, None] = OrderedDict()
    lookups = hits = 0
    for visit in visits:
        lookups += len(visit)
        hits += sum(key in resident for key in visit)
        for key in visit:
            resident[key] = None
            resident.move_to_end(key)
        while len(resident) > num_slots:
            resident.popitem(last=False)
    return Replay(lookups, hits)


def replay_policy(visits: Iterable[Visit], policy: CachePolicy) -> Replay:
    """A policy of one slice an expert that may fetch all misses: offered in its order until it
    refuses. A step begins with every ``num_layers``-th visit."""
    if policy.shape.num_slices != 1:
        raise ValueError(f"experts of {policy.shape.num_slices} slices: replay them with simulate")
    lookups = hits = 0
    for at, visit in enumerate(visits):
        if at % policy.shape.num_layers == 0:
            policy.begin_step()
        found = policy.look_up(visit)
        lookups += len(visit)
        hits += len(found.hits)
        for unit in found.misses:
            if policy.admit(unit) is None:
                break
    return Replay(lookups, hits)


def best_static_set(visits: Iterable[Visit], num_slots: int) -> frozenset[int]:
    """The experts asked for most often, the smaller key first among equals: the best that never
    changes."""
    counts = Counter(key for visit in visits for key in visit)
    ranked = sorted(counts, key=lambda key: (-counts[key], key))
    return frozenset(ranked[:num_slots])


def replay_static(visits: Iterable[Visit], resident: frozenset[int]) -> Replay:
    """A set that never changes."""
    lookups = hits = 0
    for visit in visits:
        lookups += len(visit)
        hits += sum(key in resident for key in visit)
    return Replay(lookups, hits)


def replay_decayed(visits: Iterable[Visit], num_slots: int, half_life_visits: float) -> Replay:
    """Keeps the experts of highest decayed frequency: a use counts half after ``half_life_visits``.

    An expert that is not resident is admitted only if it outranks the lowest that is. Infinity for
    the half-life is plain frequency.
    """
    growth = 2.0 ** (1.0 / half_life_visits)  # new uses weigh more, instead of old ones less
    weight, scores = 1.0, dict[int, float]()
    resident: set[int] = set()
    lowest: list[tuple[float, int]] = []  # of what is resident; a score may have risen since
    lookups = hits = 0
    for visit in visits:
        lookups += len(visit)
        hits += sum(key in resident for key in visit)
        for key in visit:
            scores[key] = scores.get(key, 0.0) + weight
        for key in visit if num_slots else ():
            if key in resident:
                continue
            if len(resident) >= num_slots:
                while lowest[0][0] != scores[lowest[0][1]]:
                    stale = lowest[0][1]
                    heapreplace(lowest, (scores[stale], stale))
                if scores[key] <= lowest[0][0]:
                    continue
                resident.remove(heappop(lowest)[1])
            resident.add(key)
            heappush(lowest, (scores[key], key))
        weight *= growth
        if weight > LARGEST_WEIGHT:
            scores = {key: score / weight for key, score in scores.items()}
            lowest = [(scores[key], key) for key in resident]
            heapify(lowest)
            weight = 1.0
    return Replay(lookups, hits)


def _next_uses(visits: Sequence[Visit]) -> list[list[int]]:
    """For each visit and key, the index of the next visit that asks for the key."""
    after: dict[int, int] = {}
    found: list[list[int]] = []
    for at in range(len(visits) - 1, -1, -1):
        found.append([after.get(key, NEVER) for key in visits[at]])
        for key in visits[at]:
            after[key] = at
    found.reverse()
    return found


def replay_belady(visits: Sequence[Visit], num_slots: int) -> Replay:
    """The most hits that any policy can have with ``num_slots``, knowing the future."""
    next_use: dict[int, int] = {}  # of what is resident
    farthest: list[tuple[int, int]] = []  # (-next use, key); entries of the past are skipped
    lookups = hits = 0
    for visit, uses in zip(visits, _next_uses(visits), strict=True):
        lookups += len(visit)
        for key, use in zip(visit, uses, strict=True):
            hits += key in next_use
            next_use[key] = use
            heappush(farthest, (-use, key))
        while len(next_use) > num_slots:
            use, key = heappop(farthest)
            if next_use.get(key) == -use:
                del next_use[key]
    return Replay(lookups, hits)
