"""A plan's decoding steps replayed with the routing of a real text, on a virtual clock.

Where ``engine.plan`` predicts a hit rate from statistics, this runs the engine's own cache policy, split and
overlap (``experts.simulate``, promotion in PCIe's idle time included) over what a router chose, with the
plan's slots, the machine's rates and the plan's price of everything that is no expert. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.core.errors import ConfigError
from headrace.engine.plan import Plan, path_rates
from headrace.experts.cache_policy import CacheShape, LruPolicy
from headrace.experts.fast_policy import FastValuePolicy
from headrace.experts.replay import visits_of
from headrace.experts.simulate import (
    Prediction,
    SimulatedMachine,
    machine_from_profile,
    simulate,
)
from headrace.experts.split import CPU_LATENCY_S, FETCH_LATENCY_S, PathRates
from headrace.explain import leaf
from headrace.explain.engine_model import EngineModel, engine_model, measured
from headrace.explain.step_time import StepTime

# Slices of an expert, as the engine cuts it where its format allows (experts.slab).
SLICES = 4
# Tokens that are replayed: 36 layers take 4 ms each (two Zen 4 cores). A quarter of them warms the cache.
MOST_TOKENS = 384
WARM_SHARE = 4
_EXPERT_PATHS = ("hits", "fetch", "fetched", "misses")
_ENDS = (leaf.LM_HEAD, leaf.SAMPLING, leaf.EMBED)


def replay_routing(
    plan: Plan,
    ids: Sequence[Sequence[Sequence[int]]],
    num_experts: int,
    engine: EngineModel | None = None,
    progress: Callable[[float], None] | None = None,
) -> Prediction:
    """Replay the routing of one sequence, ``MOST_TOKENS`` of it.

    Args:
        ids: [layers][tokens][k], the layers with experts only; -1 is nobody.
        num_experts: of one layer.
        progress: told the share of tokens that are done.

    Raises:
        ConfigError: the routing is another model's, or the plan has no cache of experts.
    """
    spec, layout = plan.spec, plan.layout
    if plan.speed is None or layout.mode != "ram" or plan.at_once > 1:
        why = "no experts are fetched there"
        if layout.mode == "disk":
            why = "what the disk gives decides there"
        elif plan.at_once > 1:
            why = "one sequence is replayed"
        raise ConfigError(
            f"--routing says nothing about this plan: {why}",
            hint="it is for one sequence of a mixture with experts in host memory beside a GPU",
            param="--routing",
        )
    tokens = min(len(ids[0]), MOST_TOKENS) if ids else 0
    found = (len(ids), num_experts, len(ids[0][0]) if tokens else 0)
    wanted = (spec.moe_layers, spec.num_experts, spec.num_experts_per_token)
    if found != wanted:
        raise ConfigError(
            "--routing: the file has {} layers of {} experts, {} a token; {} has {} of {}, {} a token".format(
                *found, spec.name, *wanted
            ),
            hint="record it with the same model: `headrace run MODEL --routing FILE`",
            param="--routing",
        )
    model = engine or engine_model("headrace")
    shape = CacheShape(spec.moe_layers, num_experts, layout.slots * SLICES, SLICES)
    policy = FastValuePolicy(shape) if model.policy == "value" else LruPolicy(shape)
    return simulate(
        visits_of([layer[:tokens] for layer in ids], num_experts),
        policy,
        _machine(plan, model),
        skip_steps=tokens // WARM_SHARE,
        progress=progress,
    )


def _machine(plan: Plan, engine: EngineModel) -> SimulatedMachine:
    """The plan's machine as the simulation takes it: rates of both paths as measured, where they were."""
    assert plan.speed is not None
    nbytes = max(1, plan.spec.expert_nbytes // SLICES)
    reach = 1.0 if measured(plan.machine, "hbm") else engine.reach.get("hbm", 1.0)
    gpu = plan.machine.rates["hbm_read"].value * reach * engine.kernel.get("hbm", 1.0)
    dense_s = _seconds(plan.speed.decode, ends=False) / plan.spec.moe_layers
    step_s = _seconds(plan.speed.decode, ends=True)
    fmt = plan.spec.formats.get("experts", "")
    if f"cpu_experts_{fmt}" in plan.machine.rates:
        found = machine_from_profile(plan.machine, fmt, nbytes, dense_s=dense_s, step_s=step_s)
        return replace(found, gpu_gbps=gpu)
    link, cpu = path_rates(plan.machine, engine)
    paths = PathRates(link, cpu, nbytes, FETCH_LATENCY_S, CPU_LATENCY_S)
    return SimulatedMachine(paths, gpu, dense_s=dense_s, step_s=step_s)


def _seconds(step: StepTime, *, ends: bool) -> float:
    """Of what is no expert: the step's ends, or its layers."""
    return sum(
        one.exposed_s
        for one in step.leaves
        if one.leaf.path not in _EXPERT_PATHS and (one.leaf.id in _ENDS) == ends
    )
