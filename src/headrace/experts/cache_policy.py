"""Which experts stay in VRAM: the policies behind one interface, and their exact arithmetic.

A *unit* is what a slot holds: one slice of one expert (``unit = expert * num_slices + slice``, experts
numbered over all layers, ``layer * num_experts + e``). A decode step asks each layer in turn for some
experts; of what is missing, the caller fetches what it likes and offers it with ``admit``.

``ValuePolicy`` estimates how likely an expert is at its layer's next turns. Three counters per expert
forget at different speeds (half-lives of 2, 16 and 512 steps): what serves the running sentence, the
passage and the kind of text. Its arithmetic is float32 and has no transcendental function, so that
the GPU's plan kernel has the same bits:

    begin of a step, all experts:      f_i = f_i * DECAY_i                                   i = 0, 1, 2
    use, once a step and expert:       f_i = f_i + 1
    value:                             q = (f_1 + FLOOR_1) * (f_2 + FLOOR_2)
                                       v = ((f_0 + FLOOR_0) * q) * q

    ranking, once a step:  units in slots by (value, unit), ascending, values as of the step's begin
    victims of layer l:    the first WINDOW * num_slices units of the ranking that are still in their
                           slots and whose expert was not used in this step, ordered by
                           v * TURN[distance], ties to the earlier one in the ranking;
                           distance = (layer(unit) - l - 1) mod L, layers that pass before its turn
    admission:             v(newcomer) * ADMISSION > v(victim) * TURN[distance], the first newcomer
                           against the first victim, and so on; a victim that was spared stays first

Values do not change between a step's begin and its use, so nothing is ranked again within a step. A
token walks the layers in a cycle: of experts that are about equally cold the one whose turn has just
passed goes first, since it serves nobody for a whole step (TURN falls from 1 to 2^-2.5 along the
cycle). Among a layer's misses the most valuable is offered first; ties go to the smaller unit.

How the constants were chosen, and what lost: docs/residency.md. Pure Python, no tensors here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import mul
from typing import Protocol


@dataclass(frozen=True)
class CacheShape:
    """What is cached. ``num_slots``: units that fit; ``num_slices``: units of one expert."""

    num_layers: int
    num_experts: int
    num_slots: int
    num_slices: int = 1

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.num_slices) < 1 or self.num_slots < 0:
            raise ValueError(f"no such cache: {self}")

    @property
    def num_all(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    def expert_of(self, unit: int) -> int:
        return unit // self.num_slices

    def units_of(self, expert: int) -> range:
        return range(expert * self.num_slices, (expert + 1) * self.num_slices)


@dataclass(frozen=True)
class LookUp:
    """What a layer finds: units in slots, and missing ones, most worth keeping first."""

    hits: tuple[int, ...]
    misses: tuple[int, ...]


@dataclass(frozen=True)
class Admission:
    """``unit`` takes the place of ``victim``; None: an empty slot."""

    unit: int
    victim: int | None


class CachePolicy(Protocol):
    """Keeps the books of one arena of slots over all layers."""

    shape: CacheShape

    def begin_step(self) -> None:
        """A decode step begins, in which every layer has one turn."""
        ...

    def look_up(self, experts: Sequence[int]) -> LookUp:
        """One layer's turn: note the use of these experts (different ones, all of that layer)."""
        ...

    def admit(self, unit: int) -> Admission | None:
        """Offer a unit that missed in this layer's turn; None if it does not beat its victim."""
        ...

    def replace(self, unit: int, victim: int | None) -> None:
        """Promotion: put a unit in a victim's place, or an empty one, whatever their values."""
        ...

    def value(self, expert: int) -> float:
        """What the policy thinks an expert worth keeping; comparable within one step."""
        ...

    def residents(self) -> Collection[int]:
        """Units in slots, as they are at any time: looking one up costs nothing."""
        ...

    def top_units(self, count: int, *, missing: bool) -> list[int]:
        """The most valuable units that are not in slots, or the least valuable that are; ties go to the
        smaller unit."""
        ...


class LruPolicy:
    """The unit used least recently goes; every miss is admitted. The baseline."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._slots: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._clock = 0
        self._last = [0] * shape.num_all

    def begin_step(self) -> None:
        return None

    def look_up(self, experts: Sequence[int]) -> LookUp:
        hits: list[int] = []
        misses: list[int] = []
        for expert in experts:
            self._clock += 1
            self._last[expert] = self._clock
            for unit in self.shape.units_of(expert):
                if unit in self._slots:
                    self._slots.move_to_end(unit)
                    hits.append(unit)
                else:
                    misses.append(unit)
        return LookUp(tuple(hits), tuple(misses))

    def admit(self, unit: int) -> Admission | None:
        if not self.shape.num_slots:
            return None
        full = len(self._slots) >= self.shape.num_slots
        victim = self._slots.popitem(last=False)[0] if full else None
        self._slots[unit] = None
        return Admission(unit, victim)

    def replace(self, unit: int, victim: int | None) -> None:
        _swap(self._slots, unit, victim, self.shape)
        self._slots.move_to_end(unit, last=False)

    def value(self, expert: int) -> float:
        return float(self._last[expert])

    def residents(self) -> Collection[int]:
        return self._slots.keys()

    def top_units(self, count: int, *, missing: bool) -> list[int]:
        return top_units(self, count, missing=missing)


# Half-lives in steps, and the floors added to the counters. Chosen on the tune parts of the demo
# mixture's traces (2026-11-29); the floors are rates of 0.02, 0.003 and 0.0005 a step over 1 - DECAY.
HALF_LIVES = (2.0, 16.0, 512.0)
FLOOR_RATES = (0.02, 0.003, 0.0005)
WINDOW = 32  # experts' worth of units
TURN_OCTAVES = 2.5  # log2 by which a turn just passed counts less than one that comes next
ADMISSION_OCTAVES = 1.5


def _float32(*values: float) -> array[float]:
    return array("f", values)


@dataclass(frozen=True)
class ValueConstants:
    """The constants of ``ValuePolicy``'s arithmetic; all but ``window`` are float32 numbers."""

    decay: tuple[float, ...]
    floor: tuple[float, ...]
    turn: tuple[float, ...]  # by distance, one entry a layer
    admission: float
    window: int

    def table(self) -> tuple[float, ...]:
        """All float32 numbers in a row, as the plan kernel reads them: decay (3), floor (3),
        admission, turn (one a layer)."""
        return (*self.decay, *self.floor, self.admission, *self.turn)


def values_of(counters: Sequence[Sequence[float]], constants: ValueConstants) -> array[float]:
    """v of each entry of three counters; every intermediate is rounded to float32."""
    a, b, c = (
        array("f", [f + floor for f in counter])
        for counter, floor in zip(counters, constants.floor, strict=True)
    )
    q = array("f", map(mul, b, c))
    return array("f", map(mul, array("f", map(mul, a, q)), q))


def value_constants(num_layers: int, num_slices: int = 1) -> ValueConstants:
    """The constants for a model of so many layers and slices an expert."""
    exact = [2.0 ** (-1.0 / half_life) for half_life in HALF_LIVES]
    floors = [rate / (1.0 - decay) for rate, decay in zip(FLOOR_RATES, exact, strict=True)]
    turns = [2.0 ** (-TURN_OCTAVES * (d + 1) / num_layers) for d in range(num_layers)]
    return ValueConstants(
        tuple(_float32(*exact)),
        tuple(_float32(*floors)),
        tuple(_float32(*turns)),
        _float32(2.0**-ADMISSION_OCTAVES)[0],
        WINDOW * num_slices,
    )


class ValueAdmission(ABC):
    """Slots that go to units by value: admits only what beats its victim. See the module."""

    def __init__(self, shape: CacheShape, constants: ValueConstants | None) -> None:
        self.shape = shape
        self.constants = constants or value_constants(shape.num_layers, shape.num_slices)
        self._slots: dict[int, None] = {}
        self._victims: list[tuple[float, int]] | None = None  # of this turn, with their worth

    def admit(self, unit: int) -> Admission | None:
        """See ``CachePolicy``."""
        if len(self._slots) < self.shape.num_slots:
            self._add(unit)
            return Admission(unit, None)
        if self._victims is None:
            self._victims = self._order()
        while self._victims and self._victims[-1][1] not in self._slots:
            self._victims.pop()  # a promotion took its slot
        newcomer = self.value(self.shape.expert_of(unit)) * self.constants.admission
        if not self._victims or not _float32(newcomer)[0] > self._victims[-1][0]:
            return None
        _, victim = self._victims.pop()
        self.replace(unit, victim)
        return Admission(unit, victim)

    def replace(self, unit: int, victim: int | None) -> None:
        """See ``CachePolicy``."""
        _swap(self._slots, unit, victim, self.shape)

    def residents(self) -> Collection[int]:
        """See ``CachePolicy``."""
        return self._slots.keys()

    def _add(self, unit: int) -> None:
        self._slots[unit] = None

    @abstractmethod
    def value(self, expert: int) -> float:
        """See ``CachePolicy``."""

    @abstractmethod
    def _order(self) -> list[tuple[float, int]]:
        """This turn's victims with their worth, the first to go last."""


class ValuePolicy(ValueAdmission):
    """Keeps what is likely to be used soon. See the module.

    Products and sums of two float32 numbers are exact or rounded once in float64, and each is rounded
    to float32 when it is stored, so the results are those of float32 hardware.
    """

    def __init__(self, shape: CacheShape, constants: ValueConstants | None = None) -> None:
        super().__init__(shape, constants)
        self._counters = [array("f", bytes(4 * shape.num_all)) for _ in HALF_LIVES]
        self._values = values_of(self._counters, self.constants)
        self._used: set[int] = set()  # experts, in this step
        self._ranking: list[int] | None = None
        self._layer = 0

    def begin_step(self) -> None:
        for at, decay in enumerate(self.constants.decay):
            self._counters[at] = array("f", [f * decay for f in self._counters[at]])
        self._values = values_of(self._counters, self.constants)
        self._used.clear()
        self._ranking = None

    def look_up(self, experts: Sequence[int]) -> LookUp:
        hits: list[int] = []
        misses: list[tuple[float, int]] = []
        self._victims = None
        for counter in self._counters:
            for expert in experts:
                counter[expert] += 1.0
        worths = values_of([[f[e] for e in experts] for f in self._counters], self.constants)
        for expert, worth in zip(experts, worths, strict=True):
            self._layer = expert // self.shape.num_experts
            self._used.add(expert)
            self._values[expert] = worth
            for unit in self.shape.units_of(expert):
                if unit in self._slots:
                    hits.append(unit)
                else:
                    misses.append((-worth, unit))
        return LookUp(tuple(hits), tuple(unit for _, unit in sorted(misses)))

    def value(self, expert: int) -> float:
        return self._values[expert]

    def top_units(self, count: int, *, missing: bool) -> list[int]:
        return top_units(self, count, missing=missing)

    def counters(self, expert: int) -> tuple[float, ...]:
        """The three counters, slowest last."""
        return tuple(f[expert] for f in self._counters)

    def _order(self) -> list[tuple[float, int]]:
        if self._ranking is None:
            self._ranking = self._rank()
        shape, turn = self.shape, self.constants.turn
        values, slots, used = self._values, self._slots, self._used
        units: list[int] = []
        exact: list[float] = []
        passed = 0
        for unit in self._ranking:
            expert = shape.expert_of(unit)
            if expert in used or unit not in slots:
                passed += not units  # nothing before the first live unit comes back in this step
                continue
            distance = (expert // shape.num_experts - self._layer - 1) % shape.num_layers
            units.append(unit)
            exact.append(values[expert] * turn[distance])
            if len(units) == self.constants.window:
                break
        del self._ranking[:passed]
        worths = array("f", exact)
        order = sorted(range(len(units)), key=worths.__getitem__)
        return [(worths[at], units[at]) for at in reversed(order)]

    def _rank(self) -> list[int]:
        """Units in slots by value, those of experts already used in this step left out: they are
        not victims, and the others' values are still those of the step's begin."""
        values, per, used = self._values, self.shape.num_slices, self._used
        live = [(values[u // per], u) for u in self._slots if u // per not in used]
        live.sort()
        return [unit for _, unit in live]


def _swap(slots: dict[int, None], unit: int, victim: int | None, shape: CacheShape) -> None:
    if victim is not None:
        del slots[victim]
    if unit in slots or len(slots) >= shape.num_slots:
        raise ValueError(f"no place for unit {unit}: {len(slots)} of {shape.num_slots} slots used")
    slots[unit] = None


def top_units(policy: CachePolicy, count: int, *, missing: bool) -> list[int]:
    """``CachePolicy.top_units`` of any policy, by asking for every value."""
    resident = set(policy.residents())
    shape = policy.shape
    if not missing:
        return nsmallest(count, resident, key=lambda u: (policy.value(shape.expert_of(u)), u))
    outside = (u for u in range(shape.num_all * shape.num_slices) if u not in resident)
    return nsmallest(count, outside, key=lambda u: (-policy.value(shape.expert_of(u)), u))
