"""CPUs of pinned threads are kept free of the others, and given back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from headrace.machine.probe import current_affinity
from headrace.machine.reserved_cpus import CpuReservation, process_cpus, thread_cpus

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs masks and two CPUs",
)


@pytest.fixture
def cpus() -> Iterator[tuple[int, ...]]:
    before = os.sched_getaffinity(0)
    yield tuple(sorted(before))
    assert os.sched_getaffinity(0) == before
    os.sched_setaffinity(0, before)


class Waiting:
    """A thread that waits, and says where it may run."""

    def __init__(self) -> None:
        self._go, ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: (ready.set(), self._go.wait()))
        self._thread.start()
        ready.wait()

    @property
    def task(self) -> int:
        assert self._thread.native_id is not None
        return self._thread.native_id

    @property
    def cpus(self) -> set[int]:
        return os.sched_getaffinity(self.task)

    def end(self) -> None:
        self._go.set()
        self._thread.join()


def test_python_threads_leave_the_cpus_and_come_back(cpus: tuple[int, ...]) -> None:
    there = Waiting()
    reservation = CpuReservation(cpus[1:])
    reservation.take()
    started = Waiting()
    ended = Waiting()
    ended.end()
    try:
        assert os.sched_getaffinity(0) == there.cpus == started.cpus == {cpus[0]}
        reservation.release()
        assert os.sched_getaffinity(0) == there.cpus == started.cpus == set(cpus)
        reservation.release()  # nothing more to give back
        assert there.cpus == set(cpus)
    finally:
        there.end()
        started.end()


def test_nobody_is_left_without_a_cpu(cpus: tuple[int, ...]) -> None:
    reservation = CpuReservation(cpus)
    reservation.take()
    assert os.sched_getaffinity(0) == set(cpus)
    reservation.release()


def test_a_threads_own_mask_is_respected(cpus: tuple[int, ...]) -> None:
    pinned, other = Waiting(), Waiting()
    os.sched_setaffinity(pinned.task, {cpus[1]})
    reservation = CpuReservation([cpus[1]])
    try:
        reservation.take()
        assert pinned.cpus == {cpus[1]}, "it may run nowhere else"
        os.sched_setaffinity(other.task, {cpus[1]})  # the user's, meanwhile
        reservation.release()
        assert pinned.cpus == {cpus[1]}
        assert other.cpus == {cpus[1]}, "not put back: it is not where it was put"
        assert os.sched_getaffinity(0) == set(cpus)
    finally:
        pinned.end()
        other.end()


def test_nothing_to_reserve_changes_nothing(cpus: tuple[int, ...]) -> None:
    reservation = CpuReservation(())
    reservation.take()
    assert os.sched_getaffinity(0) == set(cpus)
    reservation.release()


def test_where_there_are_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    reservation = CpuReservation([0])
    reservation.take()
    reservation.release()
    assert thread_cpus(0) is None
    assert process_cpus() is None


def test_later_choices_see_all_cpus(cpus: tuple[int, ...]) -> None:
    from tests.fixtures.cpu_cases import needs_native

    if needs_native.args[0]:
        pytest.skip("the C++ kernels are not built")
    from tests.fixtures.expert_requests import Requests
    from tests.fixtures.expert_slabs import CLAMPED, make_case

    case = make_case("mxfp4", hidden=96, inner=64, slices=2, bias=True, act=CLAMPED)
    service = Requests(case).service(1, cpus=(cpus[1],))  # type: ignore[arg-type]
    service.start()
    try:
        assert cpus[1] not in os.sched_getaffinity(0)
        assert current_affinity(()) == cpus
    finally:
        service.stop()
    service = Requests(case).service(1, cpus=(cpus[1],), apart=False)  # type: ignore[arg-type]
    service.start()
    assert os.sched_getaffinity(0) == set(cpus)
    service.stop()
    # One that nobody stopped gives back what it had, too.
    service = Requests(case).service(1, cpus=(cpus[1],))  # type: ignore[arg-type]
    service.start()
    assert cpus[1] not in os.sched_getaffinity(0)
    del service
