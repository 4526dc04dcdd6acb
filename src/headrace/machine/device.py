"""Where tensors live and work runs, behind one small interface.

``HostDevice`` runs in order and its events are free; ``CudaDevice`` wraps torch's streams, events and
graphs. Code above asks the device, never torch.cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from headrace.machine.cuda_device import CudaDevice
from headrace.machine.device_api import Device, DeviceMemory, Event, Graph, Outputs, Stream

__all__ = ["CudaDevice", "Device", "DeviceMemory", "Event", "Graph", "HostDevice", "Stream"]


class _InOrder:
    """Stream and event of a device that has finished each call when it returns."""

    def record(self, stream: Stream | None = None) -> None:
        return None

    def wait(self, stream: Stream | None = None) -> None:
        return None

    def wait_event(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Any, /) -> float:
        return 0.0


class _Again:
    """A graph of the host: the same work once more, into the same tensors."""

    def __init__(self) -> None:
        self._work: Callable[[], Outputs] | None = None
        self._outputs: Outputs = ()

    def capture(self, work: Callable[[], Outputs]) -> Outputs:
        self._work, self._outputs = work, work()
        return self._outputs

    def replay(self) -> None:
        if self._work is not None:
            for kept, new in zip(self._outputs, self._work(), strict=True):
                kept.copy_(new)


class HostDevice:
    """The CPU: calls return when their work is done, so streams and events have nothing to do."""

    name = "host"
    torch_device = torch.device("cpu")
    backends: Sequence[str] = ("cpu", "reference")
    reads_pageable = True
    queues = False

    def stream(self) -> Stream:
        return _InOrder()

    def event(self) -> Event:
        return _InOrder()

    def graph(self) -> Graph:
        return _Again()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        return None

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def memory(self) -> DeviceMemory:
        seen, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
        return DeviceMemory(seen.total, seen.available, own, own)

    def limit_memory(self, nbytes: int, free_before_nbytes: int | None = None) -> int:
        """The host's plan is kept by allocating no more than it says; nothing enforces it here."""
        return nbytes

    def release_cached(self) -> None:
        return None

    def is_lost(self, error: BaseException) -> bool:
        return False
