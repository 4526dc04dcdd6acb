"""``headrace doctor``: what is here, what of it will be used, and why.

It reports and never fails: whatever cannot be found out is said in the line it belongs to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.cli.columns import show
from headrace.cli.flags import Commands, add_command
from headrace.cli.sizes import format_size
from headrace.core.errors import ConfigError
from headrace.core.words import counted
from headrace.machine.disturbance import disturbance_text
from headrace.machine.probe import Machine, importable, probe_machine
from headrace.machine.threads import ThreadChoice, choose_threads

if TYPE_CHECKING:
    from headrace.machine.profile import MachineProfile


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "doctor", "say what hardware and software is here and what will be used", run
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Back-ends with None, or the reason why they cannot be used; and what serves each op."""

    reasons: dict[str, str | None]
    serving: dict[str, str]
    isa: str | None = None  # the instruction set that the C++ kernels use
    refused: str | None = None  # why every other command will refuse to start
    gpu: str | None = "not looked at"  # why the GPU's kernels cannot be used, None if they can
    no_tiles: str | None = None  # why they do without matrix tiles (AMX); empty if they use them


def look_at_kernels() -> Kernels:
    """Import the op registry and ask each back-end. Imports torch where it is installed."""
    if not importable("torch"):
        missing = "torch is not installed"
        return Kernels({"cpu": missing, "reference": missing}, {}, gpu=missing)
    from headrace.machine.device import HostDevice
    from headrace.ops import registry

    reasons: dict[str, str | None] = {}
    refused: str | None = None
    for name in HostDevice.backends:
        try:
            reasons[name] = registry.unavailable_reason(name)
        except ConfigError as error:
            reasons[name] = refused = error.message
        except Exception as error:  # whatever is broken there is what the user came to read
            reasons[name] = f"cannot be imported: {type(error).__name__}: {error}"
    usable = [name for name, reason in reasons.items() if reason is None]
    try:
        serving = registry.resolve(usable).describe()
        built = reasons.get("cpu", "") is None
        isa = registry.instruction_set("cpu") if built else None
        tiles = registry.why_no_tiles("cpu") if built else None
        gpu = registry.unavailable_reason("triton")
        return Kernels(reasons, serving, isa, refused, gpu, tiles)
    except Exception as error:
        return Kernels({**reasons, "registry": f"{type(error).__name__}: {error}"}, {})


def native_line(kernels: Kernels) -> str:
    """The state of the C++ extension in one sentence."""
    reason = kernels.reasons.get("cpu")
    if reason is None:
        return "built, and used" + (f", with {kernels.isa}" if kernels.isa else "")
    if kernels.refused:
        return f"refused: {kernels.refused}. Other commands will not start"
    return f"not used: {reason}. The PyTorch kernels serve; they are many times slower"


def _tile_lines(kernels: Kernels) -> list[tuple[str, str]]:
    if kernels.no_tiles is None:
        return []
    if kernels.no_tiles:
        return [("matrix tiles", f"none: {kernels.no_tiles}")]
    return [("matrix tiles", f"{kernels.isa}, in calls of more than 64 rows")]


def _cpu_lines(machine: Machine) -> list[tuple[str, str]]:
    cpu = machine.cpu
    cores = f"{counted(cpu.num_cores, 'core')}, {counted(len(cpu.cpus), 'hardware thread')}"
    if cpu.hybrid:
        cores += f" ({counted(cpu.num_performance_cores, 'performance core')})"
    if cpu.num_numa_nodes > 1:
        cores += f", {counted(cpu.num_numa_nodes, 'memory node')}"
    quota = "none" if cpu.quota_cpus is None else f"{cpu.quota_cpus:g} CPUs"
    return [
        ("CPU", f"{cpu.model} ({cpu.architecture})"),
        ("instruction sets", " ".join(cpu.isa) or "unknown"),
        ("cores", cores),
        ("allowed CPUs", f"{len(cpu.affinity)} of {len(cpu.cpus)}"),
        (
            "CPU quota",
            f"{quota} (cgroup v{machine.cgroup.version})" if machine.cgroup.version else quota,
        ),
    ]


@dataclasses.dataclass(frozen=True)
class Accounts:
    """What may be pinned and why so much, and the stored machine profile with where it is (or why not)."""

    pin_nbytes: int | None = None
    pin_reason: str = "torch is not installed"
    profile: MachineProfile | None = None
    profile_note: str = ""


def look_at_accounts(machine: Machine) -> Accounts:
    """Decide the pin budget and find the profile."""
    from headrace.machine.profile_store import profile_of

    profile, note = profile_of(machine)
    if not machine.gpus:
        return Accounts(0, "there is no GPU to read it", profile, note)
    if not importable("torch"):
        return Accounts(profile=profile, profile_note=note)
    from headrace.machine.pinned import pin_budget

    budget = pin_budget(machine.memory, wsl=machine.wsl)
    return Accounts(budget.nbytes, budget.reason, profile, note)


def _account_lines(machine: Machine, accounts: Accounts) -> list[tuple[str, str]]:
    from headrace.machine.profile_store import age_days

    found: list[tuple[str, str]] = []
    if accounts.pin_nbytes == 0:
        found.append(("pinned memory", f"none: {accounts.pin_reason}"))
    elif accounts.pin_nbytes is None:
        found.append(("pinned memory", f"unknown: {accounts.pin_reason}"))
    else:
        limit = format_size(accounts.pin_nbytes)
        found.append(("pinned memory", f"at most {limit}: {accounts.pin_reason}"))
    for gpu in machine.gpus:
        total, free = gpu.memory_total_nbytes, gpu.memory_free_nbytes
        used = format_size(max(0, total - free))
        found.append((f"GPU {gpu.index} memory", f"{used} in use, {format_size(free)} free"))
    found.append(("machine profile", accounts.profile_note))
    if accounts.profile is not None:
        age, best = age_days(accounts.profile), accounts.profile.best_threads
        said = "of unknown age"
        if age is not None:
            days = counted(age, "day", form=".0f")
            said = "measured today" if age < 0.5 else f"measured {days} ago"
        said += "" if best is None else f"; best number of CPU threads {best}"
        found.append(("", said))
        disturbance = disturbance_text(accounts.profile.disturbed)
        if disturbance is not None:
            found.append(("", f"disturbed: {disturbance}"))
    return found


def _memory_lines(machine: Machine) -> list[tuple[str, str]]:
    memory = machine.memory
    limit = "none" if memory.limit_nbytes is None else format_size(memory.limit_nbytes)
    return [
        (
            "memory",
            f"{format_size(memory.total_nbytes)}, {format_size(memory.available_nbytes)} available",
        ),
        ("memory limit", limit),
        ("usable now", format_size(memory.usable_available_nbytes)),
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """``0-7, 16``: as Linux lists CPUs. numbers: in their order."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in found)


def _device_line(machine: Machine, kernels: Kernels) -> str:
    if not machine.gpus:
        return "the CPU"
    if kernels.gpu is not None:
        return f"the CPU, not the GPU: {kernels.gpu}"
    return "the GPU (--device); experts that do not fit it stay in host memory (--experts)"


def lines(
    machine: Machine, threads: ThreadChoice, kernels: Kernels, accounts: Accounts | None = None
) -> list[tuple[str, str]]:
    """The report as (label, text), in the order in which it is printed."""
    gpus = [
        (f"GPU {g.index}", f"{g.name}, {format_size(g.memory_total_nbytes)}, driver {g.driver}")
        for g in machine.gpus
    ] or [("GPU", "none found (nvidia-smi)")]
    packages = [(name, version or "not installed") for name, version in machine.packages.items()]
    return [
        ("Headrace", __version__),
        ("system", machine.system + (" (WSL)" if machine.wsl else "")),
        ("Python", machine.python),
        *packages,
        *_cpu_lines(machine),
        *_memory_lines(machine),
        *gpus,
        *_account_lines(machine, accounts or Accounts()),
        ("C++ extension", native_line(kernels)),
        *_tile_lines(kernels),
        ("will use", f"{counted(threads.threads, 'thread')}: {threads.reason}"),
        ("", f"on CPU {_ranges(threads.cpus)}"),
        ("computes on", _device_line(machine, kernels)),
    ]


def report(
    machine: Machine, threads: ThreadChoice, kernels: Kernels, accounts: Accounts | None = None
) -> dict[str, Any]:
    """The report as data."""
    from headrace.machine.profile_store import age_days

    accounts = accounts or Accounts()
    profile = accounts.profile
    return {
        "headrace": __version__,
        "machine": dataclasses.asdict(machine),
        "usable_memory_nbytes": machine.memory.usable_available_nbytes,
        "pinned_memory": {"limit_nbytes": accounts.pin_nbytes, "reason": accounts.pin_reason},
        "profile": {
            "note": accounts.profile_note,
            "measured_at": None if profile is None else profile.measured_at,
            "age_days": None if profile is None else age_days(profile),
            "best_threads": None if profile is None else profile.best_threads,
            "disturbed": {} if profile is None else dict(profile.disturbed),
        },
        "kernels": dataclasses.asdict(kernels),
        "will_use": {
            "device": "cuda" if machine.gpus and kernels.gpu is None else "cpu",
            "threads": threads.threads,
            "cpus": threads.cpus,
            "reason": threads.reason,
        },
        "warnings": threads.warnings,
    }


def run(args: argparse.Namespace) -> int:
    from headrace.machine.profile_store import with_profile

    machine = with_profile(probe_machine(gpus=True))
    threads = choose_threads(
        machine.cpu, reserve=1 if machine.gpus else 0, measured=machine.measured_threads
    )
    kernels, accounts = look_at_kernels(), look_at_accounts(machine)
    if args.json:
        print(json.dumps(report(machine, threads, kernels, accounts), indent=2))
        return 0
    rows = lines(machine, threads, kernels, accounts)
    rows += [("warning", warning) for warning in threads.warnings]
    show(f"{label:<18}{text}" for label, text in rows)
    return 0
