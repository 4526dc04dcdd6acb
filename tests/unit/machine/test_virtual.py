"""The virtual clock by hand."""

from __future__ import annotations

import pytest

from headrace.core.errors import ConfigError
from headrace.machine.profile import HostProfile, MachineProfile, Rate
from headrace.machine.virtual import Span, TwoRates, VirtualClock, overlap, profile_rate


def test_a_resource_does_one_thing_at_a_time() -> None:
    clock = VirtualClock(keep=True)
    assert clock.run("gpu", 2.0, label="a") == 2.0
    assert clock.run("pcie", 3.0, after=1.0, label="b") == 4.0
    assert clock.run("gpu", 1.0, after=4.0, label="c") == 5.0
    assert clock.run("pcie", 1.0, after=2.0) == 5.0  # waits for b
    assert clock.spans[:2] == [Span("gpu", 0.0, 2.0, "a"), Span("pcie", 1.0, 4.0, "b")]
    assert (clock.now_s, clock.busy_s("gpu"), clock.free_s("cpu")) == (5.0, 3.0, 0.0)
    assert clock.idle_share("gpu") == pytest.approx(0.4)
    assert clock.idle_share("cpu") == 1.0


def test_a_wait_moves_the_queue_and_costs_nothing() -> None:
    clock = VirtualClock(keep=True)
    assert clock.run("gpu", 0.0, after=7.0) == 7.0
    assert (clock.busy_s("gpu"), clock.spans) == (0.0, [])
    assert VirtualClock().idle_share("gpu") == 1.0
    with pytest.raises(ValueError, match="copy on pcie would take -1"):
        clock.run("pcie", -1.0, label="copy")


def test_overlap_by_hand() -> None:
    """100 and 100 GB; together 10 and 20 GB/s. The second ends at 5 s; then 50 GB are left of the
    first, alone at 25 GB/s: 2 s more."""
    gb = 1e9
    first, second = TwoRates(10.0, 25.0), TwoRates(20.0, 40.0)
    assert overlap(100 * gb, 100 * gb, first, second) == (pytest.approx(7.0), pytest.approx(5.0))
    assert overlap(10 * gb, 100 * gb, first, second) == (pytest.approx(1.0), pytest.approx(3.0))
    assert overlap(100 * gb, 0, first, second) == (pytest.approx(4.0), 0.0)
    assert overlap(0, 0, first, second) == (0.0, 0.0)
    assert overlap(1, 1, TwoRates(0.0, 0.0), second)[0] == float("inf")


def test_rates_of_a_profile() -> None:
    profile = MachineProfile(
        "box",
        "measured",
        HostProfile("cpu", 8, 2**34),
        rates={
            "dram_read": Rate(80.0, "GB/s", "alone", "test"),
            "dram_read_overlapped": Rate(60.0, "GB/s", "overlapped", "test"),
        },
    )
    assert profile_rate(profile, ("cpu_experts_mxfp4", "dram_read"), overlapped=True) == 60.0
    assert profile_rate(profile, ("dram_read",), overlapped=False) == 80.0
    with pytest.raises(ConfigError, match=r"'box' has none of the rates pcie_h2d"):
        profile_rate(profile, ("pcie_h2d",), overlapped=False)
