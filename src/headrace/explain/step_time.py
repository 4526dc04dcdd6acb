"""Seconds of a step: its leaves priced by a machine, put after and beside each other.

Decode (overlap "both"): what is not an expert runs one after the other; at the experts the hits'
products, the fetches with the fetched experts' products, and the CPU's experts run beside each other,
so the slowest of the three counts. Overlap "none" adds everything up. A layer's paths meet before the
next layer starts, and layers are alike, so the sums over layers meet like one layer does. Where the hits
are the slowest they count as if there were no misses: what a few misses take off the GPU, planning them
and waiting for them puts on it, and so more VRAM never makes a prediction slower. What is on the disk is
read before anything else can be done with it.

Prefill of a chunk that streams: the next layer's experts travel while this one computes, so the step
lasts as long as the slower of link and GPU, plus one layer's share of the other: the first fetch or the
last layer's work. A chunk that takes only what was routed, in pieces, goes like a decode step; each piece
moves its experts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.core.plan_spec import PlanSpec
from headrace.explain import leaf
from headrace.explain.cost import SERIAL, Priced, Work, price
from headrace.explain.engine_model import EngineModel
from headrace.explain.step_cost import Leaf, Placement, StepShape, expert_leaves, fixed_leaves
from headrace.machine.profile import MachineProfile

# The memory channels bind where both paths' reads alone would take this share of the time: then a
# faster link gains nothing.
SATURATED = 0.9

_Prices = list[tuple[Leaf, Priced]]


@dataclass(frozen=True)
class PricedLeaf:
    """A leaf and its price; ``exposed_s`` is its part of the step, 0 for what others hide.

    ``bound`` is the price's own, or "dram" where fetches and the CPU share the memory channels.
    ``disk_first``: what is on the disk was read before the rest could begin.
    """

    leaf: Leaf
    priced: Priced
    exposed_s: float
    bound: str
    disk_first: bool = False

    def waits(self) -> dict[str, float]:
        """``exposed_s`` by what is waited for: the disk apart, where it comes first."""
        disk = self.priced.seconds.get("disk", 0.0)
        if not self.disk_first or not disk:
            return {self.bound: self.exposed_s}
        others = {n: s for n, s in self.priced.seconds.items() if n not in (*SERIAL, "disk") and s}
        share = disk / _with_disk(self.priced)
        found = {"disk": self.exposed_s * share}
        if others:
            rest = self.bound if self.bound in others else max(others, key=lambda n: others[n])
            found[rest] = self.exposed_s * (1 - share)
        return found


@dataclass(frozen=True)
class StepTime:
    """A priced step. ``bound`` names the resource that most of ``seconds`` is spent waiting for."""

    seconds: float
    leaves: tuple[PricedLeaf, ...]

    def by_resource(self) -> dict[str, float]:
        """Exposed seconds by what binds them, largest first."""
        found: dict[str, float] = {}
        for one in self.leaves:
            if one.exposed_s > 0:
                for name, seconds in one.waits().items():
                    found[name] = found.get(name, 0.0) + seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def bound(self) -> str:
        return next(iter(self.by_resource()), "")

    def seconds_of(self, *ids: str) -> float:
        """Exposed seconds of some classes."""
        return sum(one.exposed_s for one in self.leaves if one.leaf.id in ids)


def step_time(
    spec: PlanSpec,
    shape: StepShape,
    placement: Placement,
    machine: MachineProfile,
    engine: EngineModel,
) -> StepTime:
    """Price one step.

    Raises:
        MachineError: the machine has no rate that the step needs.
    """
    return StepPrices(spec, shape, machine, engine).at(placement)


class StepPrices:
    """Prices of one step under different placements of its experts. See ``step_time``.

    A plan compares shares, hit rates and chunks by the hundred, and three of four leaves do not depend on
    them: those are priced once.
    """

    def __init__(
        self, spec: PlanSpec, shape: StepShape, machine: MachineProfile, engine: EngineModel
    ) -> None:
        self._spec, self._shape, self._engine = spec, shape, engine
        self._machine = _in_a_graph(machine)
        self._fixed: dict[Placement, tuple[_Prices, _Prices]] = {}
        self._shares: dict[tuple[str, str, int], dict[str, float]] = {}

    def at(self, placement: Placement) -> StepTime:
        """The step under ``placement``.

        Raises:
            MachineError: the machine has no rate that the step needs.
        """
        bare = replace(placement, hit_rate=0.0, fetch_share=0.0, disk_share=0.0, at_once=0)
        if bare not in self._fixed:
            before, after = fixed_leaves(self._spec, self._shape, placement)
            after += _launches(self._spec, placement, self._engine)
            self._fixed[bare] = self._priced(before), self._priced(after)
        before, after = self._fixed[bare]
        experts = self._priced(expert_leaves(self._spec, self._shape, placement))
        priced = [*before, *experts, *after]
        if self._shape.phase == "prefill" and not placement.at_once:
            return _prefill(priced, max(1, self._spec.moe_layers))
        return _decode(priced, self._engine, placement.hit_rate)

    def _priced(self, leaves: Sequence[Leaf]) -> _Prices:
        return [(one, price(one.work, self._machine, self._efficiency(one))) for one in leaves]

    def _efficiency(self, one: Leaf) -> dict[str, float]:
        """The engine's shares, which know a leaf by these alone."""
        key = one.id, one.path, one.blocks
        if key not in self._shares:
            prompt = self._shape.phase == "prefill"
            self._shares[key] = self._engine.efficiency(one, self._machine, prompt=prompt)
        return self._shares[key]


def _in_a_graph(machine: MachineProfile) -> MachineProfile:
    """The machine with the kernels of a graph, which start faster than one by one.

    Where it was measured, with what a kernel that reads costs beside its bytes: on an H200 2.8 us, the
    smallest kernel 0.6 (2026-11-30).
    """
    found = machine.rates.get("graph_read") or machine.rates.get("graph_kernel")
    if found is None:
        return machine
    rates = {**machine.rates, "kernel_launch": found}
    return replace(machine, rates=rates)


def _launches(spec: PlanSpec, placement: Placement, engine: EngineModel) -> list[Leaf]:
    """The kernels' own latency: a graph starts them one after the other."""
    calls = round(
        placement.dense_on_gpu * spec.num_layers * engine.kernels_per_layer
        + spec.moe_layers * engine.kernels_per_mixture
    )
    if not placement.gpu or not calls:
        return []
    return [Leaf(leaf.LAUNCHES, calls, Work(launches=float(calls)), "host")]


def _decode(
    priced: Sequence[tuple[Leaf, Priced]], engine: EngineModel, hit_rate: float
) -> StepTime:
    beside = {"hits": ("hits",), "fetch": ("fetch", "fetched"), "misses": ("misses",)}
    sums = {
        name: sum(_with_disk(p) for one, p in priced if one.path in paths)
        for name, paths in beside.items()
    }
    whole = 1.0
    if engine.overlap == "both" and sums["hits"] > 0:
        whole = 1 / hit_rate
        sums["hits"] *= whole
    # Fetches read host memory too: what both paths read has to come out of the same channels.
    both = ("fetch", "misses")
    dram = sum(p.seconds.get("dram", 0.0) for one, p in priced if one.path in both)
    busier = max(both, key=lambda name: sums[name])
    slowest = "hits" if sums["hits"] > max(sums[busier], dram) else busier
    stretch = max(1.0, dram / sums[slowest]) if slowest == busier and sums[slowest] else 1.0
    channels = dram >= SATURATED * sums[slowest] > 0
    found: list[PricedLeaf] = []
    for one, p in priced:
        ordered = engine.overlap == "none" or one.path in ("gpu", "cpu", "host")
        if ordered:
            exposed = p.floor_s
        else:
            longer = whole if slowest == "hits" else stretch
            exposed = _with_disk(p) * longer if one.path in beside[slowest] else 0.0
        shared = channels and not ordered and one.path in both
        found.append(PricedLeaf(one, p, exposed, "dram" if shared else p.bound, not ordered))
    return StepTime(sum(one.exposed_s for one in found), tuple(found))


def _with_disk(priced: Priced) -> float:
    """The floor with the disk before the other resources, not beside them."""
    beside = {n: s for n, s in priced.seconds.items() if n not in (*SERIAL, "disk")}
    disk = priced.seconds.get("disk", 0.0)
    return priced.floor_s + min(disk, max(beside.values(), default=0.0))


def _prefill(priced: Sequence[tuple[Leaf, Priced]], moe_layers: int) -> StepTime:
    fetch = sum(p.floor_s for one, p in priced if one.path == "fetch")
    compute = sum(p.floor_s for one, p in priced if one.path != "fetch")
    # The longer of the two counts; of the shorter one only the first or the last layer shows.
    share = {True: 1.0, False: 1.0}
    share[fetch <= compute] = 1.0 / moe_layers if fetch else 1.0
    found = [
        PricedLeaf(one, p, p.floor_s * share[one.path == "fetch"], p.bound) for one, p in priced
    ]
    return StepTime(sum(one.exposed_s for one in found), tuple(found))
