"""The CPU's service beside the steps that ask it: woken, checked, and started anew after it failed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from headrace.core.errors import DeviceLostError, MachineError, WorkerLostError
from headrace.machine.device import Device
from headrace.ops.expert_records import ExpertFault, ExpertService, ServiceStats

log = logging.getLogger(__name__)

ServiceFactory = Callable[[], ExpertService]


class KeptService:
    """A running service on one request block, and its successors.

    Args:
        device: whose graphs point to the block.
        block: the request block, uint8; zeroed before each start.
        new: makes a service on it.

    Attributes:
        service: the one that runs; None once it is stopped for good.
        num_restarts: services that took the place of one that failed.
    """

    def __init__(self, device: Device, block: torch.Tensor, new: ServiceFactory) -> None:
        self._device, self._block, self._new = device, block, new
        self._past = ServiceStats(0, 0, 0, 0.0)  # of those that were replaced
        self._failed = False
        self.num_restarts = 0
        self.service: ExpertService | None = None
        self._start()

    @property
    def works(self) -> bool:
        """Whether the next step can begin with the service as it is."""
        service = self.service
        if service is None:
            return True
        return not self._failed and service.fault() is ExpertFault.NONE and service.running()

    def stats(self) -> ServiceStats:
        """Counted since the start, by all services."""
        return self._past if self.service is None else self._past + self.service.stats()

    def wake(self) -> None:
        """Wake the threads for a step."""
        if self.service is not None:
            self.service.wake()

    def begin(self) -> None:
        """Replace a service that failed, and wake the threads.

        Raises:
            DeviceLostError: its threads hang, and with them the memory that graphs point to.
        """
        if not self.works:  # a prompt's part was not answered, too
            self._restart()
        self.wake()

    def check(self) -> None:
        """Whether every request of a step was answered.

        Raises:
            WorkerLostError: not so; the step's results are not to be used.
        """
        fault = ExpertFault.NONE if self.service is None else self.service.fault()
        if fault is ExpertFault.NONE:
            return
        self._failed = True
        raise WorkerLostError(
            f"experts on the CPU: {fault.meaning}",
            hint="the request can be sent again; the CPU's threads are started anew",
        )

    def stop(self) -> None:
        """End it for good."""
        if self.service is not None:
            service, self.service = self.service, None
            service.stop()
            self._past += service.stats()

    def exchange(self, new: ServiceFactory | None = None) -> None:
        """End it, and begin with one that ``new`` makes, or the same as before; for measurements."""
        self.stop()
        self._new = new or self._new
        self._start()

    def _start(self) -> None:
        self._block.zero_()
        self.service = self._new()
        self.service.start()

    def _restart(self) -> None:
        assert self.service is not None
        log.warning(
            "the CPU's experts failed (%s); starting them anew", self.service.fault().meaning
        )
        try:
            self.service.stop()
        except MachineError as error:
            raise DeviceLostError(
                f"experts on the CPU: {error.message}", hint="restart the server"
            ) from error
        self._device.synchronize()
        self._past += self.service.stats()
        self._start()
        self._failed = False
        self.num_restarts += 1
