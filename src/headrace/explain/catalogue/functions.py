"""The functions that formulas may call, each in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType


def pairs(new: float, cached: float) -> float:
    """(query, key) pairs of causal attention: ``new`` tokens after ``cached`` ones.

    Query i (from 0) sees the cached tokens, its predecessors and itself: the sum of cached + i + 1.
    """
    return new * cached + new * (new + 1) / 2


def window_pairs(new: float, cached: float, window: float) -> float:
    """The same when each query sees its last ``window`` tokens only, itself among them."""
    growing = max(0.0, min(new, window - cached))  # queries whose whole past still fits
    return pairs(growing, cached) + (new - growing) * window


def distinct(experts: float, chosen: float, tokens: float) -> float:
    """Different experts that ``tokens`` tokens touch, on average, if each chooses uniformly.

    An expert is left out by one token with probability 1 - chosen/experts, by all of them with its
    power; 0 for a model without experts.
    """
    return experts * (1 - (1 - chosen / experts) ** tokens) if experts else 0.0


def round_tokens(acceptance: float, drafts: float) -> float:
    """Tokens that a round of speculation yields: 1 + a + ... + a^drafts, the target's own included.

    Drafts are accepted independently with probability a, up to the first that is refused
    (Leviathan et al. 2023, equation 1).
    """
    return sum(acceptance**i for i in range(int(drafts) + 1))


def acceptance_for(tokens: float, drafts: float) -> float:
    """The acceptance at which a round of ``drafts`` yields ``tokens``.

    0 where every acceptance is enough; infinite where none is.
    """
    if tokens <= 1:
        return 0.0
    if tokens > drafts + 1:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(60):  # halving: 2^-60 is below a double's resolution near 1
        middle = (low + high) / 2
        low, high = (middle, high) if round_tokens(middle, drafts) < tokens else (low, middle)
    return high


FUNCTIONS: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "min": min,
        "max": max,
        "ceil": math.ceil,
        "floor": math.floor,
        "log2": math.log2,
        "pairs": pairs,
        "window_pairs": window_pairs,
        "distinct": distinct,
        "round_tokens": round_tokens,
        "acceptance_for": acceptance_for,
    }
)

SAME_UNIT = frozenset(("min", "max"))  # the arguments' unit is the result's; the rest take counts
