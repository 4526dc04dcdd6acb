"""A device whose work takes virtual time: executor code runs on it in deterministic tests.

Tensors live on the host and calls finish at once, as on ``HostDevice``. What a real device would take
is charged with ``charge``, by the test's stand-ins for kernels and copies; streams, events and waits
then move virtual time as a GPU's would: work on one stream follows itself, ``wait_event`` holds a
stream back until the event, and ``synchronize`` holds the host back.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from headrace.machine.device import HostDevice
from headrace.machine.virtual import VirtualClock


class VirtualStream:
    """A queue on a virtual device. ``at_s``: when its work so far ends."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.at_s = device.host_s

    def wait_event(self, event: Any) -> None:
        """What follows on this stream starts after the event."""
        self.at_s = max(self.at_s, event.at_s)

    def synchronize(self) -> None:
        """The host waits for this stream."""
        self._device.wait_until(self.at_s)


class VirtualEvent:
    """A moment on a stream; before it is recorded it holds nothing back."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.at_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Mark the end of the stream's work so far (the current stream if None)."""
        self.at_s = (stream or self._device.current).at_s

    def wait(self, stream: Any = None) -> None:
        """Hold the stream (the current one if None) back until the event."""
        (stream or self._device.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the event."""
        self._device.wait_until(self.at_s)

    def elapsed_time(self, end: VirtualEvent) -> float:
        """Milliseconds from this event to ``end``, as torch's events say it."""
        return 1e3 * (end.at_s - self.at_s)


class VirtualDevice(HostDevice):
    """The host computes; the clock says how long the machine of the test would have taken.

    Args:
        clock: shared with whoever adds work of other parts of the machine (the CPU's experts, say).
    """

    name = "virtual"
    reads_pageable = True

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.host_s = 0.0
        self.current = VirtualStream(self)
        self._streams = [self.current]

    def stream(self) -> VirtualStream:
        stream = VirtualStream(self)
        self._streams.append(stream)
        return stream

    def event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Charge what is done inside to this stream."""
        return self._using(stream)

    @contextmanager
    def _using(self, stream: VirtualStream) -> Generator[VirtualStream]:
        before, self.current = self.current, stream
        try:
            yield stream
        finally:
            self.current = before

    def charge(self, resource: str, seconds: float, label: str = "") -> float:
        """Work on ``resource`` in the order of the current stream; returns when it ends.

        It starts when the stream and the resource are both free, and not before the host asks.
        """
        after = max(self.current.at_s, self.host_s)
        self.current.at_s = self.clock.run(resource, seconds, after=after, label=label)
        return self.current.at_s

    def wait_until(self, moment_s: float) -> None:
        """The host does nothing until then."""
        self.host_s = max(self.host_s, moment_s)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self._streams:
            stream.synchronize()
