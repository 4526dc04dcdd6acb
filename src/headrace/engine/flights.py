"""Decoding steps that are launched before the host has handled the one before.

    launch N, launch N+1 | wait for N, its text, commit | launch N+2 | wait for N+1 ...

What the host does after a step and before the next one is hidden behind the GPU so. The next step is
launched as if the one on its way ended nobody (``Scheduler.schedule_ahead``); its tokens are on the device.
A sequence that ends meanwhile has a row in it whose result is dropped. What that row writes goes to a block
that nobody else reads: its sequence gave it back unfinished, so no cached prefix names it, and whoever gets
it next writes to it on the same stream, later.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from headrace.core.errors import DeviceLostError
from headrace.core.step import StepOutput
from headrace.engine.computing import Computing, Flight
from headrace.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class Flights:
    """The steps on their way, two at most."""

    def __init__(self, scheduler: Scheduler, computing: Computing) -> None:
        self._scheduler, self._computing = scheduler, computing
        self._flying: deque[Flight] = deque()  # the oldest first

    def __len__(self) -> int:
        return len(self._flying)

    def settle(self) -> None:
        """Wait for the step on its way if nobody is left whom it computes a token for.

        Raises:
            DeviceLostError: nothing more can be computed.
        """
        while self._flying and not self._scheduler.concerns(self._flying[0].plan):
            flight = self._flying.popleft()
            plan = flight.plan
            try:
                self._computing.land(flight)
            except DeviceLostError:
                raise
            except Exception as error:  # of a step that nobody waits for
                log.warning("step %d, which nobody waited for, failed: %s", plan.step, error)
            self._computing.classes(flight, 0.0)
            self._scheduler.commit(StepOutput(plan.step))

    def abandon(self) -> None:
        """Wait for every step on its way, of which nothing is to come.

        Failures are logged, and nothing is committed: what closes may do so for a failure, which left
        steps uncommitted.
        """
        while self._flying:
            flight = self._flying.popleft()
            try:
                self._computing.land(flight)
            except Exception as error:
                log.warning("closing: step %d failed: %s", flight.plan.step, error)

    def launch(self, flight: Flight) -> bool:
        """Launch a step that has begun; False if it has to be computed at once.

        Raises:
            DeviceLostError: nothing more can be computed.
        """
        return self._computing.can_launch(flight.plan) and self._launch(flight)

    def _launch(self, flight: Flight) -> bool:
        """Launch a step that can be; False if that failed."""
        try:
            self._computing.launch(flight)
        except DeviceLostError:
            raise
        except Exception:
            log.exception("step %d could not be launched", flight.plan.step)
            return False
        flight.launched = True
        self._flying.append(flight)
        return True

    def run_ahead(self) -> None:
        """Launch the step behind the one on its way, if it is certain what that step is.

        Raises:
            DeviceLostError: nothing more can be computed.
        """
        begun_s = time.perf_counter()
        if len(self._flying) != 1 or not self._computing.may_run_ahead:
            return
        plan = self._scheduler.schedule_ahead()
        if plan is None:
            return
        flight = Flight(plan, begun_s, self._computing.profiler)
        flight.ranges.seconds["schedule"] = time.perf_counter() - begun_s
        if self._computing.can_launch(plan):
            self._computing.begin(plan)
            if self._launch(flight):
                return
            self._computing.take_back()
        self._scheduler.drop_ahead()

    def next(self) -> Flight:
        """The oldest step on its way, which is the caller's to wait for now (``Computing.land``)."""
        return self._flying.popleft()
