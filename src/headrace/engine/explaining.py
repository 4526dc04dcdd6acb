"""Runs or watches real steps of an engine and has them explained."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

from headrace.core.errors import ConfigError, InternalError, MachineError
from headrace.core.request import GenerationRequest, OutputDelta, RequestFailed, SamplingParams
from headrace.core.status import EngineInfo
from headrace.core.step import StepStats
from headrace.core.words import counted
from headrace.engine.expert_prediction import CachedExperts, expert_seconds, lateness
from headrace.engine.parts import EngineParts
from headrace.engine.profiler import StepProfiler
from headrace.experts.live import LiveExperts
from headrace.explain import leaf
from headrace.explain.advice import Room
from headrace.explain.kernel_rates import ExpertPrice
from headrace.explain.report import ExplainReport, Sample, explain
from headrace.explain.running_cost import RunningModel, StepRows
from headrace.machine.profile import MachineProfile

Phase = Literal["prefill", "decode"]
WARM_UP = 2  # first steps of a run: pages are touched and threads wake for the first time
# Prompts are numbers from a linear congruence (Numerical Recipes' constants): any text routes tokens to
# some experts, and the same few tokens again and again would route to the same few.
_FACTOR, _OFFSET = 1664525, 1013904223


class Explainable(Protocol):
    """The part of ``engine.engine.Engine`` that is used here."""

    observe: Callable[[StepStats], None] | None

    @property
    def info(self) -> EngineInfo: ...
    @property
    def parts(self) -> EngineParts: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def step(self) -> list[OutputDelta | RequestFailed]: ...
    def has_work(self) -> bool: ...
    def watch_classes(self, on: bool) -> StepProfiler | None: ...


class Seen(NamedTuple):
    """A step, its rows, and whether what watched it slowed it down."""

    stats: StepStats
    rows: StepRows
    slowed: bool = False


@dataclass
class Watch:
    """Steps of an engine with their rows, from ``start`` to ``stop``. Whoever observed before still does."""

    engine: Explainable
    steps: list[Seen] = field(default_factory=lambda: list[Seen]())

    def start(self) -> None:
        """Watch from now on."""
        self._before = self.engine.observe
        profiler = self.engine.watch_classes(True)
        if profiler is None:
            raise InternalError("the engine does not say what it watches with")
        self._profiler = profiler
        self.engine.observe = self._take

    def stop(self) -> None:
        """Leave the engine as it was."""
        self.engine.watch_classes(False)
        self.engine.observe = self._before

    @property
    def model(self) -> RunningModel:
        """What the watched engine has loaded."""
        return self._profiler.model

    def _take(self, stats: StepStats) -> None:
        self.steps.append(Seen(stats, self._profiler.rows, self._profiler.slowed))
        if self._before is not None:
            self._before(stats)

    def sample(self, phase: Phase) -> Sample | None:
        """Decode: all steps of the most frequent batch, and the rows of the middle one. Prefill: the last
        of the largest chunks. None where no step was of that phase.
        """
        found = [one for one in self.steps if one.stats.phase == phase]
        if not found:
            return None
        if phase == "prefill":
            most = max(one.stats.tokens for one in found)
            last = [one for one in found if one.stats.tokens == most][-1]
            return Sample((last.stats,), last.rows)
        batch = Counter(one.stats.batch for one in found).most_common(1)[0][0]
        alike = [one for one in found if one.stats.batch == batch]
        alike = alike[WARM_UP:] or alike
        plain = [one.stats for one in alike if not one.slowed]
        slowed = [one.stats for one in alike if one.slowed]
        return Sample(plain or slowed, alike[len(alike) // 2].rows, slowed if plain else ())


@dataclass(frozen=True)
class Workload:
    """Requests to explain with: ``batch`` of them, each of ``prompt`` tokens, with ``steps`` more."""

    phase: Phase = "decode"
    prompt: int = 512
    steps: int = 32
    batch: int = 1


def check_workload(info: EngineInfo, workload: Workload) -> None:
    """Refuse requests that are longer than the engine takes.

    Raises:
        ConfigError: they do not fit the engine's context.
    """
    context = info.context
    if workload.prompt + workload.steps > context:
        raise ConfigError(
            f"--prompt-tokens {workload.prompt} and --steps {workload.steps} do not fit the context of "
            f"{counted(context, 'token')}",
            hint="give fewer, or a larger --context",
            param="--prompt-tokens",
        )


def run_steps(
    engine: Explainable, workload: Workload, progress: Callable[[float], None] | None = None
) -> Watch:
    """Run requests of ``workload`` in an idle engine, watched.

    Args:
        progress: told the share of all tokens that are computed, after each step.

    Raises:
        ConfigError: they do not fit the engine's context.
        HeadraceError: a request fails.
    """
    check_workload(engine.info, workload)
    # The last token of a sequence is chosen and not computed.
    done, everything = 0, workload.batch * (workload.prompt + workload.steps - 1)
    watch = Watch(engine)
    watch.start()
    try:
        for index in range(workload.batch):
            engine.submit(_request(index, workload, engine.info.vocab))
        while engine.has_work():
            seen = len(watch.steps)
            for item in engine.step():
                if isinstance(item, RequestFailed):
                    raise InternalError(f"a step failed: {item.message}", hint=item.hint)
            done += sum(one.stats.tokens for one in watch.steps[seen:])
            if progress is not None:
                progress(min(1.0, done / everything))
    finally:
        watch.stop()
    return watch


def _request(index: int, workload: Workload, vocab: int) -> GenerationRequest:
    value, prompt = index + 1, list[int]()
    for _ in range(workload.prompt):
        value = (value * _FACTOR + _OFFSET) % 2**32
        prompt.append(value * vocab >> 32)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=workload.steps, ignore_eos=True, seed=index
    )
    name = f"explain-{index}-{secrets.token_hex(4)}"
    return GenerationRequest(name, tuple(prompt), sampling, cache_salt=name)


def report_of(
    engine: Explainable, watch: Watch, phase: Phase, machine: MachineProfile
) -> ExplainReport | None:
    """The report of the phase's steps; None where the watch saw none."""
    sample = watch.sample(phase)
    if sample is None:
        return None
    try:
        experts = experts_of(engine, sample, machine)
    except MachineError:  # nothing is predicted where a rate is missing
        experts = None
    info, limits = engine.info, engine.parts.scheduler
    room = Room(limits.num_blocks, limits.block_tokens, limits.num_first)
    return explain(info.model, sample, watch.model, machine, info.threads, experts, room)


def experts_of(engine: Explainable, sample: Sample, machine: MachineProfile) -> ExpertPrice | None:
    """What the sample's experts should take, with the hits of its steps; None without a cache of them.

    Raises:
        MachineError: ``machine``, which the engine runs on, lacks a rate.
    """
    cached = cached_experts(engine.parts)
    if cached is None or not sample.rows.decode:
        return None
    moved = {leaf.EXPERTS_GPU: 0, leaf.EXPERT_FETCH: 0, leaf.EXPERTS_CPU: 0}
    for one in (c for stats in sample.stats for c in stats.classes if c.id in moved):
        moved[one.id] += one.bytes.hbm + one.bytes.pcie + one.bytes.dram
    looked_up = moved[leaf.EXPERTS_GPU] + moved[leaf.EXPERTS_CPU]
    hits = moved[leaf.EXPERTS_GPU] - moved[leaf.EXPERT_FETCH]
    hit_rate = hits / looked_up if looked_up else 0.0
    price = partial(expert_seconds, cached, hit_rate, late=lateness(cached, machine))
    price(machine)
    return price


def cached_experts(parts: EngineParts) -> CachedExperts | None:
    """The experts that an engine's cache of slots serves."""
    if not isinstance(parts.experts, LiveExperts):
        return None
    executor = parts.experts.executor
    shape, layout = executor.plan_shape, executor.store.layout
    everything = shape.num_layers * shape.num_experts * shape.num_slices
    return CachedExperts(
        placement=executor.shape.placement,
        layers=shape.num_layers,
        wanted=executor.shape.top_k * shape.num_slices,
        slice_nbytes=executor.store.mean_slice_nbytes,
        format=layout.format,
        resident=shape.num_slots / everything,
    )
