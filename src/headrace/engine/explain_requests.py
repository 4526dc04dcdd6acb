"""Requests to be explained that reach an engine's process: watched while it works, run when it idles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace.core.errors import HeadraceError, InternalError
from headrace.core.messages import Explain, Explained
from headrace.engine.explaining import Explainable, Watch, Workload, report_of, run_steps
from headrace.engine.this_machine import this_machine
from headrace.machine.probe import probe_machine
from headrace.machine.profile import MachineProfile

log = logging.getLogger(__name__)

# What an idle engine runs for itself: enough steps for a mean, over in about a second on a small model.
IDLE_PROMPT, IDLE_STEPS = 64, 16
LEAST_STEPS = 10  # two to warm up, one that is marked on a GPU, and some that are not


class ExplainRequests:
    """Answers ``Explain`` commands, one watch for all that wait.

    Args:
        engine: whose steps.
        send: takes each answer.
        stepped: called after each step that an idle engine runs for an answer.
    """

    def __init__(
        self,
        engine: Explainable,
        send: Callable[[Explained], None],
        stepped: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._send = send
        self._stepped = stepped
        self._waiting: list[tuple[Explain, float]] = []
        self._watch: Watch | None = None
        self._machine: MachineProfile | None = None

    def take(self, command: Explain) -> None:
        """Start watching; an idle engine runs steps of its own and answers at once."""
        if not self._engine.has_work():
            self._answer_alone(command)
            return
        if self._watch is None:
            watch = Watch(self._engine)
            try:
                watch.start()
            except Exception as error:  # no fault of the requests that are being served
                self._refuse(command, error)
                return
            self._watch = watch
        self._waiting.append((command, time.monotonic() + command.timeout_s))

    def after_step(self) -> None:
        """Answer those that have seen enough, or for whom time or work is over."""
        watch = self._watch
        if watch is None:
            return
        idle, now = not self._engine.has_work(), time.monotonic()
        left: list[tuple[Explain, float]] = []
        alone: list[Explain] = []
        for command, deadline in self._waiting:
            seen = sum(one.stats.phase == command.phase for one in watch.steps)
            if idle and not watch.steps:  # what was there to do was over
                alone.append(command)
            elif seen >= command.steps or idle or now >= deadline:
                self._answer(command, lambda: watch)
            else:
                left.append((command, deadline))
        self._waiting = left
        if not left:
            watch.stop()
            self._watch = None
        for command in alone:
            self._answer_alone(command)

    def _answer_alone(self, command: Explain) -> None:
        """Answer by steps of an idle engine's own."""

        def run() -> Watch:
            return run_steps(self._engine, self._workload(command), lambda _: self._stepped())

        self._answer(command, run)

    def _workload(self, command: Explain) -> Workload:
        context = self._engine.info.context
        steps = max(LEAST_STEPS, min(command.steps, IDLE_STEPS, context // 4))
        return Workload(command.phase, min(IDLE_PROMPT, context // 2), steps)

    def _answer(self, command: Explain, watch: Callable[[], Watch]) -> None:
        try:
            machine = self._machine or this_machine(
                probe_machine(gpus=True),
                self._engine.info.threads,
                on_gpu=self._engine.parts.device.torch_device.type == "cuda",
            )
            self._machine = machine
            report = report_of(self._engine, watch(), command.phase, machine)
        except Exception as error:
            self._refuse(command, error)
            return
        data = None if report is None else report.to_data()
        self._send(Explained(command.request_id, data, "", None))

    def _refuse(self, command: Explain, error: Exception) -> None:
        log.error("steps could not be explained", exc_info=error)
        if isinstance(error, HeadraceError):
            ours = error
        else:  # no message would mean that there was no step
            ours = InternalError(f"{type(error).__name__}: {error}")
        self._send(Explained(command.request_id, None, ours.message, ours.hint))
