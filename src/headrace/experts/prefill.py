"""Prompt chunks: both paths for the routed experts only, or stream whole layers?

T tokens of top-k routing over E experts touch, if all experts are alike,

    D(T) = E * (1 - (1 - k / E)^T)

different experts of a layer. A layer of a chunk can be served in two ways:

- *both paths*, as in decoding: what was routed and misses is split between PCIe and the CPU. The CPU
  takes a piece of so many tokens at a time (the request block), so a long chunk goes piece by piece, and
  each piece moves its missing experts anew. An expert of n tokens costs the CPU one read of its weights
  up to ``TOKENS_OF_A_READ`` tokens, beyond that time in proportion to n.
- *streaming*: all experts that are not resident travel once, at the link's own rate, while the GPU
  computes; the CPU is out of it.

The first grows with T, the second does not: there is one crossover, which the rates decide. Beside a fast
link it lies at one or two pieces, beside a slow one and much host memory above a chunk of 2,048 tokens.
The engine (``experts.stream``) asks this with the rates of the moment; a plan (``engine.plan``) takes the
shorter of the same two ways, at its own prices. Routers with favourites touch fewer experts than D(T), so
the true crossover lies higher, never lower.

Pure arithmetic: no tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.experts.split import GIGA, PathRates

# Tokens of a prompt that the CPU takes at a time: beyond it nearly every expert has several tokens, so that
# a longer request would move hardly fewer bytes a token. Bounds the request block too.
MAX_CPU_TOKENS = 128
# Longest chunk that is considered; beyond it every layer is streamed anyway.
LONGEST_CHUNK = 1 << 20
# Tokens of one expert that the CPU computes in the time of one read of its weights, where the machine
# profile does not say. Measured (H200 machine, 15 threads, 2026-11-30) for MXFP4 without matrix tiles: 111.8
# GB/s of weights at one token, 24.0 at 16; 16 * 24.0 / 111.8 = 3.4. With tiles 5.4, bfloat16 more than 6.
TOKENS_OF_A_READ = 3.4

# Where the machine's own was measured, it was with so many tokens of each expert and twice as many in the
# piece; rates of experts are named so (machine.profile).
MANY_TOKENS = 16
MANY = f"_of{MANY_TOKENS}"


@dataclass(frozen=True)
class PrefillRates:
    """What the crossover depends on.

    ``pcie_gbps``, ``cpu_gbps``: overlapped rates of single experts; 0 for a path that is not there.
    ``stream_gbps``: of big copies in a row, the CPU being idle. ``stream_latency_s``: before the first
    chunk is there. ``piece_latency_s``: what a piece on both paths costs beside its bytes.
    """

    pcie_gbps: float
    cpu_gbps: float
    stream_gbps: float
    expert_nbytes: int
    tokens_of_a_read: float = TOKENS_OF_A_READ
    stream_latency_s: float = 0.0
    piece_latency_s: float = 0.0


def prefill_rates(paths: PathRates, num_slices: int) -> PrefillRates:
    """The same for prompts as for steps. num_slices: of an expert."""
    return PrefillRates(
        pcie_gbps=paths.pcie_gbps,
        cpu_gbps=paths.cpu_gbps,
        stream_gbps=paths.pcie_alone_gbps or paths.pcie_gbps,
        expert_nbytes=num_slices * paths.slice_nbytes,
        tokens_of_a_read=paths.tokens_of_a_read or TOKENS_OF_A_READ,
        piece_latency_s=paths.fetch_latency_s + paths.cpu_latency_s,
    )


def pieces(tokens: int, most: int) -> list[int]:
    """Tokens of each piece of a chunk of which at most ``most`` go at a time."""
    whole, rest = divmod(tokens, most)
    return [most] * whole + [rest] * (rest > 0)


def expected_distinct(tokens: float, num_experts: int, top_k: int) -> float:
    """D(T): different experts that so many tokens touch in one layer, all experts being alike."""
    if not 0 < top_k <= num_experts:
        raise ConfigError(f"top-{top_k} of {num_experts} experts", param="top_k")
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def routed_seconds(
    tokens: int, num_experts: int, top_k: int, missing_share: float, rates: PrefillRates
) -> float:
    """Seconds a layer waits for the routed experts of one piece that miss, split so that both paths end
    together."""
    touched = expected_distinct(tokens, num_experts, top_k)
    missing = touched * missing_share
    if not tokens:
        return 0.0
    per_expert = tokens * top_k / touched
    slower = max(1.0, per_expert / rates.tokens_of_a_read)
    together = (rates.pcie_gbps + rates.cpu_gbps / slower) * GIGA / rates.expert_nbytes  # experts/s
    if not missing:
        return rates.piece_latency_s
    return rates.piece_latency_s + missing / together if together > 0 else float("inf")


def both_paths_seconds(
    tokens: int, most: int, num_experts: int, top_k: int, missing_share: float, rates: PrefillRates
) -> float:
    """Seconds a layer waits if the chunk goes in pieces of up to ``most`` tokens on both paths."""
    whole, rest = divmod(tokens, most)
    mixture = num_experts, top_k, missing_share, rates
    first = whole * routed_seconds(most, *mixture) if whole else 0.0
    return first + routed_seconds(rest, *mixture)


def streamed_seconds(num_experts: int, missing_share: float, rates: PrefillRates) -> float:
    """Seconds to stream a layer's experts that are not resident."""
    if rates.stream_gbps <= 0:
        return float("inf")
    nbytes = num_experts * missing_share * rates.expert_nbytes
    return rates.stream_latency_s + nbytes / (rates.stream_gbps * GIGA)


def streaming_crossover(
    num_experts: int, top_k: int, missing_share: float, rates: PrefillRates, most: int
) -> int | None:
    """Tokens of a chunk from which on streaming whole layers is faster; None if it never is.

    Args:
        missing_share: of a layer's experts not resident, 0 to 1.
        most: tokens that the CPU takes at a time.

    The time of both paths grows with T, so the crossover is found by bisection.
    """
    if not 0 <= missing_share <= 1:
        raise ConfigError(f"missing_share is {missing_share}, expected 0 to 1")
    if most < 1:
        raise ConfigError(f"{most} tokens at a time, expected at least 1")
    stream_s = streamed_seconds(num_experts, missing_share, rates)

    def streaming_wins(tokens: int) -> bool:
        return both_paths_seconds(tokens, most, num_experts, top_k, missing_share, rates) > stream_s

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
