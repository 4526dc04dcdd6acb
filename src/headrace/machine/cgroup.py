"""Limits that a container sets: CPU quota and memory, from cgroup version 1 or 2 files.

A limit of any ancestor holds for the process, so that every level from its own group up to the
mount is read and the smallest value wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest multiple of a page below 2^63.
UNLIMITED_NBYTES = 1 << 62


@dataclass(frozen=True)
class Cgroup:
    """What the process' groups grant. ``version`` 0: no cgroups here; None: no limit.

    ``memory_used_nbytes`` is what the limiting group uses and cannot reclaim: its total less
    inactive file pages.
    """

    version: int = 0
    quota_cpus: float | None = None
    memory_limit_nbytes: int | None = None
    memory_used_nbytes: int = 0


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


def _integer(path: Path) -> int | None:
    words = _words(path)
    try:
        return int(words[0]) if words else None
    except ValueError:
        return None  # "max"


def _levels(mount: Path, group: str) -> Iterator[Path]:
    """``mount/group``, its parents, and ``mount``: inside a container only the last may exist."""
    level = mount / group.strip("/")
    while level != mount:
        yield level
        level = level.parent
    yield mount


def _stat(path: Path, key: str) -> int:
    words = _words(path)
    for name, value in zip(words[::2], words[1::2], strict=False):
        if name == key:
            return int(value)
    return 0


def _groups(root: Path) -> dict[str, str]:
    """Controller -> group path of this process; the key of version 2's single tree is ``""``."""
    found: dict[str, str] = {}
    for word in _words(root / "proc/self/cgroup"):
        parts = word.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                found[controller] = parts[2]
    return found


def _quota_v2(level: Path) -> float | None:
    words = _words(level / "cpu.max")  # "765000 100000" or "max 100000"
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(level: Path) -> float | None:
    quota, period = _integer(level / "cpu.cfs_quota_us"), _integer(level / "cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None  # -1: no limit
    return quota / period


def _memory_v2(level: Path) -> tuple[int, int] | None:
    limit = _integer(level / "memory.max")
    if limit is None:
        return None
    used = _integer(level / "memory.current") or 0
    return limit, max(0, used - _stat(level / "memory.stat", "inactive_file"))


def _memory_v1(level: Path) -> tuple[int, int] | None:
    limit = _integer(level / "memory.limit_in_bytes")
    if limit is None or limit >= UNLIMITED_NBYTES:
        return None
    used = _integer(level / "memory.usage_in_bytes") or 0
    return limit, max(0, used - _stat(level / "memory.stat", "total_inactive_file"))


def read_cgroup(root: Path = Path("/")) -> Cgroup:
    """Read the limits of this process from the files below ``root``."""
    groups = _groups(root)
    if not groups:
        return Cgroup()
    mounts = root / "sys/fs/cgroup"
    quotas: list[float] = []
    memory: list[tuple[int, int]] = []
    # Version 2 alone mounts its tree here; beside version 1 controllers it lies in "unified".
    for mount in (mounts, mounts / "unified") if "" in groups else ():
        for level in _levels(mount, groups[""]):
            quotas += [q for q in (_quota_v2(level),) if q is not None]
            memory += [m for m in (_memory_v2(level),) if m is not None]
    for name in ("cpu", "cpu,cpuacct"):
        for level in _levels(mounts / name, groups["cpu"]) if "cpu" in groups else ():
            quotas += [q for q in (_quota_v1(level),) if q is not None]
    for level in _levels(mounts / "memory", groups["memory"]) if "memory" in groups else ():
        memory += [m for m in (_memory_v1(level),) if m is not None]
    limit, used = min(memory, default=(None, 0), key=lambda m: m[0] - m[1])
    return Cgroup(
        version=1 if "cpu" in groups or "memory" in groups else 2,
        quota_cpus=min(quotas, default=None),
        memory_limit_nbytes=limit,
        memory_used_nbytes=used,
    )
