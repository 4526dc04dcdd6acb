"""A step explained: a line for each class, what no class explains, and what would change it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InternalError, MachineError
from headrace.core.kv_formats import FORMATS, KEY_GROUP, MAX_HEAD_DIM
from headrace.core.model_spec import ModelSpec
from headrace.core.step import StepStats
from headrace.explain import advice, leaf
from headrace.explain.advice_text import WORTH_SAYING, advice_lines, threads_lines
from headrace.explain.cost import BYTE_RATES, Work, price
from headrace.explain.kernel_rates import ExpertPrice, predict
from headrace.explain.running_cost import ClassWork, RunningModel, StepRows, running_cost
from headrace.machine.disturbance import disturbance_text
from headrace.machine.profile import MachineProfile

# Hardware that can be doubled, and the rates that double with it.
PROPERTIES: Mapping[str, tuple[str, ...]] = {
    # Experts on the CPU are bound by its memory: their kernels read at 85% of a plain loop's rate.
    "host memory rate": ("dram_read", "cpu_experts"),
    "CPU arithmetic": ("cpu_flops",),
    "GPU memory rate": ("hbm_read", "kernel_one_slices"),
    "GPU arithmetic": ("gpu_flops",),
    "link rate": ("pcie",),
}
ABOVE_ROOF = 0.95  # measured over floor, below which noise is no explanation
ALONE = 1.3  # times what the kernels take alone, from which something else must be going on


@dataclass(frozen=True)
class ClassRow:
    """One class of the step: work, floor and bound on this machine, and what was measured.

    intensity: FLOPs a byte, None without bytes; ratio: measured over floor, None without a floor;
    share: of the step.
    """

    id: str
    calls: float
    flops: float
    nbytes: float
    intensity: float | None
    bound: str
    floor_s: float
    measured_s: float
    ratio: float | None
    share: float


@dataclass(frozen=True)
class Change:
    """One thing changed alone: tokens a second then, over now."""

    name: str
    tokens_per_s: float
    gain: float


@dataclass(frozen=True)
class ExplainReport:
    """The mean step of one phase.

    rows: by measured seconds, largest first; gap_s: what no class explains, so that both add up to
    step_s. predicted_s: what the kernels' measured rates make of the step, None where they were not
    measured. hardware, software: what one change alone would give. advice: in words. notes: what a reader of
    the table should know about it.
    """

    model: str
    machine: str
    phase: str
    steps: int
    sequences: int
    tokens: int
    context: int
    step_s: float
    tokens_per_s: float
    rows: tuple[ClassRow, ...]
    gap_s: float
    floor_s: float
    predicted_s: float | None
    hardware: tuple[Change, ...]
    software: tuple[Change, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Sample:
    """Steps of one kind, as observed, with the rows of a typical one among them.

    slowed: steps of the same kind that tell the seconds of classes which the others do not, and took longer
    for it; their classes count, their own length does not.
    """

    stats: Sequence[StepStats]
    rows: StepRows
    slowed: Sequence[StepStats] = ()


def explain(
    name: str,
    sample: Sample,
    model: RunningModel,
    machine: MachineProfile,
    threads: int | None = None,
    experts: ExpertPrice | None = None,
    room: advice.Room | None = None,
) -> ExplainReport:
    """Work out the report.

    Args:
        threads: that computed, None where it is not known.
        experts: what those in host memory should take on a machine.
        room: of the KV pool, which bounds how many more sequences are advised; None where not known.

    Raises:
        InternalError: the sample is empty.
        MachineError: the machine lacks a rate that the step needs.
    """
    steps = len(sample.stats)
    if not steps:
        raise InternalError("no step to explain")
    step_s = sum(s.seconds for s in sample.stats) / steps
    calls, seconds = _means(sample.stats)
    more_calls, more_seconds = _means(sample.slowed)
    for ident, value in more_seconds.items():
        if not seconds.get(ident):
            seconds[ident] = value
            calls.setdefault(ident, more_calls[ident])
    starts = [c.seconds for s in sample.stats for c in s.classes if c.id == leaf.LAUNCHES]
    if sample.slowed and starts:  # not every step tells
        seconds[leaf.LAUNCHES], calls[leaf.LAUNCHES] = sum(starts) / len(starts), 1.0
    costs = running_cost(model, sample.rows)
    rows = [
        _row(
            i,
            costs[i].calls if i in costs and costs[i].calls and sample.slowed else calls[i],
            _work_of(i, costs, sample.stats),
            seconds[i],
            step_s,
            machine,
        )
        for i in sorted(seconds, key=lambda i: -seconds[i])
    ]
    step = advice.Calibrated(model, sample.rows, machine, seconds, step_s, experts, room)
    tokens = sample.rows.tokens
    try:
        offloaded = None if experts is None else experts(machine)
        predicted_s = predict(model, sample.rows, machine, offloaded).seconds
    except MachineError:  # a rate was not measured
        predicted_s = None
    return ExplainReport(
        model=name,
        machine=machine.name,
        phase=sample.stats[0].phase,
        steps=steps,
        sequences=len(sample.rows.sequences),
        tokens=tokens,
        context=max(cached for _, cached in sample.rows.sequences),
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        rows=tuple(rows),
        gap_s=step_s - sum(seconds.values()),
        floor_s=sum(row.floor_s for row in rows),
        predicted_s=predicted_s,
        hardware=tuple(_hardware(step)),
        software=tuple(_software(step)),
        advice=(*advice_lines(step), *threads_lines(step, threads)),
        notes=tuple(_doubts(rows, machine, step_s, predicted_s)),
    )


def _doubts(
    rows: Sequence[ClassRow], machine: MachineProfile, step_s: float, predicted_s: float | None
) -> list[str]:
    """What a reader of the table would wonder about."""
    lines: list[str] = []
    if machine.origin == "measured" and not machine.measured_at:
        lines.append(
            "Floors come from rough rates taken just now, beside whatever else runs here; `headrace bench "
            "machine` measures them."
        )
    disturbance = disturbance_text(machine.disturbed)
    if disturbance is not None:
        lines.append(f"The machine's profile was disturbed: {disturbance}.")
    # as printed: three digits
    below = [row for row in rows if row.ratio is not None and row.ratio < 0.9995]
    read = [row.id for row in below if row.bound in BYTE_RATES]
    if read:
        lines.append(
            f"A ratio below 1: {', '.join(read)}. Floors are those of main memory; what stays in a cache is "
            "read faster, and stands above the roof."
        )
    computed = [row.id for row in below if row.bound not in BYTE_RATES]
    if computed:
        lines.append(
            f"A ratio below 1: {', '.join(computed)}. Arithmetic cannot be faster than the machine's: its "
            "rate was taken while the machine was slower than in these steps, beside other programs perhaps."
        )
    if predicted_s is not None and step_s > ALONE * predicted_s:
        lines.append(
            f"The step takes {step_s / predicted_s:.1f} times what its kernels took alone: other programs "
            "may use the machine, or its clocks have fallen. Run it again on an idle machine."
        )
    return lines


def _means(steps: Sequence[StepStats]) -> tuple[dict[str, float], dict[str, float]]:
    """Calls and seconds of a step by class."""
    calls: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for one in (one for stats in steps for one in stats.classes):
        calls[one.id] = calls.get(one.id, 0.0) + one.calls / len(steps)
        seconds[one.id] = seconds.get(one.id, 0.0) + one.seconds / len(steps)
    return calls, seconds


def _work_of(ident: str, costs: Mapping[str, ClassWork], stats: Sequence[StepStats]) -> Work:
    """By the catalogue's formulas; experts outside of the model's weights by what the steps counted."""
    if ident in costs and costs[ident].calls:
        return costs[ident].work
    if ident not in (leaf.EXPERTS_GPU, leaf.EXPERTS_CPU, leaf.EXPERT_FETCH):
        return Work()
    seen = [one for step in stats for one in step.classes if one.id == ident]

    def mean(values: Iterable[int]) -> float:
        return sum(values) / len(stats)

    flops = mean(one.flops for one in seen)
    on_cpu = ident == leaf.EXPERTS_CPU
    return Work(
        tensor_flops={} if on_cpu or not flops else {"bf16": flops},
        cpu_flops={"bf16": flops} if on_cpu and flops else {},
        hbm_nbytes=mean(one.bytes.hbm for one in seen),
        pcie_nbytes=mean(one.bytes.pcie for one in seen),
        dram_nbytes=mean(one.bytes.dram for one in seen),
    )


def _row(
    ident: str, calls: float, work: Work, measured: float, step_s: float, machine: MachineProfile
) -> ClassRow:
    priced = price(work, machine)
    floor = priced.floor_s
    return ClassRow(
        id=ident,
        calls=round(calls, 2),
        flops=work.flops,
        nbytes=work.nbytes,
        intensity=priced.intensity if work.nbytes and math.isfinite(priced.intensity) else None,
        bound=priced.bound,
        floor_s=floor,
        measured_s=measured,
        ratio=measured / floor if floor else None,
        share=measured / step_s,
    )


def _change(step: advice.Calibrated, name: str, seconds: float) -> Change:
    tokens = step.rows.tokens
    return Change(name, tokens / seconds, step.step_s / seconds)


def _hardware(step: advice.Calibrated) -> list[Change]:
    changes = [
        _change(
            step, f"{name} x 2", advice.with_machine(step, advice.faster(step.machine, rates, 2.0))
        )
        for name, rates in PROPERTIES.items()
    ]
    worth = [change for change in changes if change.gain > 1 + WORTH_SAYING]
    return sorted(worth, key=lambda change: -change.gain)


def kv_choices(spec: ModelSpec) -> dict[str, float]:
    """Formats that a model's cache can have, by bytes of a cached element: keys and values together,
    without residual scalars."""
    dim = spec.head_dim
    fits = dim % KEY_GROUP == 0 and dim <= MAX_HEAD_DIM
    return {
        name: (one.key_nbytes(dim, 0) + dim * (1 if one.sealed else one.element_nbytes)) / (2 * dim)
        for name, one in FORMATS.items()
        if fits or not one.sealed
    }


def _software(step: advice.Calibrated) -> list[Change]:
    changes: list[Change] = []
    if step.rows.decode:
        for gain in advice.batching(step):
            name = f"{gain.batch} x the sequences"
            changes.append(
                Change(name, gain.tokens_per_s, gain.tokens_per_s * step.step_s / step.rows.tokens)
            )
    for name, nbytes in kv_choices(step.model.spec).items():
        if nbytes < step.model.kv_nbytes * (1 - WORTH_SAYING):
            changes.append(
                _change(step, f"--kv-format {name}", advice.with_kv_nbytes(step, nbytes))
            )
    changes.append(
        _change(
            step,
            f"weights of {advice.FEW_BITS} bits",
            advice.with_weight_bits(step, advice.FEW_BITS),
        )
    )
    left = step.model.misses_of_twice_the_slots
    if left is not None:
        # Misses are waited for by the longer path, which is the one that has seconds.
        waited_s = sum(step.measured.get(i, 0.0) for i in (leaf.EXPERT_FETCH, leaf.EXPERTS_CPU))
        changes.append(_change(step, "twice the expert slots", step.step_s - (1 - left) * waited_s))
    return [change for change in changes if abs(change.gain - 1) > WORTH_SAYING]
