"""Draw docs/residency.md's plots from ``benchmarks/results/routing/policies.json``.

python -m benchmarks.routing.residency_plots
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.routing.plots import IMAGES
from benchmarks.routing.policies import OUT, RESIDENCIES
from benchmarks.routing.statistics import KINDS
from headrace.experts.hit_rate import DEMO_MIXTURE, predict_hit_rate
from headrace.experts.split import PathRates, best_fetch_count, layer_seconds

POLICIES = (
    ("belady", "Belady (sees ahead)", "tab:grey"),
    ("value", "value policy", "tab:green"),
    ("decayed", "decayed frequency, half-life 32", "tab:olive"),
    ("static_hindsight", "best static set in hindsight", "tab:orange"),
    ("lru", "LRU", "tab:blue"),
)
# The H200 machine's measured rates and expert (KERNELS notes, 2026-11-29), in quarters.
MEASURED = PathRates(51.0, 73.0, 3_304_800)
SLICES = 4


def hit_rates(rows: list[dict[str, Any]]) -> None:
    """Left: hits of all five kinds after each other; right: misses saved against LRU by kind."""
    figure, (hits, saved) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    mixed = sorted(
        (r for r in rows if r["part"] == "test" and r["trace"] == "mixed"),
        key=lambda r: r["residency"],
    )
    x = [100 * r["residency"] for r in mixed]
    for name, label, colour in POLICIES:
        hits.plot(x, [100 * r[name] for r in mixed], color=colour, label=label, marker=".", ms=5)
    fine = [at / 100 for at in range(2, 80)]
    for name, colour in (("value", "tab:green"), ("lru", "tab:blue")):
        predicted = [100 * predict_hit_rate(64, 4, r, name, DEMO_MIXTURE) for r in fine]
        hits.plot([100 * r for r in fine], predicted, color=colour, ls=":", lw=1)
    hits.plot([], [], color="black", ls=":", lw=1, label="hit-rate model")
    hits.set(xlabel="% of experts resident", ylabel="% of look-ups hit", ylim=(0, 100))
    hits.legend(fontsize=7, loc="lower right")
    width = 0.25
    for at, residency in enumerate(RESIDENCIES):
        values = [
            100 * r["fewer_misses_than_lru"]
            for kind in KINDS
            for r in rows
            if (r["part"], r["trace"], r["residency"]) == ("test", kind, residency)
        ]
        places = [place + (at - 1) * width for place in range(len(KINDS))]
        saved.bar(places, values, width, label=f"{100 * residency:.0f}% resident")
    saved.axhline(10, color="black", lw=0.8, ls="--")
    saved.set_xticks(range(len(KINDS)), KINDS, fontsize=8)
    saved.set(ylabel="% fewer misses than LRU, held-out text")
    saved.legend(fontsize=7, loc="lower left")
    for axis in (hits, saved):
        axis.grid(alpha=0.3)
    figure.savefig(IMAGES / "residency-hits.png", dpi=85)


def split() -> None:
    """What a layer waits for its misses, by who serves them."""
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    misses = range(17)
    x = [m / SLICES for m in misses]
    ways = (
        ("all fetched", "tab:orange", lambda m: m),
        ("all on the CPU", "tab:blue", lambda m: 0),
        ("best split in quarters", "tab:green", lambda m: best_fetch_count(m, MEASURED)),
    )
    for label, colour, count in ways:
        y = [1e3 * layer_seconds(m, count(m), MEASURED) for m in misses]
        axis.plot(x, y, label=label, color=colour, marker=".", ms=4)
    axis.set(xlabel="missing experts of a layer (13.2 MB)", ylabel="ms the layer waits")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(IMAGES / "residency-split.png", dpi=85)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    hit_rates(json.loads(OUT.read_text())["rows"])
    split()


if __name__ == "__main__":
    main()
