"""What the recorded routes look like, and what caches would have hit: docs/routing.md's figures.

    python -m benchmarks.routing.statistics [--write]

Reads ``benchmarks/routing/traces``; ``--write`` keeps ``benchmarks/results/routing/small.json``.
Everything is computed on the test parts; half-lives and static sets that a real system could have
are chosen on the tune parts.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.trace import RoutingTrace
from headrace.experts.replay import (
    best_static_set,
    replay_belady,
    replay_decayed,
    replay_lru,
    replay_static,
    slots_for,
    visits_of,
)

TRACES = Path(__file__).parent / "traces"
OUT = Path(__file__).parents[1] / "results" / "routing" / "small.json"
KINDS = ("prose", "code", "dialogue", "tables", "agent")
# 0.152 is the residency of the published gpt-oss-120b figure: 31.5% of look-ups under LRU.
RESIDENCIES = (0.05, 0.10, 0.152, 0.25, 0.35, 0.50, 0.75)
PUBLISHED = {"model": "gpt-oss-120b", "residency": 0.152, "lru": 0.315}
HALF_LIVES_TOKENS = (4, 16, 64, 256, 1024, float("inf"))
TOP = (0.10, 0.152, 0.25, 0.50)
REUSE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Visits = list[tuple[int, ...]]


def load(kind: str, part: str) -> RoutingTrace:
    return RoutingTrace.load(TRACES / f"{kind}.{part}.npz")


def visits(trace: RoutingTrace) -> Visits:
    return visits_of(trace.ids.tolist(), trace.meta.num_experts)


def skew(trace: RoutingTrace) -> dict[str, Any]:
    """Share of look-ups that the most popular part of each layer's experts gets, layers averaged."""
    experts = trace.meta.num_experts
    counts = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in trace.ids])
    curve = np.sort(counts, 1)[:, ::-1].cumsum(1) / counts.sum(1, keepdims=True)
    mean = curve.mean(0)
    points = {f"{r:.3f}": round(float(mean[round(r * experts) - 1]), 4) for r in TOP}
    return {
        "top": points,
        "curve": [round(float(v), 4) for v in mean],
        "top_quarter_by_layer": [round(float(v), 4) for v in curve[:, experts // 4 - 1]],
    }


def token_gaps(ids: np.ndarray, documents: tuple[int, ...]) -> np.ndarray:
    """Tokens since the same expert of the same layer was last chosen in the document; 0: never."""
    starts = np.cumsum((0, *documents))
    gaps: list[int] = []
    for layer in ids:
        for begin, end in pairwise(starts):
            last: dict[int, int] = {}
            for at in range(begin, end):
                for expert in layer[at].tolist():
                    gaps.append(at - last[expert] if expert in last else 0)
                    last[expert] = at
    return np.array(gaps)


def reuse(trace: RoutingTrace) -> dict[str, Any]:
    """Share of look-ups whose expert served this layer at most so many tokens ago."""
    gaps = token_gaps(trace.ids, trace.meta.documents)
    chance = trace.ids.shape[2] / trace.meta.num_experts
    within = {str(n): round(float(((gaps > 0) & (gaps <= n)).mean()), 4) for n in REUSE_TOKENS}
    even = {str(n): round(1 - (1 - chance) ** n, 4) for n in REUSE_TOKENS}
    return {"within_tokens": within, "if_even": even}


def tune_half_life(tune: Visits, slots: int, layers: int) -> float:
    """The half-life, in tokens, with the most hits on a tune part."""
    return max(HALF_LIVES_TOKENS, key=lambda n: replay_decayed(tune, slots, n * layers).num_hits)


def hit_rates(
    test: Visits, tune: Visits, everything: Visits, shape: tuple[int, int]
) -> list[dict[str, Any]]:
    """One row a residency. shape: layers, experts a layer."""
    rows: list[dict[str, Any]] = []
    half_life = tune_half_life(tune, slots_for(0.152, *shape), shape[0])
    for residency in RESIDENCIES:
        slots = slots_for(residency, *shape)
        rates = {
            "lru": replay_lru(test, slots),
            "decayed": replay_decayed(test, slots, half_life * shape[0]),
            "static_hindsight": replay_static(test, best_static_set(test, slots)),
            "static_same_kind": replay_static(test, best_static_set(tune, slots)),
            "static_all_kinds": replay_static(test, best_static_set(everything, slots)),
            "belady": replay_belady(test, slots),
        }
        row = {name: round(replay.hit_rate, 4) for name, replay in rates.items()}
        rows.append({"residency": residency, "slots": slots, "half_life_tokens": half_life, **row})
    return rows


def mixed(shape: tuple[int, int], tokens: int = 2048) -> list[dict[str, Any]]:
    """The five kinds after each other, as one machine serves them; sets and half-life from tune."""
    parts = {
        part: [v for kind in KINDS for v in visits(load(kind, part))[: tokens * shape[0]]]
        for part in ("test", "tune")
    }
    return hit_rates(parts["test"], parts["tune"], parts["tune"], shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    tests = {kind: load(kind, "test") for kind in KINDS}
    tunes = {kind: visits(load(kind, "tune")) for kind in KINDS}
    first = tests["prose"]
    shape = (len(first.meta.layers), first.meta.num_experts)
    everything = [v for kind in KINDS for v in tunes[kind]]
    result: dict[str, Any] = {
        "model": first.meta.model, "layers": shape[0], "experts": shape[1],
        "chosen": int(first.ids.shape[2]), "tokens_per_part": int(first.ids.shape[1]),
        "published": PUBLISHED, "kinds": {},
    }  # fmt: skip
    for kind, trace in tests.items():
        rows = hit_rates(visits(trace), tunes[kind], everything, shape)
        result["kinds"][kind] = {"skew": skew(trace), "reuse": reuse(trace), "hits": rows}
        at = next(r for r in rows if r["residency"] == PUBLISHED["residency"])
        print(kind, json.dumps(at), flush=True)
    result["kinds"]["mixed"] = {"hits": mixed(shape)}
    print("mixed", json.dumps(result["kinds"]["mixed"]["hits"][2]))
    if args.write:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(result, indent=1).replace("Infinity", "null") + "\n")


if __name__ == "__main__":
    main()
