"""Seconds of a step: its leaves priced by a machine, put after and beside each other.

Decode (overlap "both"): what is not an expert runs one after the other; at the experts the hits'
products, the fetches with the fetched experts' products, and the CPU's experts run beside each other,
so the slowest of the three counts. Overlap "none" adds everything up. A layer's paths meet before the
next layer starts, and layers are alike, so the sums over layers meet like one layer does.

Prefill: the next layer's experts travel while this one computes, so the step lasts as long as the
slower of link and GPU, plus one layer's share of the other: the first fetch or the last layer's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.plan_spec import PlanSpec
from headrace.explain import leaf
from headrace.explain.cost import Priced, Work, price
from headrace.explain.engine_model import EngineModel
from headrace.explain.step_cost import Leaf, Placement, StepShape, step_leaves
from headrace.machine.profile import MachineProfile


@dataclass(frozen=True)
class PricedLeaf:
    """A leaf and its price; ``exposed_s`` is its part of the step, 0 for what others hide."""

    leaf: Leaf
    priced: Priced
    exposed_s: float


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
                found[one.priced.bound] = found.get(one.priced.bound, 0.0) + one.exposed_s
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
    leaves = [*step_leaves(spec, shape, placement), *_launches(spec, placement, engine)]
    priced = [(one, price(one.work, machine, engine.efficiency(one, machine))) for one in leaves]
    if shape.phase == "prefill":
        return _prefill(priced, max(1, spec.moe_layers))
    return _decode(priced, engine)


def _launches(spec: PlanSpec, placement: Placement, engine: EngineModel) -> list[Leaf]:
    """The kernels' own latency: a graph starts them one after the other."""
    calls = round(
        placement.dense_on_gpu * spec.num_layers * engine.kernels_per_layer
        + spec.moe_layers * engine.kernels_per_mixture
    )
    if not placement.gpu or not calls:
        return []
    return [Leaf(leaf.LAUNCHES, calls, Work(launches=float(calls)), "host")]


def _decode(priced: Sequence[tuple[Leaf, Priced]], engine: EngineModel) -> StepTime:
    beside = {"hits": ("hits",), "fetch": ("fetch", "fetched"), "misses": ("misses",)}
    sums = {
        name: sum(p.floor_s for one, p in priced if one.path in paths)
        for name, paths in beside.items()
    }
    # Fetches read host memory too: what both paths read has to come out of the same channels.
    both = ("fetch", "misses")
    dram = sum(p.seconds.get("dram", 0.0) for one, p in priced if one.path in both)
    slowest = max(sums, key=lambda name: sums[name])
    stretch = max(1.0, dram / sums[slowest]) if slowest in both and sums[slowest] else 1.0
    found: list[PricedLeaf] = []
    for one, p in priced:
        ordered = engine.overlap == "none" or one.path in ("gpu", "cpu", "host")
        if ordered:
            exposed = p.floor_s
        else:
            exposed = p.floor_s * stretch if one.path in beside[slowest] else 0.0
        found.append(PricedLeaf(one, p, exposed))
    return StepTime(sum(one.exposed_s for one in found), tuple(found))


def _prefill(priced: Sequence[tuple[Leaf, Priced]], moe_layers: int) -> StepTime:
    fetch = sum(p.floor_s for one, p in priced if one.path == "fetch")
    compute = sum(p.floor_s for one, p in priced if one.path != "fetch")
    # The longer of the two counts; of the shorter one only the first or the last layer shows.
    share = {True: 1.0, False: 1.0}
    share[fetch <= compute] = 1.0 / moe_layers if fetch else 1.0
    found = [PricedLeaf(one, p, p.floor_s * share[one.path == "fetch"]) for one, p in priced]
    return StepTime(sum(one.exposed_s for one in found), tuple(found))
