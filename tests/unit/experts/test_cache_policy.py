"""Policies by hand, and the value policy's float32 arithmetic against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.experts.cache_policy import (
    Admission,
    CacheShape,
    LruPolicy,
    ValuePolicy,
    top_units,
    value_constants,
)
from headrace.experts.fast_policy import FastValuePolicy


def fill(policy: LruPolicy | ValuePolicy, *visits: tuple[int, ...]) -> None:
    """Steps of a one-layer model that offer every miss."""
    for visit in visits:
        policy.begin_step()
        for unit in policy.look_up(visit).misses:
            policy.admit(unit)


def test_lru_evicts_the_least_recent() -> None:
    policy = LruPolicy(CacheShape(1, 8, 2))
    fill(policy, (1,), (2,), (1,))
    policy.begin_step()
    assert policy.look_up((3, 1)).misses == (3,)
    assert policy.admit(3) == Admission(3, 2)
    assert set(policy.residents()) == {1, 3}


def test_the_value_of_one_use_by_hand() -> None:
    """After one use all counters are 1; floors are rate / (1 - 2^(-1 / half-life))."""
    policy = ValuePolicy(CacheShape(1, 4, 1))
    policy.begin_step()
    policy.look_up((2,))
    a = 1 + 0.02 / (1 - 2**-0.5)
    b = 1 + 0.003 / (1 - 2 ** (-1 / 16))
    c = 1 + 0.0005 / (1 - 2 ** (-1 / 512))
    assert policy.counters(2) == (1.0, 1.0, 1.0)
    assert policy.value(2) == pytest.approx(a * (b * c) ** 2, rel=1e-6)
    policy.begin_step()
    assert policy.counters(2) == pytest.approx([2**-0.5, 2 ** (-1 / 16), 2 ** (-1 / 512)], rel=1e-6)


def test_a_newcomer_must_beat_its_victim() -> None:
    policy = ValuePolicy(CacheShape(1, 8, 1))
    fill(policy, (5,), (5,), (5,), (5,))
    policy.begin_step()
    assert policy.look_up((6,)).misses == (6,)
    assert policy.admit(6) is None  # one use against four
    assert set(policy.residents()) == {5}
    fill(policy, (6,), (6,), (6,), (6,), (6,), (6,), (6,))
    assert set(policy.residents()) == {6}


def test_what_was_used_in_this_step_is_no_victim() -> None:
    policy = ValuePolicy(CacheShape(2, 4, 1))
    policy.begin_step()
    policy.look_up((0,))
    assert policy.admit(0) == Admission(0, None)
    for _ in range(5):  # 4 and 5 of layer 1 gather more than 0 has, in the same steps
        policy.begin_step()
        policy.look_up((0,))
        policy.look_up((4, 5))
        assert policy.admit(4) is None
        assert policy.admit(5) is None


def test_among_equals_the_layer_whose_turn_has_passed_loses() -> None:
    policy = ValuePolicy(CacheShape(3, 2, 3))
    policy.begin_step()
    for layer in range(3):
        unit = 2 * layer
        policy.look_up((unit,))
        policy.admit(unit)
    for _ in range(2):  # one of each layer, equally cold, and nothing used but 3 of layer 1
        policy.begin_step()
        policy.look_up((3,))
    # at layer 1: layer 2 comes next, layer 0 then, layer 1 (unit 2) last
    assert policy.admit(3) == Admission(3, 2)


def test_slices_of_an_expert_share_its_value() -> None:
    policy = ValuePolicy(CacheShape(1, 4, 3, num_slices=2))
    policy.begin_step()
    found = policy.look_up((1, 3))
    assert found.misses == (2, 3, 6, 7)
    assert [policy.admit(u) is not None for u in found.misses] == [True, True, True, False]
    policy.begin_step()
    assert policy.look_up((3, 1)).hits == (6, 2, 3)


def test_promotion_puts_a_unit_in_place() -> None:
    policy = ValuePolicy(CacheShape(1, 8, 2))
    fill(policy, (1,), (2, 1), (3, 2, 1))
    assert top_units(policy, 1, missing=True) == [3]
    assert top_units(policy, 1, missing=False) == [2]
    policy.replace(3, 2)
    assert set(policy.residents()) == {1, 3}
    with pytest.raises(ValueError, match="no place"):
        policy.replace(4, None)
    lru = LruPolicy(CacheShape(1, 8, 2))
    fill(lru, (1,), (2,))
    lru.replace(3, 1)
    fill(lru, (4,))  # what was promoted, not used, goes first
    assert set(lru.residents()) == {2, 4}


def test_no_slots() -> None:
    for policy in (LruPolicy(CacheShape(1, 4, 0)), ValuePolicy(CacheShape(1, 4, 0))):
        policy.begin_step()
        assert policy.look_up((1,)).misses == (1,)
        assert policy.admit(1) is None
    with pytest.raises(ValueError, match="no such cache"):
        CacheShape(0, 4, 1)


@pytest.mark.parametrize("made", [ValuePolicy, FastValuePolicy])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_the_value_policy_equals_a_naive_float32_model(
    num_slices: int, made: type[ValuePolicy | FastValuePolicy]
) -> None:
    """Every decision of 300 random steps, against whole-array float32 arithmetic of NumPy."""
    layers, experts, slots = 5, 12, 17
    rng = np.random.default_rng(7)
    policy = made(CacheShape(layers, experts, slots, num_slices))
    constants = value_constants(layers, num_slices)
    decay, floor, turn = (np.float32(v) for v in (constants.decay, constants.floor, constants.turn))
    counters = np.zeros((3, layers * experts), np.float32)
    resident: set[int] = set()

    def values() -> np.ndarray:
        a, b, c = (counters[i] + floor[i] for i in range(3))
        q = b * c
        return (a * q) * q

    weights = rng.gamma(0.7, size=(layers, experts)) + 0.01
    for _ in range(300):
        policy.begin_step()
        counters *= decay[:, None]
        start = values()
        ranking = sorted(resident, key=lambda u: (start[u // num_slices], u))
        used: set[int] = set()
        for layer in range(layers):
            chances = weights[layer] / weights[layer].sum()
            chosen = layer * experts + rng.choice(experts, 3, replace=False, p=chances)
            counters[:, chosen] += np.float32(1)
            used |= set(chosen.tolist())
            now = values()
            units = [e * num_slices + s for e in chosen.tolist() for s in range(num_slices)]
            missing = [u for u in units if u not in resident]
            missing.sort(key=lambda u: (-now[u // num_slices], u))
            found = policy.look_up(chosen.tolist())
            assert set(found.hits) == set(units) & resident
            assert list(found.misses) == missing
            live = [u for u in ranking if u in resident and u // num_slices not in used]
            live = live[: constants.window]
            keyed = [
                now[u // num_slices] * turn[(u // num_slices // experts - layer - 1) % layers]
                for u in live
            ]
            victims = [live[i] for i in np.argsort(keyed, kind="stable")]
            worth = dict(zip(live, keyed, strict=True))
            for unit in missing[: rng.integers(0, len(missing) + 1)]:
                expected: Admission | None = None
                if len(resident) < slots:
                    expected = Admission(unit, None)
                elif victims:
                    offered = now[unit // num_slices] * np.float32(constants.admission)
                    if offered > worth[victims[0]]:
                        expected = Admission(unit, victims.pop(0))
                assert policy.admit(unit) == expected
                if expected is not None:
                    resident.discard(-1 if expected.victim is None else expected.victim)
                    resident.add(unit)
        assert set(policy.residents()) == resident
        assert [policy.value(e) for e in range(layers * experts)] == values().tolist()
