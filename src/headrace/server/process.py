"""The engine in a process of its own: started, listened to, and declared dead when it is."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from headrace.core.config import EngineConfig
from headrace.core.errors import EngineDeadError, HeadraceError
from headrace.core.messages import (
    Cancel,
    Command,
    Event,
    Explain,
    Explained,
    Fatal,
    Outputs,
    Progress,
    Ready,
    Shutdown,
    Snapshot,
    Submit,
)
from headrace.core.request import GenerationRequest, OutputDelta, RequestFailed
from headrace.core.status import EngineInfo, EngineSnapshot
from headrace.server.client import (
    EngineState,
    Phase,
    error_class,
    error_from,
    require_ready,
)

log = logging.getLogger(__name__)

# A blocking read wakes as soon as a message is there; the time only bounds how late an ended
# process is noticed by the reader (twice a second costs nothing).
_POLL_S = 0.5
# A process killed in the middle of a message leaves half of it, on which a read waits for ever.
_DRAIN_S = 2.0
# An idle engine answers Shutdown at once; one in a long step answers after the step.
_SHUTDOWN_S = 10.0

WorkerMain = Callable[[EngineConfig, Any, Any], None]


def worker_main(config: EngineConfig, commands: Any, events: Any) -> None:
    """Run the engine's loop in the child process. Only here is torch imported."""
    # Ctrl-C in a terminal reaches every process of the group; the parent ends this one in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    from headrace.engine.worker import run_worker

    run_worker(config, commands, events)


def _exit_with_parent() -> None:
    """End this process when its parent ends in any way, so that no engine is left behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class ProcessClient:
    """An ``EngineClient`` whose engine is a child process. All methods belong to one event loop.

    One thread reads the child's messages and hands them to the loop; another waits for its end. The
    child's death, in whatever way, fails every open request with ``EngineDeadError``.
    """

    def __init__(self, *, target: WorkerMain = worker_main) -> None:
        self.state = EngineState(Phase.LOADING, "starting")
        self.info: EngineInfo | None = None
        self.snapshot = EngineSnapshot()
        self.settled = asyncio.Event()  # set when loading has ended, in either way
        self._open: dict[str, asyncio.Queue[OutputDelta | HeadraceError]] = {}
        self._explaining: dict[str, asyncio.Future[Explained]] = {}
        self._heard_s = 0.0  # the engine last said something, or was asked and owed nothing before
        self._unanswered = False  # a command that nothing has been heard since
        self._closing = False
        # spawn: a fork would copy this process's threads and locks in whatever state they are.
        self._context = multiprocessing.get_context("spawn")
        self._target = target
        self._commands = self._context.Queue()
        self._events = self._context.Queue()
        self._process: SpawnProcess | None = None
        self._exited = threading.Event()

    def start(self, config: EngineConfig) -> None:
        """Start the child process and the threads that follow it; the loop must be running."""
        self._loop = asyncio.get_running_loop()
        # Commands that a dead child did not read are of no use, and no reason to wait at exit.
        self._commands.cancel_join_thread()
        self._process = self._context.Process(
            target=self._target,
            args=(config, self._commands, self._events),
            name="headrace-engine",
            daemon=True,
        )
        self._process.start()
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._reader.start()
        threading.Thread(
            target=self._watch, args=(self._process,), name="engine-exit", daemon=True
        ).start()

    @property
    def pid(self) -> int | None:
        """The child's process id; None before ``start``."""
        return None if self._process is None else self._process.pid

    @property
    def silent_s(self) -> float:
        """See ``EngineClient.silent_s``. An engine that works says something after each step: tokens, or
        that it has counted one."""
        return time.monotonic() - self._heard_s if self._owes else 0.0

    @property
    def _owes(self) -> bool:
        return bool(self._unanswered or self._open or self._explaining)

    def progress(self, stage: str, fraction: float) -> None:
        """Take in how far loading is; also for what happens before the child is started."""
        if self.state.phase is Phase.LOADING:
            self.state = EngineState(Phase.LOADING, stage, fraction)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """See ``EngineClient.generate``."""
        require_ready(self)
        arrived: asyncio.Queue[OutputDelta | HeadraceError] = asyncio.Queue()
        self._send(Submit(request))
        self._open[request.request_id] = arrived
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, HeadraceError):
                    self._open.pop(request.request_id, None)
                    raise item
                if item.usage is not None:  # only the last delta carries usage
                    self._open.pop(request.request_id, None)
                    yield item
                    return
                yield item
        finally:
            self.cancel(request.request_id)

    async def explain(self, command: Explain) -> Explained:
        """See ``EngineClient.explain``."""
        require_ready(self)
        answer: asyncio.Future[Explained] = self._loop.create_future()
        self._send(command)
        self._explaining[command.request_id] = answer
        try:
            return await answer
        finally:
            self._explaining.pop(command.request_id, None)

    def cancel(self, request_id: str) -> None:
        """See ``EngineClient.cancel``."""
        if request_id in self._open:
            self._send(Cancel(request_id))
            del self._open[request_id]

    async def close(self) -> None:
        """End the child: ask, then insist. Open requests fail; returns when the child has ended."""
        self._closing = True
        self._send(Shutdown())
        self._die(EngineDeadError("the server is shutting down", hint="retry when it is back"))
        process = self._process
        if process is None:
            return
        if not await asyncio.to_thread(self._exited.wait, _SHUTDOWN_S):
            log.warning("the engine did not end in %s s; killing it", _SHUTDOWN_S)
            process.kill()
            await asyncio.to_thread(self._exited.wait)
        await asyncio.to_thread(self._reader.join, _DRAIN_S)
        process.join()
        self._commands.close()
        self._events.close()

    def _send(self, command: Command) -> None:
        if self.state.phase is not Phase.DEAD:
            if not self._owes:
                self._heard_s = time.monotonic()
            self._unanswered = True
            self._commands.put(command)

    def _read(self) -> None:
        """Hand messages to the loop until the child has ended and nothing is left to read."""
        while True:
            try:
                event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                if self._exited.is_set():
                    return
                continue
            except (EOFError, OSError, ValueError):  # closed
                return
            self._on_loop(self._on_event, event)

    def _watch(self, process: SpawnProcess) -> None:
        wait([process.sentinel])
        self._exited.set()
        self._reader.join(_DRAIN_S)
        self._on_loop(self._on_exit, process)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has been closed: nobody waits for anything
            log.debug("a message of the engine came after the server's end")

    def _on_event(self, event: Event) -> None:
        self._heard_s, self._unanswered = time.monotonic(), False
        match event:
            case Outputs(items):
                for item in items:
                    self._deliver(item)
            case Snapshot(snapshot):
                self.snapshot = snapshot
            case Explained():
                waiting = self._explaining.get(event.request_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(event)
            case Progress(stage, fraction):
                self.progress(stage, fraction)
            case Ready(info):
                self.info = info
                self.state = EngineState(Phase.READY)
                self.settled.set()
            case Fatal(message, hint, name):
                self._die(error_class(name)(message, hint=hint))

    def _deliver(self, item: OutputDelta | RequestFailed) -> None:
        arrived = self._open.get(item.request_id)
        if arrived is not None:  # otherwise cancelled meanwhile
            arrived.put_nowait(error_from(item) if isinstance(item, RequestFailed) else item)

    def _on_exit(self, process: SpawnProcess) -> None:
        self._die(
            EngineDeadError(
                f"the engine process ended ({_exit_text(process.exitcode)})",
                hint="its last lines are in the server's log; restart the server",
            )
        )

    def _die(self, error: HeadraceError) -> None:
        """Take in that the engine is gone; the first reason is the one that stays."""
        if self.state.phase is Phase.DEAD:
            return
        was_ready = self.state.phase is Phase.READY
        self.state = EngineState(Phase.DEAD, self.state.stage, self.state.fraction, error)
        if was_ready and not self._closing:  # a failure to load is told by whoever started it
            log.error("the engine is gone: %s", error)
        self._fail_all(EngineDeadError(f"the engine has ended: {error.message}", hint=error.hint))
        self.settled.set()

    def _fail_all(self, error: HeadraceError) -> None:
        for arrived in self._open.values():
            arrived.put_nowait(error)
        self._open.clear()
        for waiting in self._explaining.values():
            if not waiting.done():
                waiting.set_exception(error)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
