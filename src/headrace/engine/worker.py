"""The engine's own process: one queue of commands in, one queue of events out."""

from __future__ import annotations

import logging
import queue
import time
from typing import Any, Protocol

from headrace.core.config import EngineConfig
from headrace.core.errors import HeadraceError
from headrace.core.messages import (
    Cancel,
    Command,
    Explain,
    Fatal,
    Outputs,
    Progress,
    Ready,
    Shutdown,
    Snapshot,
    Submit,
)
from headrace.core.request import RequestFailed
from headrace.core.status import EngineSnapshot
from headrace.engine.engine import Engine, Output
from headrace.engine.explain_requests import ExplainRequests
from headrace.engine.requests import failure

log = logging.getLogger(__name__)

# While it works, the engine reports its gauges this often: twice as often as a Prometheus scrape at
# its shortest usual interval, one second, could notice.
SNAPSHOT_S = 0.5
# Progress messages closer together than this would only fill the queue.
PROGRESS_S = 0.05


class QueueLike(Protocol):
    """The part of ``multiprocessing.Queue`` that is used here."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...
    def put(self, item: Any) -> None: ...


def run_worker(config: EngineConfig, commands: QueueLike, events: QueueLike) -> None:
    """Load the model and serve commands until ``Shutdown``.

    ``Shutdown`` cancels what is running, and ends once the last outputs are in the queue. Commands
    are taken between steps; an idle engine waits in a blocking read. Every way to fail ends with a
    ``Fatal`` event.
    """
    last = 0.0

    def progress(stage: str, fraction: float) -> None:
        nonlocal last
        now = time.monotonic()
        if fraction >= 1.0 or now - last >= PROGRESS_S:
            last = now
            events.put(Progress(stage, fraction))

    try:
        engine = Engine.load(config, progress)
    except Exception as error:
        events.put(_fatal(error))
        return
    serve(engine, commands, events)


def serve(engine: Engine, commands: QueueLike, events: QueueLike) -> None:
    """Serve commands with a loaded engine until ``Shutdown``; closes the engine."""
    events.put(Ready(engine.info))
    loop = _Loop(engine, commands, events)
    try:
        loop.run()
    except Exception as error:
        log.exception("the engine stops")
        events.put(_fatal(error))
    finally:
        engine.close()


class _Loop:
    def __init__(self, engine: Engine, commands: QueueLike, events: QueueLike) -> None:
        self._engine = engine
        self._commands = commands
        self._events = events
        self._explaining = ExplainRequests(engine, events.put, self._report)
        self._closing = False
        self._open: set[str] = set()
        self._reported = EngineSnapshot()
        self._reported_at = 0.0
        self._asked = False  # somebody may wait for a word where there is no news

    def run(self) -> None:
        engine = self._engine
        while True:
            self._take_commands()
            if self._closing and not engine.has_work():
                break
            outputs = engine.step()
            for item in outputs:
                if isinstance(item, RequestFailed) or item.usage is not None:
                    self._open.discard(item.request_id)
            self._send(outputs)
            if not self._closing:  # nobody waits for answers any more
                self._explaining.after_step()
            self._report()
        self._report(force=True)

    def _take_commands(self) -> None:
        """Handle what has arrived; wait for something if there is nothing to compute."""
        engine = self._engine
        while True:
            idle = not engine.has_work() and not self._closing
            if idle:
                self._report(force=True)
            try:
                command: Command = self._commands.get(block=idle)
            except queue.Empty:
                return
            self._handle(command)

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request):
                try:
                    self._engine.submit(request)
                    self._open.add(request.request_id)
                except HeadraceError as error:
                    self._send([failure(request.request_id, error, out_of_memory=False)])
            case Cancel(request_id):
                self._engine.cancel(request_id)
                # Also of a request that has ended: the server takes an engine for stuck that never answers.
                self._asked = True
            case Explain():
                self._explaining.take(command)
            case Shutdown():
                self._closing = True
                for request_id in self._open:
                    self._engine.cancel(request_id)

    def _send(self, outputs: list[Output]) -> None:
        if outputs:
            self._events.put(Outputs(tuple(outputs)))

    def _report(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._reported_at >= SNAPSHOT_S:
            snapshot = self._engine.snapshot()
            if snapshot != self._reported or self._asked:
                self._events.put(Snapshot(snapshot))
                self._reported, self._asked = snapshot, False
            self._reported_at = now


def _fatal(error: BaseException) -> Fatal:
    if isinstance(error, HeadraceError):
        return Fatal(error.message, error.hint, type(error).__name__)
    return Fatal(f"{type(error).__name__}: {error}", None, "InternalError")
