"""More hardware never hurts, more context never takes less memory, and bytes are conserved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config_library import bundled_model
from headrace.engine.plan import Plan, make_plan, with_rate
from headrace.engine.plan_memory import Workload
from headrace.explain.step_cost import KV_BITS
from headrace.machine.known import known_machine

MODELS = ("gpt-oss-120b", "gpt-oss-20b", "qwen3.6-35b-a3b", "deepseek-v4-flash", "llama-3-8b")
MACHINES = ("rtx-4060-laptop", "rtx-5070-ti", "rtx-5090", "h200", "ddr5-6000-dual")
SPECS = {name: bundled_model(name).spec() for name in MODELS}
models, machines = st.sampled_from(MODELS), st.sampled_from(MACHINES)
contexts = st.integers(1, 8192)
GB = 10**9


def planned(model: str, machine, context: int, kv: str = "bf16", users: int = 1) -> Plan:
    return make_plan(SPECS[model], machine, Workload(context, users, kv, 1))


def speed(plan: Plan) -> float:
    return plan.speed.tokens_s.expected if plan.speed else 0.0


@settings(max_examples=60, deadline=None)
@given(models, machines, contexts, st.integers(1, 64))
def test_more_vram_is_never_slower(model, name, context, more):
    machine = known_machine(name)
    if machine.gpu is None:
        return
    bigger = replace(machine.gpu, memory_nbytes=machine.gpu.memory_nbytes + more * GB)
    before = planned(model, machine, context)
    after = planned(model, replace(machine, gpu=bigger), context)
    assert speed(after) >= speed(before) * (1 - 1e-9)
    assert after.fits or not before.fits


@settings(max_examples=60, deadline=None)
@given(
    models, machines, contexts, st.sampled_from(("hbm_read", "pcie_h2d", "dram_read", "disk_read"))
)
def test_a_faster_part_is_never_slower(model, name, context, rate):
    machine = known_machine(name)
    if rate not in machine.rates:
        return
    before, after = (planned(model, m, context) for m in (machine, with_rate(machine, rate, 1.7)))
    assert speed(after) >= speed(before) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(models, contexts, contexts, st.sampled_from(tuple(KV_BITS)), st.integers(1, 4))
def test_longer_contexts_never_take_less(model, one, other, kv, users):
    short, long = sorted((one, other))
    machine = known_machine("h200")
    plans = [planned(model, machine, length, kv, users) for length in (short, long)]
    caches = [p.layout.used["vram"]["KV cache"] for p in plans if p.layout.used.get("vram")]
    assert caches == sorted(caches)
    assert speed(plans[0]) >= speed(plans[1]) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(models, machines, contexts, st.integers(4, 256))
def test_nothing_exceeds_its_tier_and_no_expert_is_lost(model, name, context, ram):
    machine = known_machine(name)
    host = replace(machine.host, memory_nbytes=ram * GB)
    layout = planned(model, replace(machine, host=host), context).layout
    if layout.mode == "none":
        assert layout.short_nbytes > 0
        return
    for tier in layout.capacity:
        if layout.used.get(tier) and tier != "ram":
            assert layout.free(tier) >= 0
    spec = SPECS[model]
    if layout.mode in ("ram", "disk"):
        held = layout.used["ram"]["experts"] + layout.used.get("disk", {}).get("experts", 0)
        assert held == spec.moe_layers * spec.num_experts * spec.expert_nbytes


@pytest.mark.parametrize("model", MODELS)
def test_intervals_hold_what_is_expected(model):
    for name in MACHINES:
        found = planned(model, known_machine(name), 1024).speed
        if found is not None:
            assert found.tokens_s.low <= found.tokens_s.expected <= found.tokens_s.high
            assert found.ttft_s.low <= found.ttft_s.expected <= found.ttft_s.high
