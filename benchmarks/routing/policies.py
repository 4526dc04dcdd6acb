"""Every trace through every policy: hit rates beside Belady's optimum, and bar 02.6.

    python -m benchmarks.routing.policies --write [--parts test,tune,generated]   # replay and keep
    python -m benchmarks.routing.policies --table      # docs/residency.md's table, of what was kept
    python -m benchmarks.routing.policies --record     # of what was kept: bar 02.6 into bars.json

The value policy's constants were chosen on the tune parts; the bar is judged on the test parts. Some
ten minutes of one core; rows are kept in benchmarks/results/routing/policies.json, part by part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.foundation.common import record
from benchmarks.routing.generator import PUBLISHED_GEOMETRY, generate
from benchmarks.routing.statistics import KINDS, Visits, load, visits
from headrace.experts.cache_policy import CacheShape, ValuePolicy
from headrace.experts.replay import (
    Replay,
    best_static_set,
    replay_belady,
    replay_decayed,
    replay_lru,
    replay_policy,
    replay_static,
    slots_for,
    visits_of,
)

OUT = Path(__file__).parents[1] / "results" / "routing" / "policies.json"
RESIDENCIES = (0.15, 0.25, 0.50)
MORE_RESIDENCIES = (0.05, 0.10, 0.35, 0.75)  # of the five kinds after each other, for the plot
DECAYED_HALF_LIFE = 32  # the default that the value policy replaced
BAR = "02.6"
COMMAND = "python -m benchmarks.routing.policies --write; the same with --record"


def misses(replay: Replay) -> int:
    return replay.num_lookups - replay.num_hits


def row(name: str, trace: Visits, shape: tuple[int, int], residency: float) -> dict[str, Any]:
    """All policies on one trace. shape: layers, experts a layer."""
    slots = slots_for(residency, *shape)
    found = {
        "lru": replay_lru(trace, slots),
        "decayed": replay_decayed(trace, slots, DECAYED_HALF_LIFE * shape[0]),
        "value": replay_policy(trace, ValuePolicy(CacheShape(*shape, slots))),
        "static_hindsight": replay_static(trace, best_static_set(trace, slots)),
        "belady": replay_belady(trace, slots),
    }
    lru, value, belady = found["lru"], found["value"], found["belady"]
    gap = belady.num_hits - lru.num_hits
    result = {
        "trace": name,
        "residency": residency,
        "slots": slots,
        **{policy: round(replay.hit_rate, 4) for policy, replay in found.items()},
        "fewer_misses_than_lru": round(1 - misses(value) / misses(lru), 4) if misses(lru) else 0.0,
        "decayed_fewer_misses": round(1 - misses(found["decayed"]) / misses(lru), 4),
        "of_static": round(value.num_hits / found["static_hindsight"].num_hits, 4),
        "of_belady": round(value.num_hits / belady.num_hits, 4),
        "of_gap_closed": round((value.num_hits - lru.num_hits) / gap, 4) if gap else 1.0,
    }
    print(json.dumps(result), flush=True)
    return result


def recorded(part: str) -> list[dict[str, Any]]:
    """Rows of the demo mixture's traces, each alone and the first 2,048 tokens of each in turn."""
    rows: list[dict[str, Any]] = []
    mixed: Visits = []
    for kind in KINDS:
        trace = load(kind, part)
        shape = (len(trace.meta.layers), trace.meta.num_experts)
        mixed += visits(trace)[: 2048 * shape[0]]
        rows += [row(kind, visits(trace), shape, r) for r in RESIDENCIES]
    rows += [row("mixed", mixed, shape, r) for r in sorted((*RESIDENCIES, *MORE_RESIDENCIES))]
    return [{"part": part, **found} for found in rows]


def generated() -> list[dict[str, Any]]:
    """Rows of generated routing at the published geometry."""
    ids = generate(PUBLISHED_GEOMETRY, tokens=1024, seed=1)
    shape = (PUBLISHED_GEOMETRY.num_layers, PUBLISHED_GEOMETRY.num_experts)
    trace = visits_of(ids.tolist(), shape[1])
    rows = [row("generated", trace, shape, r) for r in (0.15, 0.152, 0.25, 0.50)]
    return [{"part": "generated", **found} for found in rows]


def bar(rows: Sequence[dict[str, Any]], *, write: bool) -> None:
    """02.6: the trace and residency where the value policy saves least against LRU."""
    judged = [r for r in rows if r["part"] == "test" and r["residency"] in RESIDENCIES]
    worst = min(judged, key=lambda r: r["fewer_misses_than_lru"])

    def span(field: str) -> str:
        values = [100 * r[field] for r in judged]
        return f"{min(values):.1f} to {max(values):.1f}%"

    means = []
    for residency in RESIDENCIES:
        these = [r for r in judged if r["residency"] == residency and r["trace"] != "mixed"]
        mean = sum(r["fewer_misses_than_lru"] for r in these) / len(these)
        means.append(f"{100 * mean:.1f}% at {100 * residency:.0f}%")
    record(
        BAR, write=write, command=COMMAND, value=round(100 * worst["fewer_misses_than_lru"], 1),
        unit="% fewer misses than LRU, least of all held-out traces", peer="LRU (FreeToken's policy)",
        peer_value=round(100 * (1 - worst["lru"]), 1),
        note=f"least: {worst['trace']} at {100 * worst['residency']:.0f}% resident; mean of five kinds "
        f"{', '.join(means)}; worse than LRU on {sum(r['fewer_misses_than_lru'] < 0 for r in rows)} of "
        f"{len(rows)} replays; {span('of_static')} of the best static set in hindsight; "
        f"{span('of_belady')} of Belady's hits; {span('of_gap_closed')} of the gap from LRU to Belady; "
        "constants chosen on the tune parts; peer_value is LRU's miss rate there, in %",
    )  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Markdown: percent of look-ups that hit, and what the value policy saves."""
    names = "LRU", "best static set", "value policy", "Belady", "fewer misses than LRU"
    shares = "of the static set's hits", "of Belady's hits", "of the gap to Belady closed"
    print(f"| text | resident | {' | '.join((*names, *shares))} |")
    print("| --- " * 10 + "|")
    for r in rows:
        if r["part"] == "tune" or r["residency"] not in RESIDENCIES:
            continue
        columns = (
            "lru",
            "static_hindsight",
            "value",
            "belady",
            "fewer_misses_than_lru",
            "of_static",
        )
        listed = " | ".join(
            f"{100 * r[name]:.1f}" for name in (*columns, "of_belady", "of_gap_closed")
        )
        print(f"| {r['trace']} | {100 * r['residency']:.0f}% | {listed} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--parts", default="test,tune,generated")
    parser.add_argument("--record", action="store_true", help="do not replay: record what was kept")
    parser.add_argument("--table", action="store_true", help="do not replay: print what was kept")
    args = parser.parse_args()
    if args.table:
        table(json.loads(OUT.read_text())["rows"])
        return
    if args.record:
        bar(json.loads(OUT.read_text())["rows"], write=True)
        return
    parts = args.parts.split(",")
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows += generated() if part == "generated" else recorded(part)
    if "test" in parts:
        bar(rows, write=False)
    if args.write:
        kept = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
        rows = [r for r in kept if r["part"] not in parts] + rows
        OUT.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(found) for found in rows)
        OUT.write_text(f'{{"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
