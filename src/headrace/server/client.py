"""What the HTTP front end needs from an engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.core import errors
from headrace.core.messages import Explain, Explained
from headrace.core.request import GenerationRequest, OutputDelta, RequestFailed
from headrace.core.status import EngineInfo, EngineSnapshot


class Phase(StrEnum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True)
class EngineState:
    """The phase; while loading the stage and how much of it is done; when dead the reason."""

    phase: Phase
    stage: str = ""
    fraction: float = 0.0  # of the stage, 0 to 1
    error: errors.HeadraceError | None = None


class EngineClient(Protocol):
    """One engine, seen from the event loop."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo | None:
        """None until the engine is ready."""
        ...

    @property
    def snapshot(self) -> EngineSnapshot:
        """The newest gauges and counters; all zero before the first step."""
        ...

    @property
    def silent_s(self) -> float:
        """How long the engine has said nothing though it owes an answer; 0 while it owes none."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """Run ``request`` and yield what its sequences gain, until the last delta (with usage).

        Closing the generator early cancels the request in the engine.

        Raises:
            HeadraceError: the request failed, or the engine is not there (any more).
        """
        ...

    async def explain(self, command: Explain) -> Explained:
        """Have the engine say where the time of its steps goes.

        Raises:
            HeadraceError: the engine is not there (any more).
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request in any phase; unknown ids are ignored."""
        ...


def require_ready(client: EngineClient) -> EngineInfo:
    """Return the engine's facts, or raise what a request gets while it is not ready.

    Raises:
        EngineLoadingError: still loading; the message has stage and percent.
        EngineDeadError: the engine has ended; the message has the reason.
    """
    state = client.state
    if state.phase is Phase.DEAD:
        reason = state.error.message if state.error is not None else "the reason is not known"
        raise errors.EngineDeadError(
            f"the engine has ended: {reason}",
            hint="restart the server; its log says more",
        )
    info = client.info
    if state.phase is Phase.LOADING or info is None:
        raise errors.EngineLoadingError(
            f"the model is still loading ({state.stage or 'starting'}, {state.fraction:.0%})",
            hint="retry in a moment; GET /health answers 200 once the model is ready",
        )
    return info


def error_from(failed: RequestFailed) -> errors.HeadraceError:
    """Return the exception that ``failed`` stands for; unknown class names are internal errors."""
    cls = error_class(failed.error_class)
    return cls(failed.message, hint=failed.hint, param=failed.param, code=failed.code)


def error_class(name: str) -> type[errors.HeadraceError]:
    """Return the class of ``core.errors`` called ``name``, or ``InternalError``."""
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, errors.HeadraceError):
        return found
    return errors.InternalError
