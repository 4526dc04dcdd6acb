"""Work and its price: what a piece of inference does, and how long a machine needs for it at least.

``Work`` counts operations and bytes by resource; ``price`` divides them by a machine's rates. Which
resource binds follows from the division and is nowhere stored: the same work is bound by memory on
one machine and by the link on another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from headrace.core.errors import MachineError
from headrace.machine.profile import MachineProfile, Rate

# Rates that a machine may lack, by what stands in for them: (name, factor). A multiprocessor of every
# NVIDIA generation since Volta has 16 special-function lanes to 128 multiply-add lanes of two FLOPs
# (CUDA programming guide, table "Throughput of native arithmetic instructions"), hence 1/16. Formats
# without a tensor rate of their own are expanded in registers and multiplied as the wider one.
STAND_INS: Mapping[str, tuple[tuple[str, float], ...]] = MappingProxyType(
    {
        "gpu_flops_special": (("gpu_flops_f32", 1 / 16),),
        "gpu_flops_f16": (("gpu_flops_bf16", 1.0),),
        "gpu_flops_bf16": (("gpu_flops_f16", 1.0),),
        "gpu_flops_fp8": (("gpu_flops_bf16", 1.0), ("gpu_flops_f16", 1.0)),
        "gpu_flops_int8": (("gpu_flops_fp8", 1.0), ("gpu_flops_bf16", 1.0), ("gpu_flops_f16", 1.0)),
        "gpu_flops_fp4": (
            ("gpu_flops_fp8", 1.0),
            ("gpu_flops_bf16", 1.0),
            ("gpu_flops_f16", 1.0),
        ),
        "kernel_launch": (("graph_kernel", 1.0),),
        "graph_kernel": (("kernel_launch", 1.0),),
        "cpu_flops_f32": (("cpu_flops_bf16", 1.0),),
        "cpu_flops_bf16": (("cpu_flops_f32", 1.0),),
        "cpu_flops_int8": (("cpu_flops_f32", 1.0),),
    }
)

# What runs beside each other: a class lasts at least as long as the slowest of these.
BYTE_RATES: Mapping[str, str] = MappingProxyType(
    {
        "hbm": "hbm_read",
        "pcie": "pcie_h2d",
        "dram": "dram_read",
        "link": "link",
        "disk": "disk_read",
    }
)
RESOURCES = ("tensor", "vector", "special", "cpu", *BYTE_RATES, "host", "launch")
SERIAL = ("host", "launch")  # before or after the rest, not beside it

_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Work:
    """What is done, by resource.

    tensor_flops: by the dtype that multiplies ("bf16", "fp8", "fp4", "int8"), on the GPU's matrix units
    vector_flops, special_ops: float32 operations and exponentials (and the like) on the GPU
    cpu_flops: by dtype, on the CPU
    hbm_nbytes, pcie_nbytes (host to GPU), dram_nbytes, link_nbytes (between GPUs), disk_nbytes
    host_s: seconds of the host that nothing hides; launches: kernels, or wakes of a CPU's threads
    """

    tensor_flops: Mapping[str, float] = field(default_factory=lambda: _NONE)
    vector_flops: float = 0.0
    special_ops: float = 0.0
    cpu_flops: Mapping[str, float] = field(default_factory=lambda: _NONE)
    hbm_nbytes: float = 0.0
    pcie_nbytes: float = 0.0
    dram_nbytes: float = 0.0
    link_nbytes: float = 0.0
    disk_nbytes: float = 0.0
    host_s: float = 0.0
    launches: float = 0.0

    @property
    def flops(self) -> float:
        """Every floating-point operation; special ones count as one."""
        return (
            sum(self.tensor_flops.values())
            + sum(self.cpu_flops.values())
            + self.vector_flops
            + self.special_ops
        )

    @property
    def nbytes(self) -> float:
        """Bytes through every memory and link."""
        return sum(self.bytes_by_resource().values())

    def bytes_by_resource(self) -> dict[str, float]:
        """Bytes of each of ``BYTE_RATES``."""
        return {name: getattr(self, f"{name}_nbytes") for name in BYTE_RATES}

    def __add__(self, other: Work) -> Work:
        return Work(
            tensor_flops=_added(self.tensor_flops, other.tensor_flops),
            cpu_flops=_added(self.cpu_flops, other.cpu_flops),
            **{name: getattr(self, name) + getattr(other, name) for name in _SCALARS},
        )

    def scale(self, factor: float) -> Work:
        """This work ``factor`` times over."""
        return Work(
            tensor_flops={k: v * factor for k, v in self.tensor_flops.items()},
            cpu_flops={k: v * factor for k, v in self.cpu_flops.items()},
            **{name: getattr(self, name) * factor for name in _SCALARS},
        )


_SCALARS = (
    "vector_flops",
    "special_ops",
    "hbm_nbytes",
    "pcie_nbytes",
    "dram_nbytes",
    "link_nbytes",
    "disk_nbytes",
    "host_s",
    "launches",
)


def _added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {
        name: a.get(name, 0.0) + b.get(name, 0.0) for name in (*a, *(n for n in b if n not in a))
    }


def total(works: Iterable[Work]) -> Work:
    """The sum of ``works``."""
    result = Work()
    for work in works:
        result = result + work
    return result


def on_cpu(work: Work) -> Work:
    """``work`` of a machine without a GPU: what the GPU would do falls to the CPU, its bytes to DRAM.

    Nothing crosses the link there. FLOPs keep no dtype: kernels on a CPU multiply in float32.
    """
    return Work(
        cpu_flops={"f32": work.flops},
        dram_nbytes=work.hbm_nbytes + work.dram_nbytes,
        link_nbytes=work.link_nbytes,
        disk_nbytes=work.disk_nbytes,
        host_s=work.host_s,
        launches=work.launches,
    )


@dataclass(frozen=True)
class Priced:
    """What work costs on a machine.

    seconds: by resource of ``RESOURCES``, those that are used
    floor_s: no schedule is faster: the slowest of what overlaps, plus what nothing overlaps
    bound: the resource with the largest share, "" where there is nothing to do
    intensity: FLOPs a byte of the memory that binds most (infinite without bytes, 0 without either)
    """

    seconds: Mapping[str, float]
    floor_s: float
    bound: str
    intensity: float


def price(
    work: Work, machine: MachineProfile, efficiency: Mapping[str, float] | None = None
) -> Priced:
    """How long ``machine`` needs for ``work`` at least, and what binds.

    Args:
        efficiency: share of a resource's rate that is reached, by resource; 1 where not given.
            For published peaks; measured rates need none.

    Raises:
        MachineError: the work needs a resource for which the machine has no rate.
    """
    seconds = {name: value for name, value in _seconds(work, machine).items() if value > 0}
    if efficiency:
        seconds = {name: value / efficiency.get(name, 1.0) for name, value in seconds.items()}
    beside = max((v for name, v in seconds.items() if name not in SERIAL), default=0.0)
    serial = sum(v for name, v in seconds.items() if name in SERIAL)
    return Priced(
        seconds=seconds,
        floor_s=beside + serial,
        bound=max(seconds, key=lambda name: seconds[name], default=""),
        intensity=_intensity(work, seconds),
    )


def _intensity(work: Work, seconds: Mapping[str, float]) -> float:
    memories = {name: value for name, value in seconds.items() if name in BYTE_RATES}
    if not memories:
        return float("inf") if work.flops else 0.0
    slowest = max(memories, key=lambda name: memories[name])
    return work.flops / work.bytes_by_resource()[slowest]


def _seconds(work: Work, machine: MachineProfile) -> dict[str, float]:
    """Seconds by resource, each alone."""
    seconds = {
        "tensor": sum(
            n / rate_of(machine, f"gpu_flops_{dtype}")
            for dtype, n in work.tensor_flops.items()
            if n
        ),
        "cpu": sum(
            n / rate_of(machine, f"cpu_flops_{dtype}") for dtype, n in work.cpu_flops.items() if n
        ),
        "host": work.host_s,
    }
    if work.vector_flops:
        seconds["vector"] = work.vector_flops / rate_of(machine, "gpu_flops_f32")
    if work.special_ops:
        seconds["special"] = work.special_ops / rate_of(machine, "gpu_flops_special")
    for name, nbytes in work.bytes_by_resource().items():
        if nbytes:
            seconds[name] = nbytes / rate_of(machine, BYTE_RATES[name])
    if work.launches:
        name = "kernel_launch" if machine.gpu is not None else "thread_wake"
        seconds["launch"] = work.launches * rate_of(machine, name)
    return seconds


def rate_of(machine: MachineProfile, name: str) -> float:
    """The rate ``name`` in operations or bytes a second, or in seconds a call.

    Raises:
        MachineError: the machine has neither it nor what can stand in for it.
    """
    rate, factor = _rate(machine, name)
    return rate.value if rate.unit == "s" else rate.value * factor * 1e9


def _rate(machine: MachineProfile, name: str) -> tuple[Rate, float]:
    """The rate ``name``, or what stands in for it and by how much it is to be multiplied."""
    for candidate, factor in ((name, 1.0), *STAND_INS.get(name, ())):
        if candidate in machine.rates:
            return machine.rates[candidate], factor
    raise MachineError(
        f"the machine {machine.name!r} has no rate {name!r}, which this work needs",
        hint="measure it with `headrace bench machine`, or add it to the profile's rates",
    )
