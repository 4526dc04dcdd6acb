"""Predicted against measured steps of one engine: what both machines' comparisons share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import torch

from headrace.core.request import GenerationRequest, RequestFailed, SamplingParams
from headrace.core.step import StepStats
from headrace.engine.engine import Engine
from headrace.engine.expert_prediction import expert_seconds, lateness
from headrace.engine.explaining import WARM_UP as EXPLAIN_WARM_UP
from headrace.engine.explaining import Watch, cached_experts, report_of
from headrace.engine.gpu_profiler import EVERY
from headrace.experts.live import LiveExperts
from headrace.explain.kernel_rates import Predicted, predict
from headrace.explain.running_cost import RunningModel, decode_rows
from headrace.machine.profile import MachineProfile, Rate

BAR, SUM_BAR, WATCH_BAR = 0.15, 0.03, 0.02
WARM_UP = 4  # steps of a request that are not counted
# Pairs of an unwatched and a watched run, in turns: the same steps, and no drift between them.
LEAST_PAIRS, MOST_PAIRS, PAIRS_S = 3, 12, 2.0


@dataclass(frozen=True)
class Row:
    """One context in one round.

    error: predicted over measured, less 1; sum_error: leaves and gap of the report against a clock around
    its steps; watch_cost: of the mean step, the same steps watched and not, each the fastest of its runs;
    marked_s: of the steps that tell the GPU's classes, 0 without; hit_rate: predicted with it, None
    without experts in host memory.
    """

    context: int
    predicted_s: float
    measured_s: float
    error: float
    sum_error: float
    gap_share: float
    watch_cost: float
    marked_s: float
    hit_rate: float | None
    predicted_classes: dict[str, float]
    measured_classes: dict[str, float]


def request(name: str, prompt: Sequence[int], steps: int) -> GenerationRequest:
    """Greedy, all with one salt: from the second on the prompt is in the prefix cache."""
    sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    return GenerationRequest(name, tuple(prompt), sampling, cache_salt="ours")


def run(engine: Engine, wanted: GenerationRequest) -> tuple[list[StepStats], list[float]]:
    """Run one request: its decoding steps, and the seconds around each."""
    seen: list[StepStats] = []
    before = engine.observe

    def take(stats: StepStats) -> None:
        seen.append(stats)
        if before is not None:
            before(stats)

    engine.observe = take
    engine.submit(wanted)
    around: list[float] = []
    while engine.has_work():
        start = time.perf_counter()
        for item in engine.step():
            if isinstance(item, RequestFailed):
                raise SystemExit(item.message)
        around.append(time.perf_counter() - start)
    engine.observe = before
    steps = [i for i, stats in enumerate(seen) if stats.phase == "decode"][WARM_UP:]
    return [seen[i] for i in steps], [around[i] for i in steps]


def hits_of(engine: Engine) -> tuple[int, int]:
    """Hits and look-ups of the engine's experts so far."""
    experts = engine.parts.experts
    assert isinstance(experts, LiveExperts)
    counts = experts.executor.counts()
    return counts.hits, counts.looked_up


def prompt_of(context: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(context)
    return torch.randint(vocab, (context,), generator=generator).tolist()


def predicted(
    engine: Engine, model: RunningModel, machine: MachineProfile, context: int, hits: float | None
) -> Predicted:
    """A step after ``context`` tokens, from the profile alone, and the hit rate seen before."""
    cached = cached_experts(engine.parts)
    experts = None
    if cached is not None:
        experts = expert_seconds(cached, hits or 0.0, machine, lateness(cached, machine))
    return predict(model, decode_rows(1, context), machine, experts)


def measure(
    engine: Engine,
    machine: MachineProfile,
    context: int,
    steps: int,
    probe_again: Callable[[], Mapping[str, Rate]] | None = None,
) -> Row:
    """Warm up, predict, run unwatched and watched in turns, and compare.

    probe_again: rates that change within seconds, taken just before predicting.
    """
    prompt = prompt_of(context, engine.info.vocab)
    run(engine, request(f"warm-{context}", prompt, steps))
    hits = None
    if cached_experts(engine.parts) is not None:
        before = hits_of(engine)
        run(engine, request(f"count-{context}", prompt, steps))
        after = hits_of(engine)
        hits = (after[0] - before[0]) / max(after[1] - before[1], 1)
    if probe_again is not None:
        machine = replace(machine, rates={**machine.rates, **probe_again()})
    profiler = engine.watch_classes(True)
    assert profiler is not None
    model = profiler.model
    engine.watch_classes(False)
    guess = predicted(engine, model, machine, context + steps // 2, hits)

    plain: list[list[float]] = []
    watched: list[list[float]] = []
    watch, counted, slowed = Watch(engine), list[float](), list[float]()
    places: list[bool] = []  # whether a step at a place is slowed down: the same in every run
    start = time.perf_counter()
    while len(plain) < LEAST_PAIRS or (
        len(plain) < MOST_PAIRS and time.perf_counter() - start < PAIRS_S
    ):
        name = f"{len(plain)}-{context}"
        plain.append(run(engine, request(f"plain-{name}", prompt, steps))[1])
        first = len(watch.steps)
        watch.start()
        _, around = run(engine, request(f"watched-{name}", prompt, steps))
        watch.stop()
        watch.steps[first:] = kept = watch.steps[-len(around) :]  # without what warms up
        counted += [s for s, one in zip(around, kept, strict=True) if not one.slowed]
        slowed += [s for s, one in zip(around, kept, strict=True) if one.slowed]
        watched.append(around)
        places = [one.slowed for one in kept]
    report = report_of(engine, watch, "decode", machine)
    assert report is not None
    unwatched_s = mean(_by_position(plain))
    cost_s = _watch_cost_s(plain, watched, places)
    leaves = {row.id: row.measured_s for row in report.rows}
    # The clock around the report's steps; what interrupts it between its two readings and theirs, a few
    # times in a hundred steps, is left out.
    inside = [one.stats.seconds for one in watch.steps if not one.slowed]
    outside_s = median(a - s for a, s in zip(counted, inside, strict=True))
    clock_s = mean(inside[EXPLAIN_WARM_UP:]) + outside_s
    return Row(
        context=context,
        predicted_s=guess.seconds,
        measured_s=median(s for one in plain for s in one),
        error=guess.seconds / median(s for one in plain for s in one) - 1,
        sum_error=(sum(leaves.values()) + report.gap_s) / clock_s - 1,
        gap_share=report.gap_s / report.step_s,
        watch_cost=cost_s / unwatched_s,
        marked_s=median(slowed) if slowed else 0.0,
        hit_rate=hits,
        predicted_classes=dict(guess.classes),
        measured_classes={**leaves, "unexplained": report.gap_s},
    )


def _watch_cost_s(
    plain: Sequence[Sequence[float]], watched: Sequence[Sequence[float]], slowed: Sequence[bool]
) -> float:
    """Of a mean step: of the steps that are not slowed down, and of one in ``EVERY`` that is.

    What a marked step says is filed while the one behind it runs, and the next is launched after that: what
    this costs shows in the step behind, so that both come once in ``EVERY``.
    """
    more = [w - p for p, w in zip(_by_position(plain), _by_position(watched), strict=True)]
    behind = [False, *slowed[:-1]]
    quick = [s for s, slow, late in zip(more, slowed, behind, strict=True) if not (slow or late)]
    slow = [s for s, slow, late in zip(more, slowed, behind, strict=True) if slow or late]
    return mean(quick) + sum(slow) / max(sum(slowed), 1) / EVERY


def _by_position(runs: Sequence[Sequence[float]]) -> list[float]:
    """Each step's fastest of runs alike: what else interrupts them does not count. (The host's part of a step
    doubled and halved within seconds where others used the same machine; H200, 2026-11-30.)"""
    return [min(same) for same in zip(*runs, strict=True)]


def middle_rates(probes: Sequence[Mapping[str, Rate]]) -> dict[str, Rate]:
    """The median of each rate. (The fastest would be what steps reach on a quiet machine only.)"""
    return {
        name: sorted((one[name] for one in probes), key=lambda rate: rate.value)[len(probes) // 2]
        for name in probes[0]
    }


def middle(rows: Sequence[Row]) -> Row:
    """The round whose error is the median, with the medians of what noise moves."""
    ordered = sorted(rows, key=lambda row: row.error)
    return replace(
        ordered[len(ordered) // 2],
        sum_error=median(row.sum_error for row in rows),
        watch_cost=median(row.watch_cost for row in rows),
    )


def lines(row: Row, most: int = 10) -> list[str]:
    """The row for people."""
    found = [
        f"{row.context:>6}  predicted {row.predicted_s * 1e3:8.3f} ms  measured "
        f"{row.measured_s * 1e3:8.3f} ms  {row.error:+.1%}  sum {row.sum_error:+.1%}  gap "
        f"{row.gap_share:+.1%}  watching {row.watch_cost:+.1%}"
        + (f"  marked {row.marked_s * 1e3:.3f} ms" if row.marked_s else "")
        + ("" if row.hit_rate is None else f"  hits {row.hit_rate:.1%}")
    ]
    names = sorted(
        {*row.measured_classes, *row.predicted_classes},
        key=lambda n: -max(row.measured_classes.get(n, 0.0), row.predicted_classes.get(n, 0.0)),
    )
    for name in names[:most]:
        guess, seen = row.predicted_classes.get(name, 0.0), row.measured_classes.get(name, 0.0)
        found.append(f"    {name:<34} {guess * 1e3:8.3f} {seen * 1e3:8.3f} ms")
    return found
