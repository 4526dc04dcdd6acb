"""04.3 here: predicted against measured step times of SmolLM2 at 1K and 8K, and what watching costs.

The kernels are probed first, on matrices and caches that are nobody's (engine/kernel_probe.py); then the
model is loaded and run. Nothing of the runs flows back into the prediction. Steps are the fastest of
several rounds, on a machine that should be idle; a round watches, the next one does not.

    PYTHONPATH=src:. python -m benchmarks.explain.against_ourselves [--out FILE] [--contexts 1000 8000]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.foundation.common import load_engine, request
from headrace.core.request import GenerationRequest, RequestFailed
from headrace.core.step import StepStats
from headrace.engine.engine import Engine
from headrace.engine.explaining import Watch
from headrace.engine.kernel_probe import probe_engine
from headrace.engine.this_machine import this_machine, with_rates
from headrace.explain.kernel_rates import predict
from headrace.explain.running_cost import RunningModel, StepRows
from headrace.machine.probe import probe_machine
from headrace.machine.profile import MachineProfile

BAR, SUM_BAR, WATCH_BAR = 0.15, 0.03, 0.02
STEPS, ROUNDS = 24, 6
PROBES = 3  # of each rate the best counts: a neighbour can only make one slower


@dataclass(frozen=True)
class Row:
    """One context. error: predicted over measured, less 1; sum_error: leaves and gap against the
    time around the step; watch_cost: of the fastest step."""

    phase: str
    context: int
    predicted_s: float
    measured_s: float
    error: float
    sum_error: float
    watch_cost: float
    predicted_classes: dict[str, float]
    measured_classes: dict[str, float]


def best_profile(engine: Engine) -> MachineProfile:
    """This machine's rates and its kernels', each the best of a few probes."""
    machine = this_machine(probe_machine(), engine.info.threads)
    found = probe_engine(engine)
    for _ in range(PROBES - 1):
        for name, rate in probe_engine(engine).items():
            better = min if rate.unit == "s" else max
            found[name] = better(found[name], rate, key=lambda r: r.value)
    return with_rates(machine, found)


def run(engine: Engine, wanted: GenerationRequest) -> list[float]:
    """Run one request; seconds around each step."""
    engine.submit(wanted)
    around: list[float] = []
    while engine.has_work():
        start = time.perf_counter()
        for item in engine.step():
            if isinstance(item, RequestFailed):
                raise SystemExit(item.message)
        around.append(time.perf_counter() - start)
    return around


def measure(engine: Engine, machine: MachineProfile, context: int) -> list[Row]:
    """Decode after ``context`` tokens, and the last whole chunk of their prefill."""
    prompt = [5 + i * 7 % 40000 for i in range(context)]
    plain: list[StepStats] = []
    watched: list[tuple[StepStats, StepRows, float]] = []
    first: list[tuple[StepStats, StepRows]] = []
    watch = Watch(engine)
    for index in range(ROUNDS):
        # The same salt: from the second round on the prompt is in the prefix cache.
        wanted = request(f"r{index}", prompt, STEPS, cache_salt="ours", ignore_eos=True)
        if index % 2 == 0:
            watch = Watch(engine)
            watch.start()
            around = run(engine, wanted)
            watch.stop()
            watched += [(s, r, a) for (s, r), a in zip(watch.steps, around, strict=True)]
            first = first or watch.steps
        else:
            engine.observe = plain.append
            run(engine, wanted)
            engine.observe = None
    decode = [one for one in watched if one[0].phase == "decode"]
    best = min(decode, key=lambda one: one[0].seconds)
    unwatched = min(s.seconds for s in plain if s.phase == "decode")
    rows = [_row(best[0], best[1], best[2], machine, watch.model, context, unwatched)]
    chunks = [one for one in first if one[0].phase == "prefill"]
    if chunks:
        most = max(s.tokens for s, _ in chunks)
        stats, shape = [one for one in chunks if one[0].tokens == most][-1]
        rows.append(_row(stats, shape, stats.seconds, machine, watch.model, context, stats.seconds))
    return rows


def _row(
    stats: StepStats,
    shape: StepRows,
    around: float,
    machine: MachineProfile,
    model: RunningModel,
    context: int,
    unwatched: float,
) -> Row:
    predicted = predict(model, shape, machine)
    leaves = {c.id: c.seconds for c in stats.classes}
    gap = stats.seconds - sum(leaves.values())
    return Row(
        phase=stats.phase,
        context=context,
        predicted_s=predicted.seconds,
        measured_s=unwatched,
        error=predicted.seconds / unwatched - 1,
        sum_error=(sum(leaves.values()) + gap) / around - 1,
        watch_cost=stats.seconds / unwatched - 1,
        predicted_classes=dict(predicted.classes),
        measured_classes={**leaves, "unexplained": gap},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine = load_engine(args.threads, max(args.contexts) + STEPS + 16)
    machine = best_profile(engine)
    rows = [row for context in args.contexts for row in measure(engine, machine, context)]
    engine.close()
    for row in rows:
        print(
            f"{row.phase:<8}{row.context:>6}  predicted {row.predicted_s * 1e3:8.2f} ms  measured "
            f"{row.measured_s * 1e3:8.2f} ms  {row.error:+.1%}  sum {row.sum_error:+.1%}  watching "
            f"{row.watch_cost:+.1%}"
        )
        for name in sorted(row.measured_classes, key=lambda n: -row.measured_classes[n])[:8]:
            guess = row.predicted_classes.get(name, 0.0)
            print(f"    {name:<34} {guess * 1e3:8.3f} {row.measured_classes[name] * 1e3:8.3f} ms")
    decode = [row for row in rows if row.phase == "decode"]
    passed = all(abs(r.error) <= BAR and abs(r.sum_error) <= SUM_BAR for r in decode)
    print(f"04.3 (decode, this machine): {'passed' if passed else 'NOT passed'}")
    if args.out is not None:
        record = {
            "bar": {"error": BAR, "sum": SUM_BAR, "watching": WATCH_BAR},
            "passed": passed,
            "machine": json.loads(machine.to_json()),
            "rows": [asdict(row) for row in rows],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
