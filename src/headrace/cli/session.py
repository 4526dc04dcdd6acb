"""A loaded model and its text, stepped in this process: what ``run`` and ``chat`` use."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from headrace.cli.exit_codes import EXIT_INTERRUPTED
from headrace.cli.progress import ProgressCallback
from headrace.core import errors
from headrace.core.config import EngineConfig
from headrace.core.request import GenerationRequest, OutputDelta, RequestFailed, SamplingParams
from headrace.core.step import StepStats


class StepEngine(Protocol):
    """The part of ``engine.engine.Engine`` that is used here."""

    observe: Callable[[StepStats], None] | None

    @property
    def info(self) -> Any: ...
    @property
    def parts(self) -> Any: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[OutputDelta | RequestFailed]: ...
    def has_work(self) -> bool: ...
    def close(self) -> None: ...
    def watch_routing(self, observer: Callable[[int, Any], None] | None) -> None: ...
    def watch_classes(self, on: bool) -> Any: ...


class TextEncoder(Protocol):
    """Text and conversations to token ids, and the model's own sampling settings."""

    generation_config: dict[str, Any]

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]: ...


def error_from(failed: RequestFailed) -> errors.HeadraceError:
    """The error that a failed request stands for."""
    cls = getattr(errors, failed.error_class, None)
    if not (isinstance(cls, type) and issubclass(cls, errors.HeadraceError)):
        cls = errors.InternalError
    return cls(failed.message, hint=failed.hint, param=failed.param, code=failed.code)


@dataclass
class Session:
    """One engine and one model's text."""

    engine: StepEngine
    text: TextEncoder
    load_s: float
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> Iterator[OutputDelta]:
        """Yield what the answer gains, step by step.

        ``stop_asked`` is polled between steps; once it is true the request is cancelled and its
        last delta says so. Leaving the iterator early cancels too.

        Raises:
            HeadraceError: the request is impossible or fails.
        """
        name = f"cli-{next(self._ids)}"
        self.engine.submit(GenerationRequest(name, tuple(prompt_token_ids), sampling))
        cancelled = finished = False
        try:
            while not finished and self.engine.has_work():
                if not cancelled and stop_asked():
                    self.engine.cancel(name)
                    cancelled = True
                for item in self.engine.step():
                    if item.request_id != name:
                        continue
                    if isinstance(item, RequestFailed):
                        finished = True
                        raise error_from(item)
                    finished = finished or item.finish_reason is not None
                    yield item
        finally:
            if not finished:
                self.engine.cancel(name)
                while self.engine.has_work():
                    self.engine.step()

    def close(self) -> None:
        self.engine.close()


class Interrupts:
    """Counts ctrl-C while an answer is computed, so that no step is torn apart in its middle.

    A second ctrl-C before the first has taken effect raises KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def caught(self) -> Generator[Interrupts, None, None]:
        """Take over SIGINT inside the block; a no-op outside the main thread and where it is ignored."""
        if not _listens():
            yield self
            return

        def handler(signum: int, frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        previous = signal.signal(signal.SIGINT, handler)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)


def _listens() -> bool:
    """Whether SIGINT is ours to handle: in the main thread, and not ignored (`nohup headrace ... &`)."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return threading.current_thread() is threading.main_thread() and not ignored


@contextmanager
def ctrl_c_ends_at_once() -> Generator[None]:
    """While a model loads, ctrl-C ends the process with 130 instead of raising an exception.

    An exception raised inside of an import can be swallowed there: an interrupt 0.4 s after the start
    was lost, and the answer went on for minutes. Nothing is open yet that would need an orderly end;
    downloads resume.
    """
    if not _listens():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\n")  # the progress bar hides the cursor
        os._exit(EXIT_INTERRUPTED)

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def open_session(config: EngineConfig, progress: ProgressCallback | None) -> Session:
    """Load a model. Imports torch, and takes as long as the weights need.

    Raises:
        HeadraceError: there is no such model, it is damaged or unsupported, or it does not fit.
    """
    start = time.perf_counter()  # importing torch is part of what the user waits for
    with ctrl_c_ends_at_once():
        from headrace.cli.text import load_text
        from headrace.engine.engine import Engine

        text = load_text(config.model, progress)
        engine = Engine.load(config, progress)
    return Session(engine, text, load_s=time.perf_counter() - start)
