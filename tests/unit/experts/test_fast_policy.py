"""The value policy in NumPy chooses what the pure one chooses, bit for bit."""

import random
from dataclasses import replace

import pytest

from headrace.experts.cache_policy import CacheShape, ValuePolicy
from headrace.experts.fast_policy import FastValuePolicy
from headrace.experts.replay import replay_policy
from headrace.experts.simulate import SimulatedMachine, simulate
from headrace.experts.split import PathRates

MACHINE = SimulatedMachine(
    PathRates(50.0, 30.0, 4 * 10**6, 10e-6, 20e-6), gpu_gbps=800.0, dense_s=60e-6, step_s=2e-4
)


def visits(
    layers: int, experts: int, top_k: int, steps: int, seed: int = 3
) -> list[tuple[int, ...]]:
    """Some experts are asked for far more often than others, and which ones drifts."""
    rng = random.Random(seed)
    found: list[tuple[int, ...]] = []
    for step in range(steps):
        for layer in range(layers):
            chosen: set[int] = set()
            while len(chosen) < top_k:
                chosen.add((int(experts * rng.random() ** 3) + step // 40) % experts)
            found.append(tuple(layer * experts + e for e in sorted(chosen)))
    return found


@pytest.mark.parametrize(
    ("layers", "experts", "slots", "slices"),
    [(6, 32, 90, 4), (3, 16, 20, 1), (4, 8, 128, 4), (2, 8, 3, 4), (2, 8, 0, 4), (5, 64, 1000, 4)],
)
@pytest.mark.parametrize("link", [50.0, 4.0])
def test_replays_are_equal_to_the_last_bit(
    layers: int, experts: int, slots: int, slices: int, link: float
) -> None:
    """Demand fetches, promotions and prefetches: all ways in which a unit gets its slot."""
    shape = CacheShape(layers, experts, slots, slices)
    machine = replace(MACHINE, paths=replace(MACHINE.paths, pcie_gbps=link))
    asked = visits(layers, experts, 3, 120)
    guesses = [tuple(reversed(visit)) for visit in asked]
    for guessed in (None, guesses):
        pure, fast = (
            simulate(asked, policy, machine, skip_steps=30, guesses=guessed)
            for policy in (ValuePolicy(shape), FastValuePolicy(shape))
        )
        assert fast == pure


def test_whole_experts_are_equal_too_and_so_are_counters() -> None:
    shape = CacheShape(4, 16, 20)
    pure, fast = ValuePolicy(shape), FastValuePolicy(shape)
    asked = visits(4, 16, 2, 200)
    assert replay_policy(asked, pure) == replay_policy(asked, fast)
    assert set(pure.residents()) == set(fast.residents())
    for expert in range(shape.num_all):
        assert fast.counters(expert) == pure.counters(expert)
        assert fast.value(expert) == pure.value(expert)


@pytest.mark.parametrize("missing", [True, False])
def test_the_top_units_are_those_of_the_pure_policy(missing: bool) -> None:
    """Ties too: experts that nobody asked for all have the same value."""
    shape = CacheShape(2, 8, 9, 3)
    pure, fast = ValuePolicy(shape), FastValuePolicy(shape)
    for policy in (pure, fast):
        replayed = visits(2, 8, 2, 6)
        simulate(replayed, policy, MACHINE)
    for count in (-1, 0, 1, 2, 5, 9, 39, 48, 100):
        assert fast.top_units(count, missing=missing) == pure.top_units(count, missing=missing)


def test_a_unit_without_a_place_is_refused() -> None:
    policy = FastValuePolicy(CacheShape(1, 4, 1))
    policy.replace(2, None)
    with pytest.raises(ValueError, match="no place for unit 3: 1 of 1 slots used"):
        policy.replace(3, None)
    policy.replace(3, 2)
    assert list(policy.residents()) == [3]
