"""Cache replays against cases worked by hand and exhaustive search."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import combinations
from random import Random

import pytest

from headrace.experts.replay import (
    Replay,
    best_static_set,
    replay_belady,
    replay_decayed,
    replay_lru,
    replay_static,
    slots_for,
    visits_of,
)


def test_visits_go_token_by_token_through_the_layers() -> None:
    ids = [[[0, 2], [1, -1]], [[3, 0], [2, 2]]]  # 2 layers, 2 tokens, 4 experts
    assert visits_of(ids, 4) == [(0, 2), (7, 4), (1,), (6,)]


def test_slots_for_residency() -> None:
    assert slots_for(0.152, 10, 64) == 97  # 97.28
    assert slots_for(1.0, 8, 32) == 256


def test_lru_by_hand() -> None:
    # a b c a: with two slots c evicts a; a b a c a: every later a is there
    assert replay_lru([(1,), (2,), (3,), (1,)], 2) == Replay(4, 0)
    assert replay_lru([(1,), (2,), (1,), (3,), (1,)], 2) == Replay(5, 2)
    # a visit is looked up before it changes anything: 1 is still there when (2, 1) comes
    assert replay_lru([(1,), (2, 1)], 1) == Replay(3, 1)


def test_a_cycle_one_longer_than_the_cache_defeats_lru_but_not_belady() -> None:
    cycle = [(k % 4,) for k in range(40)]
    assert replay_lru(cycle, 3).num_hits == 0
    # with bypass, two of four stay: 3 slots keep 3 of the 4 keys for good, 27 of 36 later uses
    assert replay_belady(cycle, 3).num_hits == 27
    assert replay_static(cycle, best_static_set(cycle, 3)).num_hits == 30


def test_static_takes_the_most_frequent() -> None:
    visits = [(5, 1), (5, 2), (5, 1), (2,)]
    assert best_static_set(visits, 2) == {5, 1}  # 1 and 2 tie: the smaller key
    assert replay_static(visits, frozenset({5, 1})) == Replay(7, 5)


def test_no_slots_and_no_visits() -> None:
    assert replay_lru([(1,), (1,)], 0) == Replay(2, 0)
    assert replay_belady([(1,), (1,)], 0) == Replay(2, 0)
    assert replay_belady([], 3).hit_rate == 0.0


def most_hits(visits: list[tuple[int, ...]], num_slots: int) -> int:
    """Tries every content of the cache after every visit."""

    @cache
    def best(at: int, resident: frozenset[int]) -> int:
        if at == len(visits):
            return 0
        hits = sum(k in resident for k in visits[at])
        pool = sorted(resident | set(visits[at]))
        size = min(num_slots, len(pool))
        return hits + max(best(at + 1, frozenset(c)) for c in combinations(pool, size))

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_belady_equals_exhaustive_search(seed: int) -> None:
    rng = Random(seed)
    keys = rng.randint(3, 6)
    visits = [tuple(rng.sample(range(keys), rng.randint(1, 3))) for _ in range(9)]
    slots = rng.randint(1, 4)
    optimum = replay_belady(visits, slots)
    assert optimum.num_hits == most_hits(visits, slots)
    assert replay_lru(visits, slots).num_hits <= optimum.num_hits


@pytest.mark.parametrize("seed", range(10))
def test_lru_equals_a_list_of_last_uses(seed: int) -> None:
    rng = Random(seed)
    visits = [tuple(rng.sample(range(12), 3)) for _ in range(60)]
    last: dict[int, int] = {}
    clock = hits = 0
    resident: set[int] = set()
    for visit in visits:
        hits += len(resident & set(visit))
        for key in visit:
            clock += 1
            last[key] = clock
        resident |= set(visit)
        resident = set(sorted(resident, key=lambda k: -last[k])[:5])
    assert replay_lru(visits, 5) == Replay(180, hits)


def test_frequency_keeps_the_favourite_that_lru_loses() -> None:
    # 1 is asked for every third time; in between come keys that are never seen again
    visits = [(1,) if i % 3 == 0 else (100 + i,) for i in range(30)]
    assert replay_lru(visits, 2).num_hits == 0
    assert replay_decayed(visits, 2, float("inf")).num_hits == 9


@pytest.mark.parametrize("seed", range(10))
def test_decayed_frequency_equals_exact_fractions(seed: int) -> None:
    """A half-life of one visit: exact sums of powers of two, the lowest score found by a scan."""
    rng = Random(seed)
    visits = [tuple(rng.sample(range(10), 2)) for _ in range(400)]  # 2^400 passes the rescaling
    scores: dict[int, Fraction] = {}
    resident: set[int] = set()
    hits = 0
    for at, visit in enumerate(visits):
        hits += len(resident & set(visit))
        for key in visit:
            scores[key] = scores.get(key, Fraction(0)) + Fraction(2) ** at
        for key in visit:
            low = min(resident, key=lambda k: (scores[k], k), default=None)
            if key in resident:
                continue
            if len(resident) < 4:
                resident.add(key)
            elif low is not None and scores[key] > scores[low]:
                resident.remove(low)
                resident.add(key)
    assert replay_decayed(visits, 4, 1.0) == Replay(800, hits)
