"""Prompt chunks: fetch the routed experts only, or stream whole layers?

T tokens of top-k routing over E experts touch, if all experts are alike,

    D(T) = E * (1 - (1 - k / E)^T)

different experts of a layer. Below some T it is cheaper to fetch and compute just those, on both paths
as in decoding; above it a layer's experts are streamed through a ring of slots at the copy engine's
full rate while the GPU computes, and the CPU, which has to compute each expert for many tokens, is out
of it. Routers with favourites touch fewer experts than D(T), so the true crossover lies higher, never
lower.

The engine's own rule is simpler (``experts.stream``): rates do not enter it yet.

Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.experts.split import GIGA

# Longest chunk that is considered; beyond it every layer is streamed anyway.
LONGEST_CHUNK = 1 << 20


@dataclass(frozen=True)
class PrefillRates:
    """What the crossover depends on.

    ``pcie_gbps``, ``cpu_gbps``: overlapped rates of single experts; 0 for a path that is not there.
    ``stream_gbps``: of big copies in a row. ``stream_latency_s``: before the first chunk is there.
    ``cpu_gflops``: of the CPU's expert kernel with many tokens (a multiply-add is two).
    ``expert_flops``: of one token in one expert, ``2 * weights``.
    """

    pcie_gbps: float
    cpu_gbps: float
    stream_gbps: float
    cpu_gflops: float
    expert_nbytes: int
    expert_flops: int
    stream_latency_s: float = 0.0


def expected_distinct(tokens: float, num_experts: int, top_k: int) -> float:
    """D(T): different experts that so many tokens touch in one layer, all experts being alike."""
    if not 0 < top_k <= num_experts:
        raise ConfigError(f"top-{top_k} of {num_experts} experts", param="top_k")
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def routed_seconds(
    tokens: int, num_experts: int, top_k: int, missing_share: float, rates: PrefillRates
) -> float:
    """Seconds a layer waits for the routed experts that miss, split so that both paths end together.

    The CPU takes as long for an expert as its bytes or its arithmetic, whichever is longer.
    """
    touched = expected_distinct(tokens, num_experts, top_k)
    missing = touched * missing_share
    per_expert = tokens * top_k / touched if touched else 0.0
    fetch_rate = rates.pcie_gbps * GIGA / rates.expert_nbytes  # experts a second
    cpu_rate = 0.0
    if rates.cpu_gbps > 0 and rates.cpu_gflops > 0:
        cpu_s = max(
            rates.expert_nbytes / (rates.cpu_gbps * GIGA),
            per_expert * rates.expert_flops / (rates.cpu_gflops * GIGA),
        )
        cpu_rate = 1.0 / cpu_s
    together = fetch_rate + cpu_rate
    if not missing:
        return 0.0
    return missing / together if together > 0 else float("inf")


def streamed_seconds(num_experts: int, missing_share: float, rates: PrefillRates) -> float:
    """Seconds to stream a layer's experts that are not resident."""
    if rates.stream_gbps <= 0:
        return float("inf")
    nbytes = num_experts * missing_share * rates.expert_nbytes
    return rates.stream_latency_s + nbytes / (rates.stream_gbps * GIGA)


def streaming_crossover(
    num_experts: int, top_k: int, missing_share: float, rates: PrefillRates
) -> int | None:
    """Tokens of a chunk from which on streaming whole layers is faster; None if it never is.

    Args:
        missing_share: of a layer's experts not resident, 0 to 1.

    The time of the routed experts grows with T, so the crossover is found by bisection.
    """
    if not 0 <= missing_share <= 1:
        raise ConfigError(f"missing_share is {missing_share}, expected 0 to 1")
    stream_s = streamed_seconds(num_experts, missing_share, rates)

    def streaming_wins(tokens: int) -> bool:
        return routed_seconds(tokens, num_experts, top_k, missing_share, rates) > stream_s

    if not streaming_wins(LONGEST_CHUNK):
        return None
    low, high = 0, LONGEST_CHUNK  # streaming loses at low, wins at high
    while high - low > 1:
        middle = (low + high) // 2
        if streaming_wins(middle):
            high = middle
        else:
            low = middle
    return high
