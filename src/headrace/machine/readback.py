"""Values on their way from a device to the host, while the device goes on with other work."""

from __future__ import annotations

from collections import deque

import torch

from headrace.core.errors import InternalError
from headrace.machine.device import Device, Event


class ReadBack:
    """Copies of small tensors at points in a device's work, read in the order in which they were posted.

    Reading waits for the copy's own point only, not for what was queued behind it.

    Args:
        numel: values of a copy at most.
        slots: copies that may be on their way or being read at once.
    """

    def __init__(self, device: Device, numel: int, dtype: torch.dtype, slots: int = 2) -> None:
        self._device, self._slots = device, slots
        self.numel = numel
        self._free = deque(
            (device.pinned(numel, dtype=dtype), device.event()) for _ in range(slots)
        )
        self._posted: deque[tuple[torch.Tensor, Event]] = deque()

    def __len__(self) -> int:
        """Copies that were posted and not read."""
        return len(self._posted)

    def post(self, source: torch.Tensor) -> None:
        """Copy ``source`` as it is once the work queued so far is done.

        Raises:
            InternalError: every slot waits for being read.
        """
        if len(self._posted) == self._slots:
            raise InternalError(f"{self._slots} copies wait for being read, another was posted")
        place, event = self._free[0]
        self._free.rotate(-1)
        target = place[: source.numel()].view(source.shape)
        self._device.copy(target, source)
        event.record()
        self._posted.append((target, event))

    def take(self) -> torch.Tensor:
        """Wait for the oldest copy. The tensor is valid until its slot is used again."""
        target, event = self._posted.popleft()
        event.synchronize()
        return target
