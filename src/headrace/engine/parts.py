"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.status import EngineInfo, ExpertSnapshot
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.engine.runner import DecoderLike
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.experts.step_record import ExpertStep
from headrace.machine.device import Device
from headrace.ops.records import LayerCache
from headrace.text.tokenizer import Tokenizer


class ExpertRuntime(Protocol):
    """Where experts are computed elsewhere than the rest: what happens between steps.

    All of it is called on the engine's thread, outside of any capture. ``last``: what the last step did,
    if it was one of decoding.
    """

    @property
    def last(self) -> ExpertStep | None: ...

    @property
    def misses_of_twice_the_slots(self) -> float | None:
        """The share of the misses that twice the slots would leave, as predicted."""
        ...

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step may begin now although the one before it has not ended."""
        ...

    def step_begins(self, num_tokens: int, *, ahead: bool = False) -> None:
        """Replace a worker that died, and bring in what was promoted.

        ahead: the step before has not ended; nothing is replaced, and nothing waits for the device.

        Raises:
            DeviceLostError: it cannot be replaced.
        """
        ...

    def step_launched(self) -> None:
        """The step is queued on the device. Called only where steps may run ahead of each other: they end
        in the order in which they were launched."""
        ...

    def step_ended(self) -> None:
        """The step's results are on the host.

        Raises:
            WorkerLostError: its experts' part is not to be trusted, a worker died or gave up.
        """
        ...

    def snapshot(self) -> ExpertSnapshot:
        """Counters and gauges of this moment, between steps."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineParts:
    """Put together by ``engine.loading``; tests put toys in."""

    decoder: DecoderLike
    kv: Sequence[LayerCache]  # one for each layer
    tokenizer: Tokenizer
    scheduler: SchedulerConfig
    info: EngineInfo
    device: Device
    graphs: DecodeGraphs | None = None  # decoding steps, captured
    experts: ExpertRuntime | None = None
