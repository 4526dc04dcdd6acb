"""How often the experts that a token wants are in VRAM, from the share of experts that fit there.

A power law r^b through one published point: 15.2% of gpt-oss-120b's experts resident served 31.5% of
the look-ups under LRU (blog post on one RTX 5070 Ti, 2026). The ends of the interval are uniform
routing, where the share itself is the rate, and agents' routing on other models: with about 38% of
Qwen3.6-35B-A3B's experts resident 84% were served, with about 11% of DeepSeek-V4-Flash's 61%
(the same engine on an RTX 5090; exponents 0.18 and 0.22).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

PUBLISHED_RESIDENT, PUBLISHED_HITS = 0.152, 0.315
EXPONENT = log(PUBLISHED_HITS) / log(PUBLISHED_RESIDENT)
EXPONENT_AGENTS = 0.22


@dataclass(frozen=True)
class HitRate:
    """Share of look-ups served from VRAM: ``expected``, and an interval around it."""

    low: float
    expected: float
    high: float


def expected_hit_rate(resident: float) -> HitRate:
    """The hit rate of a cache that holds ``resident`` of all experts (0 to 1).

    Monotonic, 0 at 0 and 1 at 1.
    """
    share = min(1.0, max(0.0, resident))
    return HitRate(
        share, share**EXPONENT if share else 0.0, share**EXPONENT_AGENTS if share else 0.0
    )
