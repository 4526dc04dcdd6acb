"""The sampler against float64 oracles, and its distribution against exact probabilities."""

import json
import math

import numpy as np
import pytest

from headrace.core.errors import InternalError
from headrace.core.request import SamplingParams
from headrace.engine.sampler import (
    LOGPROB_FLOOR,
    SamplingState,
    choose,
    kept_weights,
    logprob_of,
    penalized,
    uniform,
)


def state(prompt=(), generated=(), seed=0, index=0, **params):
    made = SamplingState(SamplingParams(**params), seed, index, tuple(prompt))
    for token in generated:
        made.record(token)
    return made


def f32(*values):
    return np.array(values, np.float32)


def oracle_set(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The kept ids and their probabilities in float64, by a full stable sort."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -p))
    order = order[p[order] >= min_p * p.max()]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        q = p[order] / p[order].sum()
        order = order[: int(np.searchsorted(np.cumsum(q), top_p)) + 1]
    kept = np.sort(order)
    return kept, p[kept] / p[kept].sum()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_k": 1, "top_p": 0.5}])
def test_b076_greedy_and_top_k_1_take_the_smallest_id_of_equals(params):
    logits = f32(1, 5, 2, 5, 5)
    assert choose(logits, state(**params), 3) == 1


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.02, "top_p": 0.95, "temperature": 2.0},
        {"temperature": 1e-4, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("size", [1, 7, 1000, 5003])
def test_kept_sets_equal_the_float64_oracle(params, spread, size):
    rng = np.random.default_rng(size)
    for _ in range(3):
        logits = (rng.standard_normal(size) * spread).astype(np.float32)
        ids, weights = kept_weights(logits, float(logits.max()), SamplingParams(**params))
        ids = np.arange(size) if ids is None else ids
        expected, p = oracle_set(logits, **params)
        # float32 weights may move the border of a cumulative sum by a token whose own probability
        # is of the order of the rounding error of the sum
        different = np.setxor1d(ids, expected)
        assert len(different) <= (1 if "top_p" in params and size > 100 else 0)
        if not len(different):
            np.testing.assert_allclose(weights / weights.sum(), p, rtol=2e-5)


def test_borders_among_equals_go_to_the_smallest_ids():
    logits = f32(0, 1, 1, 1, 1, 0)
    for params, expected in (
        (SamplingParams(top_k=2), [1, 2]),
        (SamplingParams(top_k=5), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=0.3), [1, 2]),  # each 1 has 0.211
        (SamplingParams(min_p=1.0), [1, 2, 3, 4]),
    ):
        ids, _ = kept_weights(logits, 1.0, params)
        assert ids.tolist() == expected
    ids, _ = kept_weights(f32(0, 0, 0, 0), 0.0, SamplingParams(top_p=0.5))
    assert ids.tolist() == [0, 1]  # exactly a half: two of four reach it


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.05}]
)
def test_samples_follow_the_distribution(params):
    """Pearson's chi-square with fixed seeds; the bound is the 99.99% quantile (Wilson-Hilferty)."""
    logits = (np.random.default_rng(1).standard_normal(20) * 1.5).astype(np.float32)
    kept, p = oracle_set(logits, **params)
    draws = 4000
    counts = np.zeros(20)
    for i in range(draws):
        counts[choose(logits, state(seed=i % 7, **params), i)] += 1
    assert counts.sum() == counts[kept].sum()
    statistic = ((counts[kept] - draws * p) ** 2 / (draws * p)).sum()
    freedom = len(kept) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


def test_b081_a_draw_depends_on_seed_index_and_position_only():
    logits = np.random.default_rng(2).standard_normal(500).astype(np.float32)
    alone = [choose(logits, state(seed=42), i) for i in range(20)]
    others = state(seed=7)
    mixed = []
    for i in range(20):
        choose(logits, others, i)
        mixed.append(choose(logits, state(seed=42), i))
    assert mixed == alone
    assert alone != [choose(logits, state(seed=43), i) for i in range(20)]
    assert alone != [choose(logits, state(seed=42, index=1), i) for i in range(20)]
    numbers = [uniform(1, 0, i) for i in range(2000)]
    assert 0 <= min(numbers) < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 4 * math.sqrt(1 / 12 / 2000)
    assert uniform(-(2**63), 3, 0) != uniform(2**63 - 1, 3, 0)


def test_b080_presence_and_frequency_count_generated_tokens_repetition_the_prompt_too():
    logits = f32(2, -2, 1, 3)
    only_prompt = state([0, 0, 1], presence_penalty=2, frequency_penalty=1)
    np.testing.assert_array_equal(penalized(logits, only_prompt), logits)
    both = state([0], [3, 3], presence_penalty=2, frequency_penalty=0.5)
    np.testing.assert_array_equal(penalized(logits, both), f32(2, -2, 1, 3 - 2 - 0.5 * 2))
    repetition = state([0, 1, 1], [3, 3], repetition_penalty=2.0)
    np.testing.assert_array_equal(penalized(logits, repetition), f32(1, -4, 1, 1.5))
    np.testing.assert_array_equal(logits, f32(2, -2, 1, 3))


def test_b079_penalties_and_bias_change_the_choice():
    logits = f32(2, 1.5, 1)
    assert choose(logits, state(temperature=0.0), 0) == 0
    assert choose(logits, state([], [0], temperature=0.0, presence_penalty=2), 0) == 1
    assert choose(logits, state([], [0, 1, 1], temperature=0.0, frequency_penalty=0.9), 0) == 0
    assert choose(logits, state([], [0, 0, 1], temperature=0.0, frequency_penalty=0.9), 0) == 2
    assert choose(logits, state([0, 1], temperature=0.0, repetition_penalty=3.0), 0) == 2
    assert choose(logits, state(temperature=0.0, logit_bias=((2, 5.0),)), 0) == 2


def test_logprobs_are_those_of_the_raw_logits():
    logits = np.random.default_rng(3).standard_normal(1000).astype(np.float32) * 3
    exact = logits.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    entry = logprob_of(logits, 17, 5)
    assert entry.token_id == 17
    assert entry.logprob == pytest.approx(exact[17], abs=1e-5)
    assert [t for t, _ in entry.top] == np.argsort(-exact)[:5].tolist()
    assert [v for _, v in entry.top] == pytest.approx(np.sort(exact)[::-1][:5], abs=1e-5)
    assert len(logprob_of(f32(1, 2), 0, 20).top) == 2  # never more than the vocabulary


def test_b087_logprobs_without_alternatives():
    entry = logprob_of(f32(0, 0), 1, 0)
    assert entry.top == ()
    assert entry.logprob == pytest.approx(-math.log(2))


def test_b085_minus_infinity_becomes_a_finite_floor():
    entry = logprob_of(f32(0, -np.inf, -1e30), 1, 3)
    assert entry.logprob == LOGPROB_FLOOR
    assert [v for _, v in entry.top] == [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR]
    json.dumps([entry.logprob, entry.top], allow_nan=False)


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 5e-324, 1e-3, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    logits = f32(-80, 3, 2.9, 40)
    token = choose(logits, state(temperature=temperature), 0)
    assert token == 3 or temperature > 1


def test_logits_that_are_not_finite_are_an_error():
    for bad in (f32(1, np.nan, 2), f32(1, np.inf), f32(-np.inf, -np.inf)):
        for params in ({"temperature": 0.0}, {}):
            with pytest.raises(InternalError, match="not finite"):
                choose(bad, state(**params), 0)
    assert choose(f32(-np.inf, 0.0), state(), 0) == 1
