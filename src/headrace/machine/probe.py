"""What hardware is here: CPU, memory, limits set from outside. No torch.

Everything on Linux is read from files below ``root``, so that a test can describe any machine as a
folder. Elsewhere psutil and ``platform`` answer what they can; what is unknown is None, never a
guess. ``headrace.machine.threads`` decides what to do with it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.machine.cgroup import Cgroup, read_cgroup
from headrace.machine.reserved_cpus import process_cpus

# Instruction sets that kernels here care about, as Linux names them: x86 first, then Arm.
ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
# cpu_capacity runs to 1024. The scheduler of Linux calls a load fitting a core up to 80% of its
# capacity (kernel/sched/fair.c, fits_capacity); cores that far below the largest form a class of
# their own here: rows are split evenly, and the slowest core would set the pace.
CAPACITY_CLASS_RATIO = 0.8


@dataclass(frozen=True)
class LogicalCpu:
    """One hardware thread. ``core`` is unique over the machine: SMT siblings share it."""

    id: int
    core: int
    package: int
    performance: bool  # False: an efficiency core of a hybrid CPU


@dataclass(frozen=True)
class CpuInfo:
    """The CPU as this process sees it.

    ``affinity`` holds the ids that the process may run on; ``quota_cpus`` is the CPU time a cgroup
    grants, in CPUs.
    """

    model: str
    architecture: str
    isa: tuple[str, ...]
    cpus: tuple[LogicalCpu, ...]
    affinity: tuple[int, ...]
    quota_cpus: float | None = None
    num_numa_nodes: int = 1

    @property
    def num_cores(self) -> int:
        return len({c.core for c in self.cpus})

    @property
    def num_performance_cores(self) -> int:
        return len({c.core for c in self.cpus if c.performance})

    @property
    def hybrid(self) -> bool:
        return any(not c.performance for c in self.cpus)

    @property
    def smt(self) -> bool:
        return len(self.cpus) > self.num_cores


@dataclass(frozen=True)
class MemoryInfo:
    """Host memory in bytes. ``limit_nbytes`` is a cgroup's, ``usable_*`` take it into account."""

    total_nbytes: int
    available_nbytes: int
    limit_nbytes: int | None = None
    limit_used_nbytes: int = 0  # of the limit, memory that cannot be reclaimed

    @property
    def usable_total_nbytes(self) -> int:
        return min(self.total_nbytes, self.limit_nbytes or self.total_nbytes)

    @property
    def usable_available_nbytes(self) -> int:
        if self.limit_nbytes is None:
            return self.available_nbytes
        return max(0, min(self.available_nbytes, self.limit_nbytes - self.limit_used_nbytes))


@dataclass(frozen=True)
class GpuInfo:
    """One GPU as nvidia-smi describes it."""

    index: int
    name: str
    memory_total_nbytes: int
    memory_free_nbytes: int
    driver: str


@dataclass(frozen=True)
class Machine:
    """This machine and the software that matters: versions by package, None where not installed.

    ``measured_threads``: the best number of CPU threads according to the stored profile, if there is
    one (``machine.profile_store.with_profile``).
    """

    system: str
    wsl: bool
    cpu: CpuInfo
    memory: MemoryInfo
    cgroup: Cgroup
    python: str
    packages: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    gpus: tuple[GpuInfo, ...] = ()
    measured_threads: int | None = None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``"0-3,8"`` -> ``(0, 1, 2, 3, 8)``, the kernel's notation for sets of CPUs."""
    found: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def read_cpus(root: Path) -> tuple[LogicalCpu, ...]:
    """Read ``sys/devices/system/cpu`` below ``root``; empty where there is no such tree."""
    base = root / "sys/devices/system/cpu"
    online = parse_cpu_list(_read(base / "online") or "")
    if not online:
        return ()
    efficient = set(parse_cpu_list(_read(root / "sys/devices/cpu_atom/cpus") or ""))
    capacity = {i: _read_int(base / f"cpu{i}/cpu_capacity") for i in online}
    largest = max((c for c in capacity.values() if c is not None), default=0)

    cores: dict[tuple[int, ...], int] = {}
    cpus: list[LogicalCpu] = []
    for i in online:
        topology = base / f"cpu{i}/topology"
        siblings = parse_cpu_list(
            _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list") or str(i)
        )
        core = cores.setdefault(siblings, len(cores))
        own = capacity[i]
        slow = i in efficient or (own is not None and own < CAPACITY_CLASS_RATIO * largest)
        package = _read_int(topology / "physical_package_id")
        cpus.append(LogicalCpu(i, core, max(0, package or 0), not slow))
    return tuple(cpus)


def _cpus_elsewhere() -> tuple[LogicalCpu, ...]:
    """Counts only, from psutil: siblings are taken to be neighbours."""
    import psutil

    logical = psutil.cpu_count(logical=True) or 1
    physical = min(logical, psutil.cpu_count(logical=False) or logical)
    return tuple(LogicalCpu(i, i * physical // logical, 0, True) for i in range(logical))


def read_cpu_model(root: Path) -> tuple[str, tuple[str, ...]]:
    """Return the CPU's name and those of ``ISA_FLAGS`` that it has, from ``proc/cpuinfo``."""
    fields: dict[str, str] = {}
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    have = set((fields.get("flags") or fields.get("Features") or "").split())
    model = fields.get("model name") or fields.get("Hardware") or fields.get("Model") or ""
    return model, tuple(f for f in ISA_FLAGS if f in have)


def run_command(command: Sequence[str]) -> str | None:
    """Standard output of a command, or None if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _model_elsewhere() -> tuple[str, tuple[str, ...]]:
    name = ""
    if platform.system() == "Darwin":
        name = (run_command(["sysctl", "-n", "machdep.cpu.brand_string"]) or "").strip()
    apple_silicon = platform.system() == "Darwin" and platform.machine() == "arm64"
    # Every Apple M chip has these (Arm v8.4 and later); other systems do not tell without asking
    # the CPU itself.
    return name or platform.processor(), ("asimd", "asimddp") if apple_silicon else ()


def current_affinity(cpus: Sequence[LogicalCpu]) -> tuple[int, ...]:
    """Ids of the CPUs that this process may run on; all of them where the system has no masks.

    CPUs that threads of its own have reserved are among them.
    """
    mask = process_cpus()
    return tuple(c.id for c in cpus) if mask is None else tuple(sorted(mask))


def read_cpu(root: Path, affinity: Sequence[int] | None, quota_cpus: float | None) -> CpuInfo:
    """Describe the CPU. ``affinity`` None asks the operating system."""
    cpus = read_cpus(root) or _cpus_elsewhere()
    model, isa = read_cpu_model(root)
    if not model and root == Path("/"):
        elsewhere, extra = _model_elsewhere()
        model, isa = elsewhere, isa or extra
    nodes = parse_cpu_list(_read(root / "sys/devices/system/node/online") or "0")
    return CpuInfo(
        model=model or "unknown",
        architecture=platform.machine(),
        isa=isa,
        cpus=cpus,
        affinity=tuple(affinity) if affinity is not None else current_affinity(cpus),
        quota_cpus=quota_cpus,
        num_numa_nodes=max(1, len(nodes)),
    )


def read_memory(root: Path, cgroup: Cgroup) -> MemoryInfo:
    """Read ``proc/meminfo`` below ``root``, or ask psutil where there is none."""
    fields: dict[str, int] = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        number = value.split()[0] if value.split() else ""
        if number.isdigit():
            fields[key] = int(number) * 1024  # the kernel's "kB" are KiB
    if "MemTotal" in fields:
        total = fields["MemTotal"]
        available = fields.get("MemAvailable", fields.get("MemFree", 0))
    else:
        import psutil

        seen = psutil.virtual_memory()
        total, available = seen.total, seen.available
    return MemoryInfo(total, available, cgroup.memory_limit_nbytes, cgroup.memory_used_nbytes)


def is_wsl(root: Path) -> bool:
    """Whether this Linux is Windows' subsystem, whose pinned memory is limited."""
    return "microsoft" in (_read(root / "proc/sys/kernel/osrelease") or "").lower()


def read_gpus(run: Callable[[Sequence[str]], str | None] = run_command) -> tuple[GpuInfo, ...]:
    """Ask nvidia-smi; empty where there is none or it fails. Takes up to some seconds."""
    text = run(
        [
            "nvidia-smi",
            "--query-gpu=index,name,memory.total,memory.free,driver_version",
            "--format=csv,noheader,nounits",
        ]
    )
    gpus: list[GpuInfo] = []
    for line in (text or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not (cells[0].isdigit() and cells[2].isdigit()):
            continue  # "[N/A]" and error lines; GPUs without memory of their own report N/A
        free = int(cells[3]) if cells[3].isdigit() else 0
        gpus.append(GpuInfo(int(cells[0]), cells[1], int(cells[2]) << 20, free << 20, cells[4]))
    return tuple(gpus)


def package_version(name: str) -> str | None:
    """An installed distribution's version, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def importable(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def probe_machine(
    root: Path = Path("/"), *, affinity: Sequence[int] | None = None, gpus: bool = False
) -> Machine:
    """Look at this machine, or at the one that the files below ``root`` describe.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
        affinity: ids the process may run on; None asks the operating system.
        gpus: also run nvidia-smi.
    """
    cgroup = read_cgroup(root)
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        wsl=is_wsl(root),
        cpu=read_cpu(root, affinity, cgroup.quota_cpus),
        memory=read_memory(root, cgroup),
        cgroup=cgroup,
        python=platform.python_version(),
        packages={name: package_version(name) for name in ("torch", "triton", "numpy")},
        gpus=read_gpus() if gpus else (),
    )
