"""Where measured machine profiles lie: one file for each pair of GPU and CPU, in the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.machine.probe import CpuInfo, Machine
from headrace.machine.profile import MachineProfile

PROFILES_VARIABLE = "HEADRACE_PROFILES"


@dataclass(frozen=True)
class MachineKey:
    """What a profile holds for: the GPU's name (None without one), the CPU's, and its cores."""

    gpu: str | None
    cpu: str
    cores: int

    @property
    def file_name(self) -> str:
        """Readable, and unique by the digest at its end."""
        text = f"{self.gpu or 'no-gpu'} {self.cpu} {self.cores}c"
        slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80]
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def machine_key(cpu: CpuInfo, gpu: str | None) -> MachineKey:
    """The key of a machine as probed."""
    return MachineKey(gpu, cpu.model, cpu.num_cores)


def profiles_folder(environ: Mapping[str, str] | None = None) -> Path:
    """``HEADRACE_PROFILES``, or a folder of the user's cache."""
    env = os.environ if environ is None else environ
    if env.get(PROFILES_VARIABLE):
        return Path(env[PROFILES_VARIABLE]).expanduser()
    if env.get("XDG_CACHE_HOME"):
        base = Path(env["XDG_CACHE_HOME"]).expanduser()
    elif sys.platform == "win32" and env.get("LOCALAPPDATA"):
        base = Path(env["LOCALAPPDATA"])
    else:
        base = Path.home() / ".cache"
    return base / "headrace" / "machines"


def save_profile(profile: MachineProfile, key: MachineKey, folder: Path) -> Path:
    """Store a profile and return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / key.file_name
    profile.save(path)
    return path


def find_profile(key: MachineKey, folder: Path) -> tuple[MachineProfile | None, str]:
    """The stored profile of a machine, and a clause about it: where it is, or why there is none."""
    path = folder / key.file_name
    if not path.exists():
        return None, "none; `headrace bench machine` measures one"
    try:
        return MachineProfile.load(path), str(path)
    except ConfigError as error:
        return None, f"{error.message}; `headrace bench machine` measures it again"


def profile_of(machine: Machine, folder: Path | None = None) -> tuple[MachineProfile | None, str]:
    """The stored profile of a machine that was probed with its GPUs; see ``find_profile``."""
    gpu = machine.gpus[0].name if machine.gpus else None
    return find_profile(machine_key(machine.cpu, gpu), folder or profiles_folder())


def with_profile(machine: Machine, folder: Path | None = None) -> Machine:
    """The machine with what its stored profile says about threads; itself without one."""
    profile, _ = profile_of(machine, folder)
    return machine if profile is None else replace(machine, measured_threads=profile.best_threads)


def age_days(profile: MachineProfile, now: datetime | None = None) -> float | None:
    """Days since the profile was measured; None if it does not say."""
    try:
        then = datetime.fromisoformat(profile.measured_at)
    except ValueError:
        return None
    if then.tzinfo is None:  # it is UTC, said or not
        then = then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds() / 86400
