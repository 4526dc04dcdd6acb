"""How often the experts that a token wants are in VRAM: the cache's prediction, with an interval around it.

Formula and expected statistics are ``experts.hit_rate``'s, those that the engine places experts by. How a
router repeats itself differs between models and texts, and nothing in a configuration tells, so that they
are the published ones of gpt-oss-120b; a plan says what other routers would make of it: one that chooses
uniformly, and agents' routing of DeepSeek-V4-Flash.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.experts.hit_rate import (
    EXPECTED,
    PolicyName,
    RoutingStatistics,
    predict_hit_rate,
)

# Popularity that hardly varies, so that the formula's power is an exponential.
UNIFORM = RoutingStatistics(1e6, 0.0, 1.0, 0.0, "uniform routing")
# One published point, 61% of look-ups under LRU with 11% of 256 experts resident (6 of them a token; a blog
# post on the FreeToken paper, 2026), fixes one number.
AGENTS = RoutingStatistics(0.12, 0.0, 1.0, 0.20, "agents on DeepSeek-V4-Flash, published")


@dataclass(frozen=True)
class HitRate:
    """Share of look-ups served from VRAM: ``expected``, and an interval around it."""

    low: float
    expected: float
    high: float


def expected_hit_rate(
    num_experts: int, top_k: int, resident: float, policy: PolicyName = "value"
) -> HitRate:
    """The hit rate of a cache that holds ``resident`` of all experts (0 to 1).

    Monotonic, 0 at 0 and 1 at 1.

    Args:
        num_experts, top_k: of one layer.
        policy: of the engine's cache.
    """
    share = min(1.0, max(0.0, resident))

    def rate(statistics: RoutingStatistics) -> float:
        return predict_hit_rate(num_experts, top_k, share, policy, statistics)

    return HitRate(rate(UNIFORM), rate(EXPECTED), rate(AGENTS))
