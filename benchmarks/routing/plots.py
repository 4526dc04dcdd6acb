"""Draw docs/routing.md's plots from ``benchmarks/results/routing/small.json``.

python -m benchmarks.routing.plots
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.routing.statistics import KINDS, OUT

IMAGES = Path(__file__).parents[2] / "docs" / "images"
POLICIES = (
    ("belady", "Belady", "tab:grey"),
    ("decayed", "decayed frequency", "tab:green"),
    ("static_hindsight", "static, in hindsight", "tab:orange"),
    ("static_all_kinds", "static, from other text", "tab:red"),
    ("lru", "LRU", "tab:blue"),
)


def percents(shares: dict[str, float]) -> tuple[list[int], list[float]]:
    """x: tokens; y: percent."""
    return [int(n) for n in shares], [100 * v for v in shares.values()]


def skew_and_reuse(result: dict[str, Any]) -> None:
    figure, (skew, reuse) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for kind in KINDS:
        found = result["kinds"][kind]
        curve = found["skew"]["curve"]
        x = [100 * (i + 1) / len(curve) for i in range(len(curve))]
        skew.plot(x, [100 * v for v in curve], label=kind)
        within = found["reuse"]["within_tokens"]
        reuse.semilogx(*percents(within), label=kind, base=2)
    skew.plot([0, 100], [0, 100], color="grey", lw=0.8, ls=":", label="even")
    even = result["kinds"]["prose"]["reuse"]["if_even"]
    reuse.semilogx(*percents(even), color="grey", lw=0.8, ls=":", label="even", base=2)
    skew.set(xlabel="most popular % of a layer's experts", ylabel="% of look-ups")
    reuse.set(xlabel="tokens", ylabel="% of look-ups whose expert served\nat most so long ago")
    for axis in (skew, reuse):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(IMAGES / "routing-skew-reuse.png", dpi=90)


def hits(result: dict[str, Any]) -> None:
    figure, axes = plt.subplots(
        2, 3, figsize=(9, 5), sharex=True, sharey=True, layout="constrained"
    )
    published = result["published"]
    for axis, kind in zip(axes.flat, (*KINDS, "mixed"), strict=True):
        rows = result["kinds"][kind]["hits"]
        x = [100 * r["residency"] for r in rows]
        for name, label, colour in POLICIES:
            axis.plot(x, [100 * r[name] for r in rows], color=colour, label=label, marker=".", ms=4)
        axis.plot(
            100 * published["residency"], 100 * published["lru"], "k*", label="gpt-oss-120b, LRU"
        )
        axis.set_title(kind, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("% of experts resident")
    for axis in axes[:, 0]:
        axis.set_ylabel("% of look-ups hit")
    axes[0, 0].legend(fontsize=6)
    figure.savefig(IMAGES / "routing-hits.png", dpi=75)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    result = json.loads(OUT.read_text())
    skew_and_reuse(result)
    hits(result)


if __name__ == "__main__":
    main()
