"""The hit rate that a cache of experts will have, from how a router repeats itself.

A look-up's *gap* is how many tokens ago the same expert served its layer. Gaps follow

    P(gap > g) = S(g) = r * exp(-x / tau) + (1 - r) * (1 + x / s)^-(a + 1),      x = g * k / E

in units of the mean gap E / k, so that the statistics of one router speak for others of another size.
The second part is what experts of gamma-distributed popularity (shape a; smaller: more uneven) give,
the first is a share r of look-ups that repeat at once; s makes the mean gap 1.

LRU (Denning's working sets): in g tokens a layer touches the share D(g) = k / E * (S(0) + ... +
S(g - 1)) of its experts. A cache that holds the share rho remembers g* tokens with D(g*) = rho, and
hits look-ups of gaps up to it; what is touched varies around its mean, which costs half a token
(replays). A cache smaller than one token's experts hits nothing.

Value policy: it forgets the cold ones earlier, which replays show as a share ``gain`` of misses less
than a smooth g* would give; the advantage ends as everything becomes resident.

Pure arithmetic. Compared with replays: tests/unit/experts/test_hit_rate.py states the errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Literal

from headrace.core.errors import ConfigError
from headrace.core.words import counted

PolicyName = Literal["lru", "value"]
LONGEST_GAP = 1 << 16  # tokens; beyond it every expert was met
SUMMED_GAPS = (
    64  # one by one; beyond them S is smooth, and its integral is the sum to a part in 10^4
)
FLUCTUATION_TOKENS = 0.5
SMALLEST_USEFUL = 0.05  # residency from which on the value policy's gain is whole


@dataclass(frozen=True)
class RoutingStatistics:
    """How a router repeats itself: the letters of the module's formula.

    ``skew`` a, ``repeats`` r, ``repeat_span`` tau, ``gain`` of the value policy; ``source`` of them.
    """

    skew: float
    repeats: float
    repeat_span: float
    gain: float
    source: str

    def __post_init__(self) -> None:
        if not (self.skew > 0 and 0 <= self.repeats < 1 and self.repeat_span > 0):
            raise ConfigError(f"no such routing statistics: {self}")
        if not 0 <= self.gain < 1 or self.repeats * self.repeat_span >= 1:
            raise ConfigError(f"no such routing statistics: {self}")

    def longer(self, gap: float, chance: float) -> float:
        """S(gap): the share of look-ups whose gap is longer. ``chance``: k / E."""
        x = gap * chance
        spread = (1 + x / self._scale) ** -(self.skew + 1)
        return self.repeats * exp(-x / self.repeat_span) + (1 - self.repeats) * spread

    def beyond(self, gap: float, chance: float) -> float:
        """The integral of S from ``gap`` to infinity, tokens."""
        x = gap * chance
        spread = self._scale / self.skew * (1 + x / self._scale) ** -self.skew
        repeats = self.repeats * self.repeat_span * exp(-x / self.repeat_span)
        return (repeats + (1 - self.repeats) * spread) / chance

    @property
    def _scale(self) -> float:
        return self.skew * (1 - self.repeats * self.repeat_span) / (1 - self.repeats)


# Fitted to the gaps of the demo mixture's five tune parts together, gain to their replays (2026-11-29).
DEMO_MIXTURE = RoutingStatistics(0.82, 0.25, 0.058, 0.10, "demo mixture `small`, tune parts")
# One published point, 31.5% of look-ups under LRU with 15.2% resident, fixes one number; the gain is
# that of generated routing with the same hit rate (benchmarks/routing/generator.py).
GPT_OSS_120B = RoutingStatistics(0.63, 0.0, 1.0, 0.20, "published hit rate of gpt-oss-120b")
# What a router is taken to be where nothing tells: by the engine when it places experts, and by plans.
EXPECTED = GPT_OSS_120B


def remembered_tokens(residency: float, chance: float, statistics: RoutingStatistics) -> float:
    """g*: for how many tokens a layer's touched experts fit into this share of them."""
    touched = 0.0
    for gap in range(SUMMED_GAPS):
        more = chance * statistics.longer(gap, chance)
        if touched + more >= residency:
            return gap + (residency - touched) / more
        touched += more
    # Each whole gap stands for the half before it and the half behind it.
    left = chance * statistics.beyond(SUMMED_GAPS - 0.5, chance) - (residency - touched)
    low, high = float(SUMMED_GAPS), float(LONGEST_GAP)
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        if chance * statistics.beyond(middle - 0.5, chance) > left:
            low = middle
        else:
            high = middle
    return high


def predict_hit_rate(
    num_experts: int,
    top_k: int,
    residency: float,
    policy: PolicyName = "value",
    statistics: RoutingStatistics = EXPECTED,
) -> float:
    """The share of look-ups that hit, once the cache is warm; batch 1.

    Args:
        num_experts, top_k: of one layer.
        residency: experts in VRAM over all experts of the model, one arena over all layers. (The
            number of layers cancels: a step passes all of them.)

    Raises:
        ConfigError: residency is not a share, or top_k is not of these experts.
    """
    if not 0 <= residency <= 1:
        raise ConfigError(f"residency is {residency}, expected 0 to 1", param="residency")
    if not 0 < top_k <= num_experts:
        raise ConfigError(f"top-{top_k} of {counted(num_experts, 'expert')}", param="top_k")
    if residency >= 1:
        return 1.0
    chance = top_k / num_experts
    tokens = remembered_tokens(residency, chance, statistics)
    if policy == "lru":
        if tokens < 1:
            return 0.0
        return 1 - statistics.longer(max(tokens - FLUCTUATION_TOKENS, 1.0), chance)
    within = min(tokens, 1.0) * (1 - statistics.longer(max(tokens, 1.0), chance))
    gain = statistics.gain * min(1.0, residency / SMALLEST_USEFUL, 2 * (1 - residency))
    return 1 - (1 - within) * (1 - gain)


def residency_for(
    hit_rate: float,
    num_experts: int,
    top_k: int,
    policy: PolicyName = "value",
    statistics: RoutingStatistics = EXPECTED,
) -> float:
    """The smallest residency predicted to reach this hit rate, to 0.0001."""
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if predict_hit_rate(num_experts, top_k, middle, policy, statistics) >= hit_rate:
            high = middle
        else:
            low = middle
    return high
