"""A plan as data, for --json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from headrace.cli.plan_rates import rates_text
from headrace.engine.plan import Plan
from headrace.engine.plan_caution import caution
from headrace.engine.plan_changes import Change
from headrace.experts.simulate import Prediction
from headrace.explain.step_time import StepTime


def record(
    plan: Plan,
    changes: Sequence[Change] = (),
    nearest: Sequence[str] = (),
    replayed: Prediction | None = None,
    recorded: int = 0,
) -> dict[str, Any]:
    """Bytes, tokens a second, seconds; rates of the machine with their sources. ``recorded``: tokens of the
    routing that was replayed."""
    spec, layout = plan.spec, plan.layout
    return {
        "model": {
            "name": spec.name,
            "weights": spec.weights(),
            "nbytes": spec.nbytes(),
            "total_weights": spec.total_weights,
            "active_weights": spec.active_weights,
            "expert_nbytes": spec.expert_nbytes if spec.sparse else 0,
            "notes": list(spec.notes),
        },
        "machine": dataclasses.asdict(plan.machine),
        "rates": rates_text(plan.machine),
        "workload": dataclasses.asdict(plan.workload),
        "fits": plan.fits,
        "sequences_at_once": plan.at_once,
        "mode": layout.mode,
        "kv_format": layout.kv_format,
        "short_nbytes": layout.short_nbytes,
        "layout": {"used": layout.used, "capacity": layout.capacity},
        "slots": layout.slots,
        "resident": layout.resident,
        "chunk_tokens": layout.chunk,
        "speed": _speed(plan),
        "replayed": None if replayed is None else _replayed(replayed, recorded),
        "changes": [
            {
                "name": change.name,
                "factor": change.factor,
                "tokens_s": change.plan.speed.tokens_s.expected if change.plan.speed else None,
                "ttft_s": change.plan.speed.ttft_s.expected if change.plan.speed else None,
            }
            for change in changes
        ],
        "nearest": list(nearest),
    }


def _replayed(found: Prediction, recorded: int) -> dict[str, Any]:
    return {
        "recorded_tokens": recorded,
        "caution": caution(recorded),
        **dataclasses.asdict(found),
        "tokens_s": found.steps_per_s,
        "hit_rate": found.hit_rate,
    }


def _speed(plan: Plan) -> dict[str, Any] | None:
    speed = plan.speed
    if speed is None:
        return None
    return {
        "tokens_s": dataclasses.asdict(speed.tokens_s),
        "ttft_s": dataclasses.asdict(speed.ttft_s),
        "hit_rate": dataclasses.asdict(speed.hit_rate),
        "fetch_share": speed.fetch_share,
        "decode": _step(speed.decode),
        "prefill": _step(speed.prefill),
    }


def _step(step: StepTime) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "by_resource": step.by_resource(),
        "leaves": [
            {
                "id": one.leaf.id,
                "path": one.leaf.path,
                "calls": one.leaf.calls,
                "flops": one.leaf.work.flops,
                "nbytes": one.leaf.work.bytes_by_resource(),
                "bound": one.priced.bound,
                "floor_s": one.priced.floor_s,
                "exposed_s": one.exposed_s,
            }
            for one in step.leaves
        ],
    }
