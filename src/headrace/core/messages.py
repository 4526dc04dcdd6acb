"""The messages between the server process and the engine process: one queue each way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.request import GenerationRequest, OutputDelta, RequestFailed
from headrace.core.status import EngineInfo, EngineSnapshot


@dataclass(frozen=True)
class Submit:
    """To the engine: start this request."""

    request: GenerationRequest


@dataclass(frozen=True)
class Cancel:
    """To the engine: nobody waits for this request any more. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True)
class Explain:
    """To the engine: say where the time of the next ``steps`` steps of this phase goes.

    An idle engine runs steps of its own; a busy one watches, for ``timeout_s`` seconds at most.
    """

    request_id: str
    phase: Literal["prefill", "decode"]
    steps: int
    timeout_s: float


@dataclass(frozen=True)
class Shutdown:
    """To the engine: end the process."""


@dataclass(frozen=True)
class Progress:
    """From the engine while it loads; ``fraction`` is 0 to 1 within the stage."""

    stage: str
    fraction: float


@dataclass(frozen=True)
class Ready:
    """From the engine: requests are accepted from now on."""

    info: EngineInfo


@dataclass(frozen=True)
class Outputs:
    """From the engine: what one step produced, in order."""

    items: tuple[OutputDelta | RequestFailed, ...]


@dataclass(frozen=True)
class Snapshot:
    """From the engine: its gauges and counters, after a step and after cancellations."""

    snapshot: EngineSnapshot


@dataclass(frozen=True)
class Explained:
    """From the engine: the report (``explain.report.ExplainReport`` as data), or None.

    Without one, ``message`` says what went wrong; it is empty if there was no step of the phase.
    """

    request_id: str
    report: Mapping[str, Any] | None
    message: str
    hint: str | None


@dataclass(frozen=True)
class Fatal:
    """From the engine: it cannot go on and ends. ``error_class`` is a class name of core.errors."""

    message: str
    hint: str | None
    error_class: str


Command = Submit | Cancel | Explain | Shutdown
Event = Progress | Ready | Outputs | Snapshot | Explained | Fatal
