"""Steps on the device, with the experts' runtime and the profiler told of each."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.core.errors import DeviceLostError, InternalError
from headrace.core.step import (
    ClassStats,
    SampledToken,
    ScheduledChunk,
    StepOutput,
    StepPlan,
)
from headrace.engine.expert_stats import expert_classes
from headrace.engine.parts import ExpertRuntime
from headrace.engine.profiler import StepProfiler
from headrace.engine.runner import Ranges, Runner
from headrace.engine.sampler import SamplingState
from headrace.machine.device import Device


@dataclass
class Flight:
    """A step that has begun.

    begun_s: when the host began with it (``time.perf_counter``); profiler: who watches it; launched: whether
    it did not have to be computed at once.
    """

    plan: StepPlan
    begun_s: float
    profiler: StepProfiler | None
    ranges: Ranges = field(default_factory=Ranges)
    launched: bool = False


class Computing:
    """Runs plans, one after the other or one ahead of the other.

    Every method raises DeviceLostError where nothing more can be computed on the device.

    Args:
        states: of the sequences that are served, by id.

    Attributes:
        profiler: watches the steps; None: nobody does.
        queues: whether steps may be launched.
    """

    def __init__(
        self,
        runner: Runner,
        device: Device,
        experts: ExpertRuntime | None,
        states: Mapping[int, SamplingState],
    ) -> None:
        self._runner, self._device, self._experts = runner, device, experts
        self._states = states
        self.profiler: StepProfiler | None = None
        self.queues = device.queues

    def begin(self, plan: StepPlan) -> None:
        """Before the plan, or chunks of it, are computed or launched."""
        self._runner.begin(plan)

    def take_back(self) -> None:
        """The step that has begun last could not be launched, and is not computed: it begins again, changed
        by what the one before it gives."""
        self._runner.take_back()

    def compute(self, step: int, chunks: Sequence[ScheduledChunk], ranges: Ranges) -> StepOutput:
        """Run chunks and wait for what they give."""
        with self._lost_devices():
            if self._experts is not None:
                with ranges.timed("experts"):
                    self._experts.step_begins(sum(len(c.token_ids) for c in chunks))
            if self.profiler is not None:
                self.profiler.begins(chunks)
            output = self._runner.compute(step, chunks, self._states, ranges)
            if self._experts is not None:
                with ranges.timed("experts"):
                    self._experts.step_ended()
        return output

    @property
    def may_run_ahead(self) -> bool:
        """Whether anything speaks against a step behind one on its way, beside what the step is."""
        return self._experts is None or self._experts.can_run_ahead

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether ``launch`` takes this plan."""
        if not (self.queues and self._runner.can_launch(plan.chunks, self._states)):
            return False
        watch = self.profiler
        return watch is None or watch.can_launch(plan.chunks, ahead=plan.ahead)

    def launch(self, flight: Flight) -> None:
        """Queue a step that ``can_launch``, behind one that has not landed if it is ``ahead``."""
        plan, ranges = flight.plan, flight.ranges
        with self._lost_devices():
            if self._experts is not None:
                with ranges.timed("experts"):
                    self._experts.step_begins(plan.num_tokens, ahead=plan.ahead)
            if self.profiler is not None:
                self.profiler.begins(plan.chunks)
            with ranges.timed("decoder"):
                self._runner.launch(plan, self._states)
            if self.profiler is not None:
                self.profiler.launched()
            if self._experts is not None:
                with ranges.timed("experts"):
                    self._experts.step_launched()

    def land(self, flight: Flight) -> list[SampledToken | InternalError]:
        """Wait for this step, the oldest launched one: for each chunk its token, or why it has none.

        Raises:
            WorkerLostError: nothing of it is to be trusted.
        """
        plan, ranges = flight.plan, flight.ranges
        with self._lost_devices():
            with ranges.timed("sampler"):
                found = self._runner.land(plan)
            if self._experts is not None:
                with ranges.timed("experts"):
                    self._experts.step_ended()
        return found

    def classes(
        self, flight: Flight, begun_s: float, *, wanted: bool = False
    ) -> tuple[ClassStats, ...]:
        """Of the step that has ended last its coarse ranges if they are ``wanted``, or its classes while it
        is watched.

        begun_s: when the host had nothing else to wait for any more, by ``time.perf_counter``.
        """
        watch = flight.profiler
        if watch is None or watch is not self.profiler:
            return flight.ranges.stats() if wanted else ()
        ranges = flight.ranges.seconds
        if flight.launched:
            seen = watch.take_launched(flight.plan, ranges, time.perf_counter() - begun_s)
        else:
            seen = watch.take(flight.plan, ranges)
        last = None if self._experts is None else self._experts.last
        if last is None:
            return seen
        return seen + expert_classes(last, timed=not watch.samples)

    @contextmanager
    def _lost_devices(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            if self._device.is_lost(error):
                raise DeviceLostError(
                    f"{self._device.name}: {str(error).splitlines()[0]}",
                    hint="restart the engine; if it happens again, check the driver's log (dmesg)",
                ) from error
            raise
