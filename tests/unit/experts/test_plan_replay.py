"""The plan, driven over recorded routing, is the value policy.

Where every miss is fetched both decide the same, hit for hit: with one token a step and one slice an
expert as ``replay_policy`` drives the policy, else with the policy given each step's distinct experts
and offered every miss. (Where less is fetched, the plan offers the policy's first misses only.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.trace import RoutingTrace
from headrace.experts.cache_policy import CacheShape, ValuePolicy, value_constants
from headrace.experts.plan_oracle import PlanShape, begin_step, new_tables, plan_layer
from headrace.experts.replay import replay_policy, slots_for, visits_of

TRACES = Path(__file__).parents[3] / "benchmarks" / "routing" / "traces"


def plan_shape(trace: RoutingTrace, residency: float, slices: int, most: int) -> PlanShape:
    layers, experts = len(trace.meta.layers), trace.meta.num_experts
    slots = slots_for(residency, layers, experts) * slices + slices // 2
    window = value_constants(layers, slices).window
    return PlanShape(layers, experts, slices, slots, most, window)


@pytest.mark.parametrize("residency", [0.15, 0.5])
@pytest.mark.parametrize("kind", ["prose", "agent"])
def test_one_token_and_one_slice_are_the_replay(kind: str, residency: float) -> None:
    trace = RoutingTrace.load(TRACES / f"{kind}.test.npz")
    ids = trace.ids[:, :240].tolist()
    top_k = len(ids[0][0])
    shape = plan_shape(trace, residency, 1, top_k)
    tables = new_tables(shape)
    hits = 0
    for token in range(len(ids[0])):
        begin_step(shape, tables)
        for layer in range(shape.num_layers):
            row = ids[layer][token]
            everything = range(top_k + 1)
            plan = plan_layer(shape, tables, layer, [row], [[1.0] * top_k], everything)
            hits += len(plan.hits)
    policy = ValuePolicy(CacheShape(shape.num_layers, shape.num_experts, shape.num_slots))
    replay = replay_policy(visits_of(ids, shape.num_experts), policy)
    assert hits == replay.num_hits > 0
    assert sorted(tables.owner_of) == sorted(policy.residents())


@pytest.mark.parametrize(("tokens", "slices"), [(1, 5), (3, 2)])
def test_batches_and_slices_are_the_policy(tokens: int, slices: int) -> None:
    trace = RoutingTrace.load(TRACES / "code.test.npz")
    ids = trace.ids[:, : 100 * tokens].tolist()
    top_k = len(ids[0][0])
    most = tokens * top_k * slices
    shape = plan_shape(trace, 0.2, slices, most)
    tables = new_tables(shape)
    policy = ValuePolicy(CacheShape(shape.num_layers, shape.num_experts, shape.num_slots, slices))
    refused = 0
    for step in range(100):
        begin_step(shape, tables)
        policy.begin_step()
        for layer in range(shape.num_layers):
            rows = ids[layer][step * tokens : (step + 1) * tokens]
            plan = plan_layer(
                shape, tables, layer, rows, [[1.0] * top_k] * tokens, range(most + 1)
            )  # fmt: skip
            used = sorted({layer * shape.num_experts + e for row in rows for e in row})
            found = policy.look_up(used)
            keys = [shape.key(layer, e.expert, e.slice_index) for e in plan.hits]
            assert keys == list(found.hits)
            keys = [shape.key(layer, e.expert, e.slice_index) for e in plan.fetches]
            assert keys == list(found.misses)
            assert plan.admitted == tuple(policy.admit(u) is not None for u in found.misses)
            refused += plan.admitted.count(False)
    assert refused > 0
    assert sorted(tables.owner_of) == sorted(policy.residents())
