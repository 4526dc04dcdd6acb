"""What would make a step cheaper, from the catalogue's own formulas: drafts, fewer bits, batches.

Each answer prices a step of another shape with the same costs as the step that was measured, class by
class, and scales it by what the class took beyond its floor. So a kernel that reaches half of the memory's
rate is taken to reach half of it in the changed step, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.explain import leaf
from headrace.explain.catalogue.functions import acceptance_for, distinct, round_tokens
from headrace.explain.cost import Work, price
from headrace.explain.kernel_rates import ExpertPrice
from headrace.explain.running_cost import (
    MATRICES,
    ClassWork,
    RunningModel,
    StepRows,
    running_cost,
)
from headrace.machine.profile import MachineProfile

OFFLOADED = (leaf.EXPERTS_GPU, leaf.EXPERT_FETCH, leaf.EXPERTS_CPU)
DRAFTS = 4  # drafts of a round that the advice is worked out for
BATCHES = (2, 4, 8, 16)
FEW_BITS = (
    4.25  # MXFP4, the smallest format of experts here: 4 bits and a scale of 8 for 32 weights
)


@dataclass(frozen=True)
class Room:
    """The pool of KV blocks. num_first: those that may be the first of a sequence, None for all."""

    num_blocks: int
    block_tokens: int
    num_first: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    def sequences(self, tokens: int) -> int:
        """How many sequences of so many tokens it holds, when they share nothing."""
        found = self.num_blocks // -(-tokens // self.block_tokens)
        return found if self.num_first is None else min(found, self.num_first)

    def times(self, rows: StepRows) -> int:
        """How many times as many sequences like those of a step it holds, when they share nothing."""
        blocks = sum(-(-(cached + new) // self.block_tokens) for new, cached in rows.sequences)
        found = self.num_blocks // blocks
        if self.num_first is not None:
            found = min(found, self.num_first // len(rows.sequences))
        return max(found, 1)


@dataclass(frozen=True)
class Calibrated:
    """A measured step: its classes' seconds beside their work, and what no class explains.

    experts: what those in host memory should take on a machine, None without such.
    room: bounds batches; None where it is not known.
    """

    model: RunningModel
    rows: StepRows
    machine: MachineProfile
    measured: Mapping[str, float]
    step_s: float
    experts: ExpertPrice | None = None
    room: Room | None = None

    @property
    def most_times(self) -> int | None:
        """Times as many sequences as the KV pool holds; None where nothing bounds ``BATCHES``."""
        times = None if self.room is None else self.room.times(self.rows)
        return None if times is None or times >= BATCHES[-1] else times

    def seconds(
        self, rows: StepRows, change: Callable[[str, ClassWork], Work] | None = None
    ) -> float:
        """A step of other rows, or with changed work, at the measured distance from the floors.

        Experts beside the model's own weights (in slots, on the way there, on the CPU) grow with the number
        of different ones, as if routing were uniform. What has no work here (host work, the gap) stays.
        """
        then = running_cost(self.model, rows)
        total = self.step_s + self.offloaded_s * (self.touched(rows) / self.touched(self.rows) - 1)
        for name, one in running_cost(self.model, self.rows).items():
            if name not in self.measured:
                continue
            before = price(one.work, self.machine).floor_s
            after = then.get(name, ClassWork(0, Work()))
            work = after.work if change is None else change(name, after)
            if before > 0:
                ratio = price(work, self.machine).floor_s / before
                total += self.moving_s(name, one) * (ratio - 1)
        return total

    @property
    def offloaded_s(self) -> float:
        """Seconds of experts that are none of the model's own matrices."""
        if "expert" in self.model.matrices:
            return 0.0
        return sum(self.measured.get(name, 0.0) for name in OFFLOADED)

    def touched(self, rows: StepRows) -> float:
        """Different experts of a layer that a step of ``rows`` wants; 1 without a mixture."""
        moe = self.model.spec.moe
        if moe is None:
            return 1.0
        return distinct(moe.num_experts, moe.num_experts_per_token, rows.tokens)

    def moving_s(self, name: str, one: ClassWork) -> float:
        """The part of a class's measured seconds that changes with its floor.

        In a captured graph each kernel costs its start and the way of its first bytes, whatever it reads:
        where the profile says how much, that much stays.
        """
        rates = self.machine.rates
        start = rates.get("graph_read") or rates.get("graph_kernel")
        if start is None or not self.model.gpu or not self.rows.decode:
            return self.measured[name]
        return max(self.measured[name] - one.calls * start.value, 0.0)


@dataclass(frozen=True)
class Speculation:
    """Whether drafting pays: a round's time in plain steps, and the acceptance that it needs.

    acceptance: of each draft; infinite where no acceptance is enough. most: the gain if every draft is
    accepted. The drafter itself is taken to be free, so real ones need more.
    """

    drafts: int
    round_in_steps: float
    acceptance: float

    @property
    def most(self) -> float:
        return (self.drafts + 1) / self.round_in_steps

    def text(self) -> str:
        if math.isinf(self.acceptance):
            return (
                f"Drafting never pays here: verifying {self.drafts} drafts takes {self.round_in_steps:.2f} "
                f"plain steps and yields at most {self.drafts + 1} tokens."
            )
        return (
            f"Drafting pays from an acceptance of {self.acceptance:.0%} on ({self.drafts} drafts, a free "
            f"drafter): a round takes {self.round_in_steps:.2f} plain steps; at 70% it gives "
            f"{round_tokens(0.7, self.drafts) / self.round_in_steps:.2f} x."
        )


def speculation(step: Calibrated, drafts: int = DRAFTS) -> Speculation:
    """Price a verifying step, ``drafts`` + 1 rows for each sequence, against the measured one."""
    rows = StepRows(
        tuple((new * (drafts + 1), cached) for new, cached in step.rows.sequences),
        step.rows.sampled * (drafts + 1),
    )
    ratio = step.seconds(_as_decode(step, rows)) / step.step_s
    return Speculation(drafts, ratio, acceptance_for(ratio, drafts))


def _as_decode(step: Calibrated, rows: StepRows) -> StepRows:
    """Rows of a verification: attention keeps the decode kernel, which takes one row a sequence.

    Its k + 1 rows stand as sequences of their own that share the cache; its bytes are then counted
    k + 1 times, which a kernel without shared reads really moves.
    """
    flat = tuple((1, cached + i) for new, cached in rows.sequences for i in range(new))
    return StepRows(flat, rows.sampled) if step.rows.decode else rows


def offloaded_break_even(num_experts: int, chosen: int) -> float:
    """Acceptance at which drafting breaks even where moving missing experts is all that counts.

    k + 1 tokens touch E (1 - r^(k+1)) experts with r = 1 - chosen/E, a round of acceptance a yields
    (1 - a^(k+1))/(1 - a) tokens, a plain step touches E (1 - r): both are the same series at a = r.
    """
    return 1 - chosen / num_experts


@dataclass(frozen=True)
class BatchGain:
    """Tokens a second of all sequences together at a batch."""

    batch: int
    step_s: float
    tokens_per_s: float


def batching(step: Calibrated, batches: tuple[int, ...] = BATCHES) -> list[BatchGain]:
    """Steps of several times the sequences: those of ``batches`` that the KV pool holds, and the most that it
    does. Empty where it holds no more."""
    most = step.most_times
    if most is not None:
        batches = tuple(sorted({b for b in batches if b < most} | ({most} - {1})))
    gains: list[BatchGain] = []
    for batch in batches:
        rows = StepRows(step.rows.sequences * batch, step.rows.sampled * batch)
        seconds = step.seconds(rows)
        gains.append(BatchGain(batch, seconds, rows.tokens / seconds))
    return gains


def with_weight_bits(step: Calibrated, bits: float) -> float:
    """Seconds of the step if every matrix had ``bits`` a weight; those with fewer keep theirs."""

    def change(name: str, one: ClassWork) -> Work:
        stored = [
            step.model.matrices[k] for k in MATRICES.get(name, ()) if k in step.model.matrices
        ]
        if not stored or not one.matrix_nbytes:
            return one.work
        now = sum(s.nbytes for s in stored)
        then = sum(min(s.nbytes, s.elements * bits / 8) for s in stored)
        return _fewer_bytes(one.work, one.matrix_nbytes * (1 - then / now))

    return step.seconds(step.rows, change)


def with_kv_nbytes(step: Calibrated, element_nbytes: float) -> float:
    """Seconds of the step if a cached element took ``element_nbytes``."""
    other = running_cost(replace(step.model, kv_nbytes=element_nbytes), step.rows)

    def change(name: str, one: ClassWork) -> Work:
        attention = (leaf.ATTENTION_DECODE, leaf.ATTENTION_PREFILL, leaf.KV_APPEND)
        return other[name].work if name in attention else one.work

    return step.seconds(step.rows, change)


def _fewer_bytes(work: Work, nbytes: float) -> Work:
    if work.dram_nbytes:
        return replace(work, dram_nbytes=work.dram_nbytes - nbytes)
    return replace(work, hbm_nbytes=work.hbm_nbytes - nbytes)


def faster(machine: MachineProfile, prefixes: tuple[str, ...], factor: float) -> MachineProfile:
    """``machine`` with every rate whose name begins so multiplied."""
    rates = {
        name: replace(rate, value=rate.value * factor) if name.startswith(prefixes) else rate
        for name, rate in machine.rates.items()
    }
    return replace(machine, rates=rates)


def with_machine(step: Calibrated, machine: MachineProfile) -> float:
    """Seconds of the step on another machine, each class as far from its floor as here."""
    total = step.step_s
    for name, one in running_cost(step.model, step.rows).items():
        before = price(one.work, step.machine).floor_s
        if name in step.measured and before > 0:
            ratio = price(one.work, machine).floor_s / before
            total += step.moving_s(name, one) * (ratio - 1)
    if step.experts is not None:
        # Their paths run beside each other: they are priced together.
        measured = sum(step.measured.get(name, 0.0) for name in OFFLOADED)
        total += measured * (step.experts(machine).seconds / step.experts(step.machine).seconds - 1)
    return total
