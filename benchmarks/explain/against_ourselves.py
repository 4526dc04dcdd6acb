"""04.3 on a CPU: predicted against measured step times of SmolLM2 at 1K and 8K, and what watching costs.

Rounds of probe, steps, probe: the kernels are probed on matrices and caches that are nobody's
(engine/kernel_probe.py), steps are predicted from that and then run, and the next probe shows how far the
machine's rates have moved meanwhile. Nothing of the runs flows back into a prediction. A machine that others
use, or whose clock follows its heat, drifts by more than the bar between two minutes: the median of the
rounds counts, and the spread and the drift are reported beside it.

    PYTHONPATH=src:. python -m benchmarks.explain.against_ourselves [--out FILE | --write] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean

from benchmarks.explain.measured_steps import (
    BAR,
    SUM_BAR,
    WATCH_BAR,
    Row,
    lines,
    measure,
    middle,
    middle_rates,
)
from benchmarks.foundation.common import load_engine
from headrace.engine.probes import probe_engine
from headrace.engine.this_machine import this_machine, with_rates
from headrace.machine.probe import probe_machine
from headrace.machine.profile import Rate

OUT = Path(__file__).parents[1] / "results" / "explain" / "against_ourselves.json"
STEPS, ROUNDS = 24, 5
PROBES = 3  # before a round: of each rate the median


def drift(before: Mapping[str, Rate], after: Mapping[str, Rate]) -> float:
    """How much faster the matrices' rates are in the second probe, less 1: their geometric mean."""
    names = [name for name in before if name.startswith("kernel_one_")]
    return geometric_mean(after[n].value / before[n].value for n in names) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {OUT}")
    args = parser.parse_args()
    engine = load_engine(args.threads, max(args.contexts) + STEPS + 16)
    rounds: dict[int, list[Row]] = {context: [] for context in args.contexts}
    drifts: list[float] = []
    base = this_machine(probe_machine(), engine.info.threads)

    def probe() -> dict[str, Rate]:
        return middle_rates([probe_engine(engine) for _ in range(PROBES)])

    rates = probe()
    for number in range(args.rounds):
        for context in args.contexts:
            row = measure(engine, with_rates(base, rates), context, STEPS)
            rounds[context].append(row)
            print(f"round {number + 1} {lines(row, 0)[0]}", flush=True)
        after = probe()
        drifts.append(drift(rates, after))
        print(f"round {number + 1}: the rates moved by {drifts[-1]:+.1%}", flush=True)
        rates = after
    engine.close()
    rows = [middle(found) for found in rounds.values()]
    for row in rows:
        errors = sorted(r.error for r in rounds[row.context])
        print("\n".join(lines(row)))
        print(f"    error over {len(errors)} rounds: {errors[0]:+.1%} to {errors[-1]:+.1%}")
    passed = all(
        abs(r.error) <= BAR and abs(r.sum_error) <= SUM_BAR and r.watch_cost <= WATCH_BAR
        for r in rows
    )
    print(f"04.3 (decode, this machine): {'passed' if passed else 'NOT passed'}")
    out = OUT if args.write else args.out
    if out is not None:
        record = {
            "bar": {"error": BAR, "sum": SUM_BAR, "watching": WATCH_BAR},
            "passed": passed,
            "machine": json.loads(base.to_json()),
            "rows": [asdict(row) for row in rows],
            "errors_of_rounds": {c: [r.error for r in found] for c, found in rounds.items()},
            "drift_of_rates": drifts,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
