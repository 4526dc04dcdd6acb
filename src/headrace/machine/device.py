"""Where tensors live and work runs, behind one small interface.

``HostDevice`` runs in order and its events are free; ``CudaDevice`` wraps torch's streams and
events. Code above asks the device, never torch.cuda.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from headrace.core.errors import MachineError


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Device(Protocol):
    """A place to compute."""

    name: str
    torch_device: torch.device
    backends: Sequence[str]  # op back-ends, best first

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def use(self, stream: Stream) -> AbstractContextManager[Any]: ...
    def synchronize(self) -> None: ...


class _InOrder:
    """Stream and event of a device that has finished each call when it returns."""

    def record(self, stream: Stream | None = None) -> None:
        return None

    def wait_event(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None


class HostDevice:
    """The CPU: calls return when their work is done, so streams and events have nothing to do."""

    name = "host"
    torch_device = torch.device("cpu")
    backends: Sequence[str] = ("cpu", "reference")

    def stream(self) -> Stream:
        return _InOrder()

    def event(self) -> Event:
        return _InOrder()

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        return None


class CudaDevice:
    """One CUDA GPU, through torch's streams and events."""

    backends: Sequence[str] = ("reference",)

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise MachineError(
                "no CUDA device: torch.cuda.is_available() is false",
                hint="check the driver with nvidia-smi, and that torch is a CUDA build",
            )
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)

    def stream(self) -> Stream:
        return torch.cuda.Stream(self.torch_device)

    def event(self) -> Event:
        event: Any = torch.cuda.Event(enable_timing=True)  # its streams are torch's own class
        return event

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
