"""What the number of slices an expert is cut into costs: milliseconds a token of both paths, by the split.

python -m benchmarks.residency.slices

A layer's look-ups miss independently; whole experts miss. Rates are those of a decoding step on an H200
machine (2026-11-29): 44 GB/s fetched and 63 GB/s computed, 24% hits.
"""

from __future__ import annotations

from math import comb

from benchmarks.residency import geometry as geo
from headrace.experts.split import (
    CPU_LATENCY_S,
    FETCH_LATENCY_S,
    PathRates,
    best_fetch_count,
    cpu_seconds,
    fetch_seconds,
)

LAYERS, HIT_RATE, PCIE_GBPS, CPU_GBPS = 18, 0.241, 44.0, 63.0
COUNTS = (1, 3, 5, 6, 9, 10)


def token_seconds(slices: int) -> float:
    """Expected seconds a token waits for misses over all layers."""
    rates = PathRates(
        PCIE_GBPS, CPU_GBPS, geo.layout(num_slices=slices).slice_nbytes, FETCH_LATENCY_S, CPU_LATENCY_S
    )  # fmt: skip
    total = 0.0
    for misses in range(geo.TOP_K + 1):
        chance = (
            comb(geo.TOP_K, misses) * (1 - HIT_RATE) ** misses * HIT_RATE ** (geo.TOP_K - misses)
        )
        count = misses * slices
        q = best_fetch_count(count, rates)
        total += chance * max(fetch_seconds(q, rates), cpu_seconds(count - q, rates))
    return LAYERS * total


def main() -> None:
    for slices in COUNTS:
        print(f"{slices:2} slices: {1e3 * token_seconds(slices):.2f} ms a token")


if __name__ == "__main__":
    main()
