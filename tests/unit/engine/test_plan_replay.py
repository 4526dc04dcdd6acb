"""Plans replayed with a routing: times by hand, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from headrace.core.config_library import bundled_model
from headrace.core.errors import ConfigError
from headrace.engine.plan import Plan, make_plan
from headrace.engine.plan_caution import FEW_TOKENS, caution
from headrace.engine.plan_memory import Workload
from headrace.engine.plan_replay import MOST_TOKENS, replay_routing
from headrace.machine.known import known_machine
from headrace.machine.profile import Rate

LAYERS, EXPERTS, TOP = 24, 32, 4  # gpt-oss-20b
# What the catalogue and engines.toml say of an RTX 4060 laptop: 256 GB/s, 0.834 and 0.822 of it reached.
GPU_GBPS = 256 * 0.834 * 0.822


def plan(machine: str = "rtx-4060-laptop", concurrency: int = 1) -> Plan:
    spec = bundled_model("gpt-oss-20b").spec()
    return make_plan(spec, known_machine(machine), Workload(8192, concurrency))


def others_s(found: Plan) -> float:
    """Seconds of a step outside of the experts."""
    assert found.speed is not None
    paths = ("hits", "fetch", "fetched", "misses")
    leaves = found.speed.decode.leaves
    return sum(one.exposed_s for one in leaves if one.leaf.path not in paths)


def test_the_same_experts_every_time_are_all_hits():
    found = plan()
    assert found.layout.slots > LAYERS * TOP
    ids = [[[0, 1, 2, 3]] * 40] * LAYERS
    replayed = replay_routing(found, ids, EXPERTS)
    assert replayed.num_steps == 30  # a quarter has warmed the cache
    assert replayed.hit_rate == 1.0
    reading = LAYERS * TOP * found.spec.expert_nbytes / (GPU_GBPS * 1e9)
    assert replayed.step_s == pytest.approx(others_s(found) + reading, rel=1e-3)


def test_experts_that_never_come_back_in_time_all_miss_and_take_both_paths():
    found = plan()
    chosen = itertools.cycle([[i, i + 1, i + 2, i + 3] for i in range(0, EXPERTS, TOP)])
    # every expert once in 8 tokens, so that no cache serves more than its own share of them
    tokens = [next(chosen) for _ in range(80)]
    replayed = replay_routing(found, [tokens] * LAYERS, EXPERTS)
    assert found.layout.resident / 2 < replayed.hit_rate < found.layout.resident + 0.01
    moved = replayed.fetched_nbytes + replayed.cpu_nbytes
    wanted = replayed.num_steps * LAYERS * TOP * found.spec.expert_nbytes
    assert moved == pytest.approx((1 - replayed.hit_rate) * wanted, rel=1e-3)
    assert 0 < replayed.fetched_nbytes < moved


def test_measured_rates_of_both_paths_are_taken():
    """A link of 1 GB/s and a CPU of 3: of four slices that miss, one is fetched and three computed."""
    machine = known_machine("rtx-4060-laptop")
    measured = {
        "pcie_gather": Rate(1.0, "GB/s", "alone", "measured"),
        "cpu_experts_mxfp4": Rate(3.0, "GB/s", "alone", "measured"),
    }
    spec = bundled_model("gpt-oss-20b").spec()
    box = replace(machine, rates={**machine.rates, **measured})
    found = make_plan(spec, box, Workload(8192))
    chosen = itertools.cycle([[i, i + 1, i + 2, i + 3] for i in range(0, EXPERTS, TOP)])
    replayed = replay_routing(found, [[next(chosen) for _ in range(80)]] * LAYERS, EXPERTS)
    share = replayed.fetched_nbytes / (replayed.fetched_nbytes + replayed.cpu_nbytes)
    assert share == pytest.approx(1 / 4, abs=0.08)  # whole slices of a layer's misses


def test_a_long_routing_is_cut_to_what_is_said():
    replayed = replay_routing(plan(), [[[0, 1, 2, 3]] * (2 * MOST_TOKENS)] * LAYERS, EXPERTS)
    assert replayed.num_steps == MOST_TOKENS - MOST_TOKENS // 4


def test_other_routings_and_plans_without_a_cache_are_refused():
    ids = [[[0, 1, 2, 3]] * 8] * LAYERS
    with pytest.raises(ConfigError, match="36 layers of 32 experts, 4 a token; gpt-oss-20b has 24"):
        replay_routing(plan(), [*ids, *ids[:12]], EXPERTS)
    with pytest.raises(ConfigError, match="of 128 experts"):
        replay_routing(plan(), ids, 128)
    with pytest.raises(ConfigError, match="0 layers"):
        replay_routing(plan(), [], EXPERTS)
    with pytest.raises(ConfigError, match="no experts are fetched"):
        replay_routing(plan("h200"), ids, EXPERTS)
    with pytest.raises(ConfigError, match="one sequence"):
        replay_routing(plan("rtx-4060-laptop", 4), ids, EXPERTS)


def test_few_tokens_are_a_caution_and_many_are_none():
    assert caution(FEW_TOKENS) is None
    assert (caution(FEW_TOKENS - 1) or "").startswith("127 tokens of routing say little")
    assert (caution(1) or "").startswith("1 token of routing says little")


def test_progress_is_told_at_each_token():
    told: list[float] = []
    replay_routing(plan(), [[[0, 1, 2, 3]] * 4] * LAYERS, EXPERTS, progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]
