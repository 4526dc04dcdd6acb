"""The share of others in what the CPUs do, worked out by hand from folders that look like ``proc``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headrace.machine.disturbance import (
    CpuClock,
    Watch,
    _ask_psutil,
    disturbance_text,
    read_clock,
    share_of_others,
)
from tests.fixtures.fake_host import write


def write_process(
    root: Path, pid: int, parent: int, ticks: tuple[int, int, int, int], name: str = "sh"
) -> None:
    """``ticks``: user, system, and both of children that have ended."""
    before = f"{pid} ({name}) R {parent} 1 1 0 -1 4194304 99 0 0 0"
    write(root / f"proc/{pid}/stat", f"{before} {' '.join(map(str, ticks))} 20 0 1 0 7 8 9")


def write_cpu(root: Path, times: str) -> None:
    write(root / "proc/stat", f"cpu  {times}\ncpu0 1 2 3\nintr 5")


def test_a_clock_sums_what_the_tree_below_a_process_did(tmp_path: Path) -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice
    write_cpu(tmp_path, "300 20 100 500 60 5 7 8 40 0")
    write_process(tmp_path, 10, 1, (100, 20, 3, 4))
    write_process(tmp_path, 11, 10, (50, 0, 0, 0), name="a (b) c")
    write_process(tmp_path, 12, 11, (7, 1, 0, 0))
    write_process(tmp_path, 13, 1, (99, 0, 0, 0))  # somebody else's
    found = read_clock(tmp_path, pid=10, ticks_s=100)
    # 300 + 20 + 100 + 5 + 7 + 8 = 440 at work; guests are in user's ticks already
    assert found == CpuClock(total_s=10.0, busy_s=4.4, own_s=pytest.approx(1.85))


def test_what_a_sandbox_hides_disturbs_nothing(tmp_path: Path) -> None:
    before = read_clock(tmp_path, pid=1)
    assert before == CpuClock(0.0, 0.0, 0.0)
    assert share_of_others(before, before) == 0.0


@pytest.mark.parametrize(
    ("after", "share"),
    [
        # 8 CPUs for 1 s: 6 busy, 4 of them ours
        (CpuClock(108.0, 46.0, 14.0), 0.25),
        # a tick too much on our side is no negative share
        (CpuClock(108.0, 44.0, 14.5), 0.0),
        (CpuClock(108.0, 48.0, 10.0), 1.0),
    ],
)
def test_the_share_is_of_all_cpus(after: CpuClock, share: float) -> None:
    assert share_of_others(CpuClock(100.0, 40.0, 10.0), after) == share


def test_own_work_is_told_from_others_here() -> None:
    """This process works; the machine may be busy beside it, but what is its own is known."""
    before, asked = read_clock(), _ask_psutil(os.getpid())
    cpu = time.process_time()
    while time.process_time() < cpu + 0.3:
        pass
    after = read_clock()
    done = time.process_time() - cpu
    assert after.own_s - before.own_s == pytest.approx(done, abs=0.05)
    assert after.busy_s - before.busy_s >= done - 0.1
    # the other way to ask, of systems without proc, tells the same of the same processes
    assert asked.own_s == pytest.approx(before.own_s, abs=0.1)
    assert asked.busy_s == pytest.approx(before.busy_s, rel=0.01)
    assert asked.total_s == pytest.approx(before.total_s, rel=0.01)


class Machine:
    """Eight CPUs; others keep some of them busy for a while."""

    def __init__(self, busy: float, until_s: float) -> None:
        self.busy, self.until_s, self.now_s = busy, until_s, 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self) -> CpuClock:
        return CpuClock(8 * self.now_s, self.busy * min(self.now_s, self.until_s), 0.0)


def test_waiting_ends_when_others_are_quiet_or_patience_is_over() -> None:
    short = Machine(2.0, until_s=1.7)
    Watch(short.read, short.sleep).wait()
    # looks of half a second: the fourth has 0.2 of 0.5 s with 2 of 8 busy, 10%
    assert short.now_s == 2.0
    long = Machine(2.0, until_s=100.0)
    watch = Watch(long.read, long.sleep)
    assert watch.look() == 0.25
    watch.wait()
    assert long.now_s == 0.5 + 5.0


def test_words() -> None:
    assert disturbance_text({}) is None
    one = disturbance_text({"PCIe": 0.25})
    assert one is not None
    assert one.startswith("other programs kept 25% of the CPUs busy during PCIe, so that")
    three = disturbance_text({"reading memory": 0.12, "PCIe": 0.5, "CPU experts": 0.3})
    assert three is not None
    assert "up to 50% of the CPUs busy during reading memory, PCIe and CPU experts" in three
