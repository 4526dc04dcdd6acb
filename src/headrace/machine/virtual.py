"""A clock that nobody waits for: work queues of a machine in virtual time.

A *resource* (PCIe, the CPU's expert threads, the GPU's main stream) does one thing at a time, in the
order in which it was asked. Work is so many seconds that may not start before some moment; it ends at
the later of that moment and the resource's last end, plus its seconds. From such steps the overlap of
copies, CPU and GPU follows exactly and repeatably, on a machine that need not exist.

Two paths that share the host's memory slow each other down: ``overlap`` gives both ends of two
transfers that run at one rate side by side and at another alone.

Pure arithmetic: no tensors and no real clock here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.machine.profile import OVERLAPPED, MachineProfile

GIGA = 1e9


@dataclass(frozen=True)
class Span:
    """Work on one resource, from ``start_s`` to ``end_s`` of virtual time."""

    resource: str
    start_s: float
    end_s: float
    label: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class VirtualClock:
    """Resources by name, created when they are first asked for.

    Args:
        keep: whether ``spans`` keeps every piece of work (tests and drawings) or only sums.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.spans: list[Span] = []
        self._keep = keep
        self._free_s: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}

    @property
    def now_s(self) -> float:
        """When the last work that was asked for ends."""
        return max(self._free_s.values(), default=0.0)

    def free_s(self, resource: str) -> float:
        """When this resource has done all that it was asked for."""
        return self._free_s.get(resource, 0.0)

    def busy_s(self, resource: str) -> float:
        """Seconds of work that it was given."""
        return self._busy_s.get(resource, 0.0)

    def idle_share(self, resource: str) -> float:
        """Share of the time until now in which it had nothing to do; 1 before anything happened."""
        return 1.0 - self.busy_s(resource) / self.now_s if self.now_s else 1.0

    def run(self, resource: str, seconds: float, *, after: float = 0.0, label: str = "") -> float:
        """Queue work that may not start before ``after``; returns when it ends.

        Work of 0 seconds is a wait: it moves the resource's queue to ``after``.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{label or 'work'} on {resource} would take {seconds} s")
        start = max(self.free_s(resource), after)
        end = start + seconds
        self._free_s[resource] = end
        self._busy_s[resource] = self.busy_s(resource) + seconds
        if self._keep and seconds:
            self.spans.append(Span(resource, start, end, label))
        return end


@dataclass(frozen=True)
class TwoRates:
    """What one path delivers beside the other one and alone, GB/s."""

    together: float
    alone: float


def overlap(
    first_nbytes: float, second_nbytes: float, first: TwoRates, second: TwoRates
) -> tuple[float, float]:
    """Seconds until each of two transfers that begin together ends.

    Both run at their rates together until one ends; the other one's rest runs at its rate alone.
    """
    if not first_nbytes or not second_nbytes:
        return _seconds(first_nbytes, first.alone), _seconds(second_nbytes, second.alone)
    first_s = _seconds(first_nbytes, first.together)
    second_s = _seconds(second_nbytes, second.together)
    if first_s <= second_s:
        rest = second_nbytes - first_s * second.together * GIGA
        return first_s, first_s + _seconds(max(rest, 0.0), second.alone)
    rest = first_nbytes - second_s * first.together * GIGA
    return second_s + _seconds(max(rest, 0.0), first.alone), second_s


def profile_rate(profile: MachineProfile, names: tuple[str, ...], *, overlapped: bool) -> float:
    """The first of these rates that the profile has: the overlapped ones first if asked for.

    Raises:
        ConfigError: it has none of them.
    """
    wanted = [n + OVERLAPPED for n in names] + list(names) if overlapped else list(names)
    for name in wanted:
        if name in profile.rates:
            return profile.rates[name].value
    raise ConfigError(
        f"machine profile {profile.name!r} has none of the rates {', '.join(wanted)}",
        hint="measure this machine with `headrace bench machine`, or add the rate to the profile",
        param="rates",
    )


def _seconds(nbytes: float, gbps: float) -> float:
    if not nbytes:
        return 0.0
    return nbytes / (gbps * GIGA) if gbps > 0 else float("inf")
