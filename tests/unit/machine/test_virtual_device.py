"""Executor-like code on the virtual device: streams and events move virtual time."""

from __future__ import annotations

import pytest

from headrace.machine.virtual import VirtualClock
from headrace.machine.virtual_device import VirtualDevice


def layer(device: VirtualDevice, side: object, fetch_s: float, hits_s: float) -> None:
    """Fetch on a side stream while hits are computed, then compute what arrived (1 s)."""
    planned, arrived = device.event(), device.event()
    planned.record()
    side.wait_event(planned)  # type: ignore[attr-defined]
    with device.use(side):  # type: ignore[arg-type]
        device.charge("pcie", fetch_s, "fetch")
        arrived.record()
    device.charge("gpu", hits_s, "hits")
    arrived.wait()
    device.charge("gpu", 1.0, "fetched")


def test_fetches_hide_behind_hits_or_the_other_way_round() -> None:
    device = VirtualDevice(VirtualClock())
    side = device.stream()
    layer(device, side, fetch_s=5.0, hits_s=2.0)
    assert device.current.at_s == 6.0  # 5 + 1: hits are hidden
    layer(device, side, fetch_s=1.0, hits_s=4.0)
    assert device.current.at_s == 11.0  # 6 + 4 + 1: the fetch is hidden
    assert device.clock.busy_s("gpu") == 8.0
    assert device.host_s == 0.0  # nothing made the host wait
    device.synchronize()
    assert device.host_s == 11.0


def test_without_the_wait_the_streams_do_not_know_each_other() -> None:
    device = VirtualDevice(VirtualClock())
    with device.use(device.stream()):
        device.charge("pcie", 5.0)
    assert device.charge("gpu", 1.0) == 1.0


def test_two_streams_share_one_resource_in_order() -> None:
    device = VirtualDevice(VirtualClock(keep=True))
    device.charge("pcie", 2.0, "demand")
    with device.use(device.stream()) as stream:
        assert device.charge("pcie", 1.0, "promotion") == 3.0
        stream.synchronize()
    assert device.host_s == 3.0
    assert device.charge("gpu", 1.0) == 4.0  # the host asked for it at 3 s


def test_events_measure() -> None:
    device = VirtualDevice(VirtualClock())
    begin, end = device.event(), device.event()
    begin.record()
    device.charge("gpu", 0.25)
    end.record()
    assert begin.elapsed_time(end) == pytest.approx(250.0)
    end.synchronize()
    assert device.host_s == 0.25
    assert str(device.torch_device) == "cpu"
