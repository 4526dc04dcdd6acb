"""What code above asks of a device; ``headrace.machine.device`` has the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Outputs = tuple[torch.Tensor, ...]


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None:
        """Let the stream (the current one if None) wait for this point."""
        ...

    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this point to another, both passed; 0 where calls return when done."""
        ...


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Work that was recorded once and is run again with whatever its input tensors hold then.

    ``capture`` runs ``work`` (more than once, so it must be repeatable) and returns its results:
    tensors that each ``replay`` writes anew. ``replay`` returns before the work is done.
    """

    def capture(self, work: Callable[[], Outputs]) -> Outputs: ...
    def replay(self) -> None: ...


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the memory where tensors live. ``free``: to everybody, as the driver sees it;
    ``reserved``: held by this process's allocator, of which ``allocated`` are tensors."""

    total_nbytes: int
    free_nbytes: int
    reserved_nbytes: int
    allocated_nbytes: int


class Device(Protocol):
    """A place to compute."""

    name: str
    torch_device: torch.device
    backends: Sequence[str]  # op back-ends, best first
    reads_pageable: bool  # whether its kernels read host memory that is not pinned
    queues: bool  # whether calls return before their work is done

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def graph(self) -> Graph: ...
    def use(self, stream: Any) -> AbstractContextManager[Any]: ...
    def synchronize(self) -> None: ...

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to without waiting; not initialised."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy behind the work so far. Host memory must be pinned, and a source on the host stay as
        it is until the copy is done."""
        ...

    def memory(self) -> DeviceMemory: ...

    def limit_memory(self, nbytes: int, free_before_nbytes: int | None = None) -> int:
        """Keep this process within ``nbytes`` of the device's memory, as the driver counts it.

        Args:
            free_before_nbytes: what was free before this process began to use the device; what is
                missing now without being a tensor's is the driver's own for this process.

        Returns the bytes that are left for tensors.
        """
        ...

    def release_cached(self) -> None:
        """Give back memory that the allocator holds and no tensor uses."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether nothing more can be computed on the device after ``error``."""
        ...
