"""CPUs that worker threads are pinned to, kept free of this process's other Python threads.

A thread that is pinned cannot step aside: whoever shares its CPU takes it for whole slices of the scheduler,
some 3 ms, ten times as long as a layer's experts take. The engine's own thread is such a one, since it spins
for the GPU. So it is moved to the CPUs that the workers leave, and so are the other Python threads; what they
start inherits that. Threads of native pools stay as they are: they sleep while the workers compute.

Works on Linux; elsewhere threads are not pinned and nothing is reserved.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

# Names of the pinned threads, as the system lists them: native/expert_service.cpp gives them.
WORKER_PREFIX = "experts-"
_TASKS = Path("/proc/self/task")


class CpuReservation:
    """Takes CPUs from this process's Python threads until ``release``.

    A thread that would have no CPU left keeps its own: better shared than stopped.
    """

    def __init__(self, cpus: Iterable[int]) -> None:
        self.cpus = frozenset(cpus)
        self._before: dict[int, frozenset[int]] = {}  # by thread: where it could run
        self._known: frozenset[int] = frozenset()  # threads that were there

    def take(self) -> None:
        """Move the Python threads; before the pinned ones are started, which inherit nothing then."""
        self._known = frozenset(_tasks())
        for thread in threading.enumerate():
            task = thread.native_id
            mask = None if task is None else thread_cpus(task)
            if task is None or mask is None:
                continue
            rest = mask - self.cpus
            if rest and rest != mask and _move(task, rest):
                self._before[task] = mask

    def release(self) -> None:
        """Put back the threads, and those that they started meanwhile, which inherited their CPUs.

        A thread whose CPUs somebody else has changed since stays where it is.
        """
        inherited = {mask - self.cpus: mask for mask in self._before.values()}
        for task in _tasks():
            before = self._before.get(task)
            now = thread_cpus(task)
            if before is None and task not in self._known and now is not None:
                before = inherited.get(now)
            if before is not None and now == before - self.cpus:
                _move(task, before)
        self._before = {}


def process_cpus() -> frozenset[int] | None:
    """The CPUs that this thread could run on if nothing were reserved; None where there are no masks."""
    mask = thread_cpus(0)
    if mask is None:
        return None
    for task in _tasks():
        if _name(task).startswith(WORKER_PREFIX):
            mask |= thread_cpus(task) or frozenset()
    return mask


def thread_cpus(task: int) -> frozenset[int] | None:
    """Where a thread may run (0: this one); None if it is gone or the system does not tell."""
    getter = getattr(os, "sched_getaffinity", None)
    if getter is None:
        return None
    try:
        return frozenset(getter(task))
    except OSError:
        return None


def _move(task: int, cpus: frozenset[int]) -> bool:
    try:
        os.sched_setaffinity(task, cpus)
    except OSError:  # it has ended, or a cpuset has changed
        return False
    return True


def _tasks() -> tuple[int, ...]:
    try:
        return tuple(int(path.name) for path in _TASKS.iterdir())
    except OSError:
        return ()


def _name(task: int) -> str:
    try:
        return (_TASKS / str(task) / "comm").read_text().strip()
    except OSError:
        return ""
