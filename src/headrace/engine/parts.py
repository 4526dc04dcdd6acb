"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.status import EngineInfo
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.engine.runner import DecoderLike
from headrace.engine.scheduler import SchedulerConfig
from headrace.machine.device import Device
from headrace.ops.records import LayerCache
from headrace.text.tokenizer import Tokenizer


class ExpertRuntime(Protocol):
    """Where experts are computed elsewhere than the rest: what happens between steps.

    Both are called on the engine's thread, outside of any capture.
    """

    def step_begins(self, num_tokens: int) -> None:
        """Write what the step reads (the split, new rates); raise if a worker has died."""
        ...

    def step_ended(self) -> None:
        """The step's results are on the host.

        Raises:
            MachineError: its experts' part is not to be trusted, a worker died or gave up.
        """
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
