"""The hit-rate model against replays of held-out traces, and at its ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.core.trace import RoutingTrace
from headrace.experts.cache_policy import CacheShape, ValuePolicy
from headrace.experts.hit_rate import (
    DEMO_MIXTURE,
    GPT_OSS_120B,
    RoutingStatistics,
    predict_hit_rate,
    remembered_tokens,
    residency_for,
)
from headrace.experts.replay import replay_lru, replay_policy, slots_for, visits_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KINDS = ("prose", "code", "dialogue", "tables", "agent")


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_replays_of_held_out_text_agree(policy: str) -> None:
    """Whole test traces, replayed by benchmarks/routing/policies.py. One number stands for five kinds
    that differ by 8 points from each other: each is met within 5 points, their mean within 2."""
    rows = json.loads((BENCHMARKS / "results" / "routing" / "policies.json").read_text())["rows"]
    for residency in (0.15, 0.25, 0.50):
        predicted = predict_hit_rate(64, 4, residency, policy, DEMO_MIXTURE)  # type: ignore[arg-type]
        found = [
            r[policy]
            for r in rows
            if r["part"] == "test" and r["residency"] == residency and r["trace"] in KINDS
        ]
        assert len(found) == 5
        assert predicted == pytest.approx(sum(found) / 5, abs=0.02), (residency, found)
        assert all(abs(predicted - rate) < 0.05 for rate in found), (residency, found)


@pytest.mark.parametrize("kind", ["prose", "agent"])
def test_the_value_policy_misses_less_than_lru_on_held_out_text(kind: str) -> None:
    """Bar 02.6 on the first tokens, cold start included; whole traces are the benchmark's."""
    trace = RoutingTrace.load(BENCHMARKS / "routing" / "traces" / f"{kind}.test.npz")
    visits = visits_of(trace.ids[:, :640].tolist(), trace.meta.num_experts)
    shape = (len(trace.meta.layers), trace.meta.num_experts)
    slots = slots_for(0.25, *shape)
    lru = replay_lru(visits, slots)
    value = replay_policy(visits, ValuePolicy(CacheShape(*shape, slots)))
    assert value.num_lookups - value.num_hits <= 0.95 * (lru.num_lookups - lru.num_hits)


def test_the_published_point() -> None:
    """gpt-oss-120b: 15.2% resident, 31.5% of look-ups under LRU."""
    found = predict_hit_rate(128, 4, 0.152, "lru", GPT_OSS_120B)
    assert found == pytest.approx(0.315, abs=0.002)


def test_even_routing_by_hand() -> None:
    """A huge shape is even popularity: after g tokens 1 - (1 - k / E)^g is touched, about."""
    even = RoutingStatistics(1e6, 0.0, 1.0, 0.0, "test")
    tokens = remembered_tokens(0.5, 1 / 16, even)
    assert tokens == pytest.approx(11.0, abs=0.4)  # ln 0.5 / ln (15 / 16) = 10.74
    assert predict_hit_rate(64, 4, 0.5, "lru", even) == pytest.approx(0.5, abs=0.04)


def test_the_ends() -> None:
    assert predict_hit_rate(64, 4, 1.0) == 1.0
    assert predict_hit_rate(64, 4, 0.0) == 0.0
    assert predict_hit_rate(64, 4, 0.05, "lru") == 0.0  # less than one token's 4 of 64
    assert 0.2 < predict_hit_rate(64, 4, 0.05, "value") < 0.35
    with pytest.raises(ConfigError, match=r"residency is 1\.5"):
        predict_hit_rate(64, 4, 1.5)
    with pytest.raises(ConfigError, match="top-65 of 64"):
        predict_hit_rate(64, 65, 0.5)
    with pytest.raises(ConfigError, match="no such routing statistics"):
        RoutingStatistics(0.0, 0.0, 1.0, 0.0, "test")


@pytest.mark.parametrize("policy", ["lru", "value"])
@pytest.mark.parametrize(("experts", "top_k"), [(64, 4), (128, 4), (256, 8), (8, 2)])
def test_more_residency_never_hits_less_and_value_never_less_than_lru(
    policy: str, experts: int, top_k: int
) -> None:
    rates = [
        predict_hit_rate(experts, top_k, at / 50, policy)  # type: ignore[arg-type]
        for at in range(51)
    ]
    assert rates == sorted(rates)
    for at, rate in enumerate(rates):
        assert rate <= predict_hit_rate(experts, top_k, at / 50, "value") + 1e-9


def test_residency_for_a_hit_rate_is_the_inverse() -> None:
    for wanted in (0.3, 0.61, 0.84):
        found = residency_for(wanted, 128, 4, "lru", GPT_OSS_120B)
        assert predict_hit_rate(128, 4, found, "lru", GPT_OSS_120B) == pytest.approx(
            wanted, abs=1e-3
        )
