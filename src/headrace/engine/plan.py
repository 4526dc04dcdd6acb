"""A plan: does a model run on a machine, where does every byte go, how fast will it be, and why.

Joins the memory layout, the hit rate of the expert cache, the split of misses between link and CPU, and
the priced step. Pure: configurations and catalogues in, records out; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from headrace.core.errors import ConfigError
from headrace.core.plan_spec import PlanSpec
from headrace.core.words import counted
from headrace.engine.plan_hits import HitRate, expected_hit_rate
from headrace.engine.plan_memory import Layout, Workload, fewer_at_once, lay_out
from headrace.engine.plan_search import best_share, refined
from headrace.experts.chunk_choice import (
    CANDIDATES,
    MEAN_PAST,
    ChunkPrice,
    choose_chunk,
    with_slack,
)
from headrace.experts.prefill import MAX_CPU_TOKENS
from headrace.explain.engine_model import EngineModel, engine_model, measured
from headrace.explain.step_cost import KV_BITS, Placement, StepShape
from headrace.explain.step_time import StepPrices, StepTime
from headrace.machine.profile import MachineProfile

# The shares of misses that a plan chooses from: quarters of an expert (the engine's slices) of four misses.
# Fixed, so that a faster part never makes a plan slower.
SHARES = tuple(i / 16 for i in range(17))


@dataclass(frozen=True)
class Interval:
    """An expected value and what it may be off by."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Speed:
    """tokens_s over all sequences; ttft_s of one prompt; fetch_share: of the misses."""

    tokens_s: Interval
    ttft_s: Interval
    hit_rate: HitRate
    fetch_share: float
    decode: StepTime
    prefill: StepTime


@dataclass(frozen=True)
class Plan:
    """A model on a machine under a workload. ``speed`` is None where it does not fit.

    at_once: sequences that run at a time; the others wait
    """

    spec: PlanSpec
    machine: MachineProfile
    workload: Workload
    layout: Layout
    speed: Speed | None
    at_once: int

    @property
    def fits(self) -> bool:
        """Whether it runs at all, be it with the disk's help."""
        return self.layout.mode != "none"


def make_plan(
    spec: PlanSpec,
    machine: MachineProfile,
    workload: Workload,
    engine: EngineModel | None = None,
) -> Plan:
    """Plan one model on one machine.

    Raises:
        ConfigError: the context is longer than the model's, or a count is below 1.
        MachineError: the machine lacks a rate.
    """
    _check(spec, workload)
    layout = lay_out(spec, machine, workload)
    layouts = {workload.concurrency: layout} if layout.mode != "none" else {}
    if machine.gpu is not None and workload.concurrency > 1 and layout.mode != "vram":
        layouts |= fewer_at_once(spec, machine, workload)
    if not layouts:
        return Plan(spec, machine, workload, layout, None, workload.concurrency)
    model = engine or engine_model("headrace")

    at_once, layout, decoding = _at_once(spec, machine, workload, layouts, model)
    workload_then = replace(workload, concurrency=at_once)
    speed = _speed(spec, machine, workload_then, layout, model, decoding)
    return Plan(spec, machine, workload, layout, speed, at_once)


def _at_once(
    spec: PlanSpec,
    machine: MachineProfile,
    workload: Workload,
    layouts: dict[int, Layout],
    engine: EngineModel,
) -> tuple[int, Layout, _Decoding]:
    """Of so many sequences at a time as ``layouts`` has, and those between, the count that makes most tokens,
    with the chunks that the engine would make of their prompts."""
    layouts = dict(layouts)

    def work(count: int) -> Workload:
        return replace(workload, concurrency=count)

    @cache
    def shortest(count: int) -> _Decoding | None:
        """With the shortest chunks: longer ones take slots away, and make no count faster."""
        if count not in layouts:
            layouts[count] = lay_out(spec, machine, work(count))
        if layouts[count].mode not in ("vram", "ram", "disk") and count != workload.concurrency:
            return None
        return _decoding(spec, machine, work(count), layouts[count], engine)

    def most(count: int) -> float:
        decoding = shortest(count)
        return 0.0 if decoding is None else decoding.tokens_s

    found: tuple[int, Layout, _Decoding] | None = None
    for count in sorted(refined(sorted(layouts), most), key=lambda count: -most(count)):
        plain = shortest(count)
        if plain is None or (found is not None and plain.tokens_s <= found[2].tokens_s):
            break
        one = layouts[count]
        chunked = None
        if one.mode in ("ram", "disk"):
            chunked = _with_chunks(spec, machine, work(count), one.mode, engine)
        layout, decoding = chunked or (one, plain)
        if found is None or decoding.tokens_s > found[2].tokens_s:
            found = count, layout, decoding
    assert found is not None
    return found


def _with_chunks(
    spec: PlanSpec,
    machine: MachineProfile,
    workload: Workload,
    mode: str,
    engine: EngineModel,
) -> tuple[Layout, _Decoding] | None:
    """The layout of ``mode`` with prompts' chunks as long as the engine would make them
    (``experts.chunk_choice``), and its decoding step; None where no chunk leaves it that mode."""
    found: dict[int, tuple[Layout, _Decoding]] = {}
    prices: list[ChunkPrice] = []
    for tokens in CANDIDATES:
        made = lay_out(spec, machine, workload, with_slack(tokens, workload.context))
        if made.mode != mode:
            break
        past = min(MEAN_PAST, max(workload.context - tokens, 0))
        chunk_s = _chunk_time(spec, machine, workload, made, engine, (past, tokens)).seconds
        decoding = _decoding(spec, machine, workload, made, engine)
        nbytes = made.used["vram"]["workspace"]
        found[tokens] = made, decoding
        prices.append(ChunkPrice(tokens, chunk_s, decoding.step.seconds, nbytes))
        if tokens >= workload.context:
            break
    return found[choose_chunk(prices).tokens] if prices else None


def _check(spec: PlanSpec, workload: Workload) -> None:
    for given in (workload.kv_format, workload.kv_on_cpu or workload.kv_format):
        if given not in KV_BITS:
            raise ConfigError(
                f"--kv-format is {given!r}; it must be one of {', '.join(KV_BITS)}",
                param="--kv-format",
            )
    if workload.context > spec.max_context:
        raise ConfigError(
            f"--context is {workload.context:,} tokens; {spec.name} was trained for at most "
            f"{spec.max_context:,}",
            hint=f"--context {spec.max_context}",
            param="--context",
        )
    for flag in ("context", "concurrency", "prompt"):
        if getattr(workload, flag) < 1:
            raise ConfigError(
                f"--{flag} is {getattr(workload, flag)}; it must be at least 1", param=f"--{flag}"
            )
    if workload.prompt > workload.context:
        raise ConfigError(
            f"--prompt is {counted(workload.prompt, 'token', form=',')} and --context {workload.context:,}",
            hint="the prompt is a part of the context",
            param="--prompt",
        )


def fetch_share(machine: MachineProfile, engine: EngineModel) -> float:
    """The share of misses at which link and CPU finish together: q* / m = B_P / (B_P + B_C).

    What was fetched is multiplied by the GPU afterwards, and shares come in slices: a plan takes the
    best of ``SHARES`` for its own step instead, which lies at or below this.

    B_P is what the link delivers; B_C what the CPU works through meanwhile: its kernels' rate, or what
    the fetches leave of the memory channels, whichever is less.
    """
    link, cpu = path_rates(machine, engine)
    return link / (link + cpu) if link + cpu else 0.0


def path_rates(machine: MachineProfile, engine: EngineModel) -> tuple[float, float]:
    """GB/s that the link delivers and the CPU works through, beside each other."""
    link = _gbps(machine, "pcie_h2d", "pcie", engine)
    channels = _gbps(machine, "dram_read", "dram", engine)
    kernels = channels * engine.kernel.get("dram", 1.0)
    cpu = min(kernels, max(0.0, channels - link))
    if "dram_read_overlapped" in machine.rates:
        cpu = machine.rates["dram_read_overlapped"].value * engine.kernel.get("dram", 1.0)
    return min(link, channels), cpu


def _gbps(machine: MachineProfile, rate: str, resource: str, engine: EngineModel) -> float:
    """What a plain copy or read gets of a rate; 0 where the machine has none."""
    value = machine.rates[rate].value if rate in machine.rates else 0.0
    return value * (1.0 if measured(machine, resource) else engine.reach.get(resource, 1.0))


def hit_rate(spec: PlanSpec, resident: float, engine: EngineModel) -> HitRate:
    """Of the engine's cache with this share of the experts in VRAM; 1 for a model without experts."""
    if not spec.sparse:
        return HitRate(1.0, 1.0, 1.0)
    return expected_hit_rate(spec.num_experts, spec.num_experts_per_token, resident, engine.policy)


def placement_of(layout: Layout, hits: float, share: float, in_memory: float = 1.0) -> Placement:
    """The step's placement that a layout and a hit rate make.

    in_memory: look-ups that VRAM or host memory serves, where a part of the experts is on the disk.
    """
    if layout.mode == "cpu":
        return Placement(gpu=False, kv_format=layout.kv_format)
    if layout.mode == "vram":
        return Placement(kv_format=layout.kv_format)
    disk = 0.0
    if layout.mode == "disk":
        disk = (1 - in_memory) / (1 - hits) if hits < 1 else 0.0
    return Placement(
        hit_rate=hits, fetch_share=share, disk_share=min(1.0, disk), kv_format=layout.kv_format
    )


@dataclass(frozen=True)
class _Decoding:
    """A decoding step of all sequences, as expected."""

    tokens_s: float
    hits: HitRate
    share: float
    step: StepTime
    at: Callable[[float], StepTime]  # the step at another hit rate


def _decoding(
    spec: PlanSpec,
    machine: MachineProfile,
    workload: Workload,
    layout: Layout,
    engine: EngineModel,
) -> _Decoding:
    hits = hit_rate(spec, layout.resident, engine)
    kept = hit_rate(spec, min(1.0, layout.resident + layout.ram_share), engine).expected
    # Half of the context is cached in the middle of a conversation: the mean over its tokens.
    shape = StepShape("decode", workload.concurrency, 1, max(1, workload.context // 2))

    prices = StepPrices(spec, shape, machine, engine)

    def decode(rate: float, share: float) -> StepTime:
        return prices.at(placement_of(layout, rate, share, kept))

    share = 0.0
    if layout.mode in ("ram", "disk"):
        share = best_share(SHARES, lambda one: decode(hits.expected, one).seconds)
    step = decode(hits.expected, share)
    tokens_s = workload.concurrency / step.seconds
    return _Decoding(tokens_s, hits, share, step, lambda rate: decode(rate, share))


def _speed(
    spec: PlanSpec,
    machine: MachineProfile,
    workload: Workload,
    layout: Layout,
    engine: EngineModel,
    decoding: _Decoding,
) -> Speed:
    hits, batch = decoding.hits, workload.concurrency
    slow, fast = decoding.at(hits.low).seconds, decoding.at(hits.high).seconds
    tokens = Interval(
        batch / slow * (1 - engine.spread),
        decoding.tokens_s,
        batch / fast * (1 + engine.spread),
    )
    prefill, seconds = prefill_time(spec, machine, workload, layout, engine)
    ttft = Interval(seconds * (1 - engine.spread), seconds, seconds * (1 + engine.spread))
    return Speed(tokens, ttft, hits, decoding.share, decoding.step, prefill)


def prefill_time(
    spec: PlanSpec,
    machine: MachineProfile,
    workload: Workload,
    layout: Layout,
    engine: EngineModel,
) -> tuple[StepTime, float]:
    """The last chunk's step, and the seconds of all chunks of one prompt.

    Resident experts are not copied; the others travel once a chunk, or a chunk takes both paths in pieces
    of ``MAX_CPU_TOKENS`` tokens with the best share of ``SHARES``: always if it is one piece, else if that
    is faster, as the engine decides (``experts.prefill``). Chunks are equally long, or as long as possible
    and a rest, whichever is faster.
    """
    whole, rest = divmod(workload.prompt, layout.chunk)
    divisions = [[layout.chunk] * whole + [rest] * (rest > 0)]
    if whole and rest and layout.mode in ("ram", "disk"):
        each = -(-workload.prompt // (whole + 1))
        divisions.append([each] * whole + [workload.prompt - whole * each])

    def timed(sizes: list[int]) -> tuple[StepTime, float]:
        steps: list[StepTime] = []
        for i, size in enumerate(sizes):
            at = (sum(sizes[:i]), size)
            steps.append(_chunk_time(spec, machine, workload, layout, engine, at))
        return steps[-1], sum(step.seconds for step in steps)

    return min((timed(sizes) for sizes in divisions), key=lambda found: found[1])


def _chunk_time(
    spec: PlanSpec,
    machine: MachineProfile,
    workload: Workload,
    layout: Layout,
    engine: EngineModel,
    at: tuple[int, int],
) -> StepTime:
    """The step of one chunk; ``at``: tokens before it, and its own."""
    # A chunk of a prompt uses nearly all experts, so that shares of them are shares of look-ups.
    kept = min(1.0, layout.resident + layout.ram_share)
    place = placement_of(layout, layout.resident, 1.0, kept)
    past, size = at
    shape = StepShape("prefill", 1, size, past)

    prices = StepPrices(spec, shape, machine, engine)

    def routed(share: float) -> StepTime:
        return prices.at(replace(place, at_once=MAX_CPU_TOKENS, fetch_share=share))

    streamed = prices.at(place)
    if layout.mode not in ("ram", "disk"):
        return streamed
    both = routed(best_share(SHARES, lambda share: routed(share).seconds))
    return both if size <= MAX_CPU_TOKENS or both.seconds < streamed.seconds else streamed


def with_rate(machine: MachineProfile, name: str, factor: float) -> MachineProfile:
    """The same machine with one rate times ``factor``."""
    rates = dict(machine.rates)
    rates[name] = replace(rates[name], value=rates[name].value * factor)
    return replace(machine, rates=rates)
