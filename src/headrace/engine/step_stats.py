"""What a step did, as the record that others read."""

from __future__ import annotations

from headrace.core.step import ClassStats, StepPlan, StepStats


def stats_of(plan: StepPlan, seconds: float, classes: tuple[ClassStats, ...]) -> StepStats:
    """The record of a plan's step."""
    decoding = sum(len(c.token_ids) == 1 for c in plan.chunks)
    if decoding == len(plan.chunks):
        phase = "decode"
    else:
        phase = "mixed" if decoding else "prefill"
    return StepStats(
        step=plan.step,
        phase=phase,
        batch=len(plan.chunks),
        tokens=plan.num_tokens,
        seconds=seconds,
        classes=classes,
    )
