"""Replays routing through policy, split and promotion on a virtual clock: tokens a second of machines
that are not here.

One layer of a step, as the executor runs it:

    gpu   | attention, dense, plan | hits | ... | fetched experts | join
    pcie  | guess | prefetch       | demand fetches | promotion until the next layer's plan
    cpu   |                        | the rest of the misses     |

Demand fetches and the CPU begin together when the plan is made; promotion gets what PCIe leaves idle
until the next plan, cut into pieces (experts/promotion.py). The same objects decide here and in the
engine. Where a layer's experts are guessed, their missing units travel until the plan is made; what has
arrived of those that are needed is work that nobody has any more (experts/plan_oracle.py). Pure: ids and
rates in, a record out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.experts.cache_policy import CachePolicy
from headrace.experts.promotion import (
    Promotion,
    PromotionQueue,
    Valued,
    choose_promotions,
    idle_nbytes,
)
from headrace.experts.split import GIGA, PathRates, split_table
from headrace.machine.profile import MachineProfile
from headrace.machine.virtual import TwoRates, VirtualClock, overlap, profile_rate

GPU, PCIE, CPU = "gpu", "pcie", "cpu"


@dataclass(frozen=True)
class SimulatedMachine:
    """What a decode step costs.

    ``paths``: of a miss. ``gpu_gbps``: at which the GPU reads resident experts. ``dense_s``: of one
    layer before its experts are known (attention, dense weights, router). ``plan_s``: plan kernel and
    joins of one layer. ``step_s``: once a step (embedding, logits, sampling, launch). ``guess_s``: from a
    layer's begin to its first prefetch. ``max_prefetch``: units prefetched for a layer at most.
    """

    paths: PathRates
    gpu_gbps: float
    dense_s: float = 0.0
    plan_s: float = 0.0
    step_s: float = 0.0
    guess_s: float = 0.0
    max_prefetch: int = 4


def machine_from_profile(
    profile: MachineProfile,
    fmt: str,
    slice_nbytes: int,
    *,
    dense_s: float = 0.0,
    step_s: float = 0.0,
) -> SimulatedMachine:
    """Read a machine profile. ``fmt``: the experts' format, as in ``cpu_experts_<fmt>``.

    A machine without a link fetches nothing; without a rate of the CPU's expert kernel its DRAM rate
    stands in, as a kernel bound by memory reaches it.

    Raises:
        ConfigError: the profile lacks a rate that is needed; the message names it.
    """
    cpu_names = (f"cpu_experts_{fmt}", "dram_read")
    cpu, cpu_alone = (profile_rate(profile, cpu_names, overlapped=o) for o in (True, False))
    pcie = pcie_alone = 0.0
    if profile.link is not None:
        names = ("pcie_gather", "pcie_h2d")
        pcie, pcie_alone = (profile_rate(profile, names, overlapped=o) for o in (True, False))
    round_trip = profile.rates.get("flag_round_trip")
    launch = profile.rates.get("graph_kernel")
    return SimulatedMachine(
        PathRates(
            pcie,
            cpu,
            slice_nbytes,
            cpu_latency_s=round_trip.value if round_trip else 0.0,
            pcie_alone_gbps=pcie_alone,
            cpu_alone_gbps=cpu_alone,
        ),
        gpu_gbps=profile_rate(profile, ("hbm_read", "dram_read"), overlapped=False),
        dense_s=dense_s,
        plan_s=launch.value if launch else 0.0,
        step_s=step_s,
    )


@dataclass(frozen=True)
class Prediction:
    """Sums over the steps that count. Bytes are of experts; idle shares are of the whole time."""

    num_steps: int
    seconds: float
    num_lookups: int  # of units
    num_hits: int
    fetched_nbytes: int
    promoted_nbytes: int
    cpu_nbytes: int
    gpu_nbytes: int
    idle: dict[str, float]
    prefetched_nbytes: int = 0
    ahead_nbytes: int = 0  # of them, what was needed; ``fetched_nbytes`` has them, too

    @property
    def step_s(self) -> float:
        """Seconds a step, so of one token at batch 1."""
        return self.seconds / self.num_steps if self.num_steps else 0.0

    @property
    def steps_per_s(self) -> float:
        return self.num_steps / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


@dataclass
class _Totals:
    lookups: int = 0
    hits: int = 0
    fetched: int = 0
    promoted: int = 0
    computed: int = 0
    gpu: int = 0
    prefetched: int = 0
    ahead: int = 0

    def copy(self) -> _Totals:
        return _Totals(**vars(self))


class Simulation:
    """One engine's experts on a virtual machine. ``step`` replays one token (or batch) after another.

    Args:
        table: slices to fetch of m missing ones; best for the machine's rates if None.
        promote: whether PCIe's idle time is used.
    """

    def __init__(
        self,
        policy: CachePolicy,
        machine: SimulatedMachine,
        *,
        table: Sequence[int] | None = None,
        promote: bool = True,
        clock: VirtualClock | None = None,
    ) -> None:
        self.policy = policy
        self.machine = machine
        self.clock = clock or VirtualClock()
        self.totals = _Totals()
        self._table = list(table) if table is not None else []
        self._fixed = table is not None
        self._promote = promote and machine.paths.pcie_gbps > 0
        self._queue = PromotionQueue(machine.paths.slice_nbytes)
        self._idle_nbytes = 0  # of the last step
        self._arriving: set[int] = set()  # units whose slot is theirs and whose bytes are not there

    def step(
        self, visits: Iterable[Sequence[int]], guesses: Iterable[Sequence[int]] | None = None
    ) -> None:
        """One decode step; ``visits``: each layer's experts, numbered over all layers; ``guesses``: what
        is thought of each before its attention, the surest first; None: nothing is prefetched."""
        self.policy.begin_step()
        if self._promote and self._queue.idle:
            self._offer()
        self._idle_nbytes = 0
        for experts, guessed in zip(visits, guesses or itertools.repeat(())):
            self._layer(experts, guessed)
        self.clock.run(GPU, self.machine.step_s, label="step")

    def _layer(self, experts: Sequence[int], guessed: Sequence[int]) -> None:
        machine, paths, clock = self.machine, self.machine.paths, self.clock
        size = paths.slice_nbytes
        begun_s = clock.free_s(GPU)
        planned = clock.run(GPU, machine.dense_s + machine.plan_s, label="dense and plan")
        sent = self._prefetch(guessed, begun_s + machine.guess_s, planned) if guessed else {}
        found = self.policy.look_up(experts)
        late = [unit for unit in found.hits if unit in self._arriving]
        misses = sorted((*late, *found.misses), key=lambda unit: -sent.get(unit, 0))
        hits, missing = len(found.hits) - len(late), len(misses)
        ahead = sum(sent.get(unit, 0) for unit in misses)
        done = (ahead + size // 2) // size
        q = done + self._fetch_count(missing - done)
        ahead = sum(sent.get(unit, 0) for unit in misses[:q])
        self.totals.ahead += ahead
        for unit in misses[:q]:
            self._queue.drop(unit)
            if unit in self._arriving:
                self._arriving.discard(unit)
            else:
                self.policy.admit(unit)
        fetch_s, cpu_s = _both(q * size - ahead, (missing - q) * size, paths)
        arrived = clock.run(PCIE, fetch_s, after=planned, label="fetch") if q else planned
        answered = clock.run(CPU, cpu_s, after=planned, label="experts") if missing > q else planned
        unit_s = size / (machine.gpu_gbps * GIGA)
        clock.run(GPU, hits * unit_s, label="hits")
        clock.run(GPU, q * unit_s, after=arrived, label="fetched")
        joined = clock.run(GPU, 0.0, after=answered)
        self._count(hits, missing, q)
        if self._promote:
            window_s = max(joined - planned, 0.0) + machine.dense_s + machine.plan_s
            self._advance(idle_nbytes(window_s, q, paths), arrived)

    def _prefetch(self, guessed: Sequence[int], begin_s: float, end_s: float) -> dict[int, int]:
        """Bytes that have arrived of each guessed unit when the plan is made."""
        paths, policy = self.machine.paths, self.policy
        size, gbps = paths.slice_nbytes, paths.pcie_alone_gbps or paths.pcie_gbps
        resident, arriving = policy.residents(), self._arriving
        units = [u for expert in guessed for u in policy.shape.units_of(expert)]
        units = [u for u in units if u not in resident or u in arriving]
        units = units[: self.machine.max_prefetch]
        begin_s = max(begin_s, self.clock.free_s(PCIE))
        left = min(int(max(end_s - begin_s, 0.0) * gbps * GIGA), len(units) * size)
        self.totals.prefetched += left
        if left:
            self.clock.run(PCIE, left / (gbps * GIGA), after=begin_s, label="prefetch")
        return {unit: min(max(left - at * size, 0), size) for at, unit in enumerate(units)}

    def _fetch_count(self, missing: int) -> int:
        if missing >= len(self._table):
            if self._fixed:
                raise ValueError(f"{missing} slices miss; the table ends at {len(self._table) - 1}")
            self._table = list(split_table(2 * missing, self.machine.paths))
        return self._table[missing]

    def _count(self, hits: int, missing: int, fetched: int) -> None:
        totals, size = self.totals, self.machine.paths.slice_nbytes
        totals.lookups += hits + missing
        totals.hits += hits
        totals.fetched += fetched * size
        totals.computed += (missing - fetched) * size
        totals.gpu += (hits + fetched) * size

    def _offer(self) -> None:
        """New promotions from fresh values, no more than the last step had time for."""
        policy, shape = self.policy, self.policy.shape
        limit = max(1, self._idle_nbytes // self.machine.paths.slice_nbytes)
        limit = min(limit, shape.num_slots)
        free = shape.num_slots - len(policy.residents())
        inside = [Valued(u, policy.value(shape.expert_of(u))) for u in _coldest(policy, limit)]
        outside = [
            Valued(u, policy.value(shape.expert_of(u)))
            for u in policy.top_units(limit, missing=True)
        ]
        self._queue.offer(choose_promotions(outside, inside, num_free=free, limit=limit))

    def _advance(self, budget_nbytes: int, after: float) -> None:
        self._idle_nbytes += budget_nbytes
        pieces = self._queue.advance(budget_nbytes, self._begin)
        nbytes = sum(piece.nbytes for piece in pieces)
        if nbytes:
            seconds = nbytes / (self.machine.paths.pcie_gbps * GIGA)
            self.clock.run(PCIE, seconds, after=after, label="promotion")
            self.totals.promoted += nbytes
        self._arriving.difference_update(piece.promotion.key for piece in pieces if piece.last)

    def _begin(self, promotion: Promotion) -> bool:
        """A copy is about to begin: its slot is taken from the coldest unit of now, since demand may
        have evicted the victim that was thought of. False if it is not worth it any more."""
        policy, shape = self.policy, self.policy.shape
        resident = policy.residents()
        if promotion.key in resident:
            return False
        candidate = Valued(promotion.key, policy.value(shape.expert_of(promotion.key)))
        inside = [
            Valued(u, policy.value(shape.expert_of(u)))
            for u in _coldest(policy, 1 + len(self._arriving))
            if u not in self._arriving
        ]
        free = shape.num_slots - len(resident)
        chosen = choose_promotions([candidate], inside, num_free=free, limit=1)
        if not chosen:
            return False
        policy.replace(promotion.key, chosen[0].victim)
        self._arriving.add(promotion.key)
        return True


def simulate(
    visits: Sequence[Sequence[int]],
    policy: CachePolicy,
    machine: SimulatedMachine,
    *,
    skip_steps: int = 0,
    table: Sequence[int] | None = None,
    promote: bool = True,
    guesses: Sequence[Sequence[int]] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Prediction:
    """Replay visits (``replay.visits_of``) and add up what follows the first ``skip_steps`` steps.

    Args:
        visits: step by step, each through all layers of ``policy.shape``.
        skip_steps: warm the cache and do not count.
        guesses: of each visit, see ``Simulation.step``.
        progress: told the share of steps that are done, at each of them.
    """
    layers = policy.shape.num_layers
    run = Simulation(policy, machine, table=table, promote=promote)
    num_steps = len(visits) // layers
    start_s, busy, before = 0.0, dict[str, float](), run.totals.copy()
    for at in range(num_steps):
        if at == skip_steps:
            start_s, before = run.clock.free_s(GPU), run.totals.copy()
            busy = {name: run.clock.busy_s(name) for name in (GPU, PCIE, CPU)}
        part = slice(at * layers, (at + 1) * layers)
        run.step(visits[part], None if guesses is None else guesses[part])
        if progress is not None:
            progress((at + 1) / num_steps)
    seconds = run.clock.free_s(GPU) - start_s
    now = run.totals
    idle = {
        name: max(0.0, 1.0 - (run.clock.busy_s(name) - busy.get(name, 0.0)) / seconds)
        if seconds
        else 1.0
        for name in (GPU, PCIE, CPU)
    }
    return Prediction(
        max(num_steps - skip_steps, 0),
        seconds,
        now.lookups - before.lookups,
        now.hits - before.hits,
        now.fetched - before.fetched,
        now.promoted - before.promoted,
        now.computed - before.computed,
        now.gpu - before.gpu,
        idle,
        now.prefetched - before.prefetched,
        now.ahead - before.ahead,
    )


def _coldest(policy: CachePolicy, count: int) -> list[int]:
    return policy.top_units(count, missing=False)


def _both(fetch_nbytes: int, cpu_nbytes: int, paths: PathRates) -> tuple[float, float]:
    """Seconds until the fetches and the CPU's answer are there, latencies included."""
    pcie = TwoRates(paths.pcie_gbps, paths.pcie_alone_gbps or paths.pcie_gbps)
    cpu = TwoRates(paths.cpu_gbps, paths.cpu_alone_gbps or paths.cpu_gbps)
    fetch_s, cpu_s = overlap(fetch_nbytes, cpu_nbytes, pcie, cpu)
    return (
        fetch_s + (paths.fetch_latency_s if fetch_nbytes else 0.0),
        cpu_s + (paths.cpu_latency_s if cpu_nbytes else 0.0),
    )
