"""How busy other programs keep the CPUs while a machine is measured.

What they read comes out of the same memory channels, so that every rate that is measured beside them is too
low. Their part is what all CPUs did less what this process and its descendants did: so it is known for
the very seconds of a measurement, programs that came and went included, and other containers' too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# One busy core of eight is worth a word.
DISTURBED_SHARE = 0.1
LOOK_S = 0.5
# For what is short: a compilation's end, a page that a browser draws.
PATIENCE_S = 5.0


@dataclass(frozen=True)
class CpuClock:
    """CPU seconds, each since some moment of its own.

    total_s: that have passed, of all CPUs together; busy_s: in which they worked, for whomever, or were
    taken by another guest of the host; own_s: in which they worked for this process and its descendants.
    """

    total_s: float
    busy_s: float
    own_s: float


def read_clock(root: Path = Path("/"), pid: int | None = None, ticks_s: float = 0.0) -> CpuClock:
    """Read ``proc`` below ``root``, or ask psutil on systems without; all zeros where a sandbox hides it.

    Args:
        pid: the process that is the measuring one; None: this one.
        ticks_s: ticks of a second in ``proc``; 0: this system's.
    """
    own = os.getpid() if pid is None else pid
    if sys.platform != "linux" and root == Path("/"):
        return _ask_psutil(own)
    ticks = ticks_s or os.sysconf("SC_CLK_TCK")
    try:
        fields = (root / "proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return CpuClock(0.0, 0.0, 0.0)
    user, nice, system, idle, waiting, irq, soft, stolen = map(int, [*fields[1:9], *"0" * 8][:8])
    busy = user + nice + system + irq + soft + stolen
    times = _process_times(root)
    mine = sum(times[p][1] for p in _descendants({p: t[0] for p, t in times.items()}, own))
    return CpuClock((busy + idle + waiting) / ticks, busy / ticks, mine / ticks)


def _process_times(root: Path) -> dict[int, tuple[int, int]]:
    """Parent and ticks, those of children that have ended included, by process."""
    found: dict[int, tuple[int, int]] = {}
    for path in (root / "proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except OSError:  # it has ended since
            continue
        # The name, in brackets, may hold blanks and brackets; the fields behind it are numbered from 3.
        rest = text.rpartition(")")[2].split()
        if len(rest) > 14:
            found[int(path.parent.name)] = int(rest[1]), sum(map(int, rest[11:15]))
    return found


def _descendants(parents: Mapping[int, int], root: int) -> list[int]:
    """A process, if it is there, and all below it."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [root] if root in parents else []
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found


def _ask_psutil(pid: int) -> CpuClock:
    import psutil

    seen = psutil.cpu_times()
    idle = seen.idle + getattr(seen, "iowait", 0.0)
    total = sum(seen) - getattr(seen, "guest", 0.0) - getattr(seen, "guest_nice", 0.0)
    process = psutil.Process(pid)
    own = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.Error:  # it has ended since
            continue
        own += sum(times[:4])
    return CpuClock(total, total - idle, own)


def share_of_others(before: CpuClock, after: CpuClock) -> float:
    """What others kept busy of the CPUs between two readings, 0 to 1; 0 where no time has passed."""
    total = after.total_s - before.total_s
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(max(others / total, 0.0), 1.0) if total > 0 else 0.0


class Watch:
    """Watches the CPUs while something is measured."""

    def __init__(
        self,
        read: Callable[[], CpuClock] = read_clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read, self._sleep = read, sleep

    def during(self, measure: Callable[[], None]) -> float:
        """The share of the CPUs that others kept busy during ``measure()``."""
        before = self._read()
        measure()
        return share_of_others(before, self._read())

    def look(self) -> float:
        """Their share now, in ``LOOK_S``."""
        return self.during(lambda: self._sleep(LOOK_S))

    def wait(self) -> None:
        """Wait until others are quiet, for ``PATIENCE_S`` at most."""
        for _ in range(round(PATIENCE_S / LOOK_S)):
            if self.look() <= DISTURBED_SHARE:
                return


def disturbance_text(disturbed: Mapping[str, float]) -> str | None:
    """A clause about ``MachineProfile.disturbed``; None if nothing was."""
    if not disturbed:
        return None
    most = max(disturbed.values())
    upto = "up to " if len(disturbed) > 1 else ""
    return (
        f"other programs kept {upto}{most:.0%} of the CPUs busy during {_listed(list(disturbed))}, so that "
        "rates are too low: run `headrace bench machine` again on an idle machine"
    )


def _listed(words: list[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
