"""How many CPU threads to use, and on which CPUs: decided from plain numbers.

Decoding is bound by memory: one thread a core reads as much as two, and an even split of rows runs
at the pace of the slowest core. So: one thread for each performance core that the process may run
on, and never more than the CPU time that its container grants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from headrace.core.errors import ConfigError
from headrace.core.words import counted
from headrace.machine.probe import CpuInfo


@dataclass(frozen=True)
class ThreadChoice:
    """``threads`` workers, the calling thread included, meant for ``cpus`` (one id a worker).

    ``reason`` is one clause for people; ``warnings`` say what will make it slow.
    """

    threads: int
    cpus: tuple[int, ...]
    reason: str
    warnings: tuple[str, ...] = ()


def one_cpu_per_core(cpu: CpuInfo, *, performance_only: bool) -> tuple[int, ...]:
    """The first allowed hardware thread of each core that the affinity mask leaves."""
    allowed = set(cpu.affinity)
    first: dict[int, int] = {}
    for c in cpu.cpus:
        if c.id in allowed and (c.performance or not performance_only):
            first.setdefault(c.core, c.id)
    return tuple(sorted(first.values()))


def choose_threads(
    cpu: CpuInfo, requested: int | None = None, *, reserve: int = 0, measured: int | None = None
) -> ThreadChoice:
    """Choose the worker threads.

    Args:
        cpu: the machine as probed.
        requested: what the user asked for; taken as it is, with a warning where it will hurt.
        reserve: cores to leave free (one for the host loop beside a GPU).
        measured: the best number according to the machine's profile; it replaces the topology's, within
            what affinity mask and quota allow now.

    Raises:
        ConfigError: ``requested`` is below 1.
    """
    chosen = one_cpu_per_core(cpu, performance_only=True)
    kind = "performance core" if cpu.hybrid else "core"
    if not chosen:  # the mask leaves efficiency cores only, or CPUs the topology does not list
        chosen = one_cpu_per_core(cpu, performance_only=False) or cpu.affinity or (0,)
        kind = "core"
    warnings = _affinity_warnings(cpu)
    allowed_cores = len(chosen)
    reasons = [counted(allowed_cores, kind)]
    if len(cpu.affinity) < len(cpu.cpus):
        reasons.append(f"affinity mask of {len(cpu.affinity)} of {len(cpu.cpus)} CPUs")
    threads = max(1, allowed_cores - reserve)
    if reserve:
        reasons.append(f"{reserve} left for the host loop")
    if cpu.quota_cpus is not None:
        threads = min(threads, max(1, math.floor(cpu.quota_cpus)))
        reasons.append(f"cgroup quota of {cpu.quota_cpus:g} CPUs")
    if requested is None and measured is not None:
        allowed = len(cpu.affinity) or 1
        if cpu.quota_cpus is not None:
            allowed = min(allowed, max(1, math.floor(cpu.quota_cpus)))
        best = min(measured, allowed)
        why = f"the machine profile's best is {measured}"
        if best < measured:
            why += f", {allowed} CPUs are allowed now"
        return ThreadChoice(best, _with_siblings(cpu, chosen)[:best], why, warnings)
    if requested is None:
        return ThreadChoice(threads, chosen[:threads], ", ".join(reasons), warnings)

    if requested < 1:
        raise ConfigError(
            f"--threads is {requested}; it must be at least 1",
            hint="leave it out to let Headrace choose",
            param="--threads",
        )
    if requested > threads:
        warnings = (
            *warnings,
            f"--threads {requested} is more than the {threads} that this machine can run at once "
            f"({', '.join(reasons)}): threads will wait for each other",
        )
    cpus = _with_siblings(cpu, chosen)[:requested]
    return ThreadChoice(requested, cpus, f"--threads {requested}", warnings)


# Threads that leave more than half of the CPUs free are not pinned: the system finds them a free CPU better
# than a list that another program may have chosen too.
MOST_LEFT_FREE = 0.5


def cpus_apart(cpu: CpuInfo, threads: int) -> tuple[int, ...] | None:
    """A CPU for each of ``threads`` pinned threads that leave at least one to the rest of the process.

    The first allowed CPU is left over, since systems handle interrupts there; of the others, one of each
    core comes first. None where threads are better placed by the system: they need all CPUs, or few of
    them, or a quota shares these CPUs with other programs.
    """
    order = _with_siblings(cpu, one_cpu_per_core(cpu, performance_only=True))
    few = threads < (1 - MOST_LEFT_FREE) * len(order)
    if cpu.quota_cpus is not None or few or not 0 < threads < len(order):
        return None
    return order[1 : threads + 1]


# Two counts whose rates differ by less are taken as equal: repeated measurements of one count on a
# busy host differ by that much.
SAME_RATE = 0.02
# What a count has to be better by than the topology's. Beside other programs on both of two cores medians of
# three short rounds of one and the same count lay up to 24% apart (2026-11-30), so that this alone would not
# do: it has to win every round, too.
CLEARLY = 0.10


def thread_candidates(cpu: CpuInfo, *, beside_gpu: bool) -> tuple[int, ...]:
    """Counts worth measuring: the topology's, physical cores - 1, physical cores, logical CPUs - 1.

    Physical and logical are those that affinity mask and quota allow.
    """
    start = choose_threads(cpu, reserve=1 if beside_gpu else 0).threads
    physical = len(one_cpu_per_core(cpu, performance_only=False)) or 1
    logical = len(cpu.affinity) or 1
    most = logical if cpu.quota_cpus is None else max(1, math.floor(cpu.quota_cpus))
    counts = {start, physical - 1, physical, logical - 1}
    return tuple(sorted(n for n in counts if 1 <= n <= min(most, logical))) or (1,)


def best_threads(rounds: Mapping[int, Sequence[float]], start: int) -> int:
    """``start``, unless another count is clearly better: that one.

    Noise must not decide what every later run starts with, so another count has to win each round (they
    are measured in turns, and what disturbs one round disturbs all its counts) and by ``CLEARLY`` in the
    median. Of several that do the highest median counts, of nearly equal ones the smallest count, which
    leaves others room.

    Args:
        rounds: threads -> one rate a round. Beside a GPU: the CPU's and PCIe's together, measured at the
            same time.
        start: the topology's count, one of ``rounds``.
    """
    middle = {n: median(rates) for n, rates in rounds.items()}

    def better(n: int) -> bool:
        always = all(own > its for own, its in zip(rounds[n], rounds[start], strict=True))
        return always and middle[n] > middle[start] * (1 + CLEARLY)

    winners = [n for n in rounds if n != start and better(n)]
    top = max((middle[n] for n in winners), default=0.0)
    return min((n for n in winners if middle[n] >= top * (1 - SAME_RATE)), default=start)


def _with_siblings(cpu: CpuInfo, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """``chosen`` first, then every other allowed CPU, for a count above the default."""
    return (*chosen, *(i for i in cpu.affinity if i not in chosen))


def _affinity_warnings(cpu: CpuInfo) -> tuple[str, ...]:
    if len(cpu.affinity) == 1 and len(cpu.cpus) > 1:
        return (
            f"this process may run on CPU {cpu.affinity[0]} only, of {len(cpu.cpus)} "
            "(an inherited affinity mask): decoding will be many times slower; start it without "
            "taskset, or from a shell whose mask is whole",
        )
    return ()
