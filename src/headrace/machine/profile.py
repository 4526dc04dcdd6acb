"""A machine as numbers: what the engine decides by and what predictions are made from.

Measured and catalogued machines share one record, so that a plan for a machine that nobody here has
is made by the same code as one for this machine. Pure data; docs/reference/schemas holds its JSON
schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from headrace.core.errors import ConfigError
from headrace.core.record_json import record_from_json, record_to_json

# 2: best_threads, measured_at
MACHINE_PROFILE_VERSION = 2

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]
Unit = Literal["GB/s", "GFLOP/s", "s"]

# Rate names: lower-case words. A rate that was taken while another engine was busy ends in
# "_overlapped", so that the two can stand side by side.
RATE_NAME = re.compile(r"[a-z][a-z0-9_]*")
OVERLAPPED = "_overlapped"
# The unit that rates have by the start of their names; names of other starts may have any.
UNITS: Mapping[str, str] = {
    **dict.fromkeys(("dram_", "hbm_", "pcie_", "disk_", "cpu_experts_"), "GB/s"),
    **dict.fromkeys(("gpu_flops_", "cpu_flops_"), "GFLOP/s"),
    **dict.fromkeys(("kernel_launch", "graph_", "flag_", "thread_wake"), "s"),
}


@dataclass(frozen=True)
class Rate:
    """One measured or published number.

    ``unit``: GB/s is 10^9 bytes a second; GFLOP/s counts a multiply-add as two; s is seconds a
    call. ``mode``: alone, or overlapped with what else the engine does at that time (PCIe beside
    DRAM reads, say). ``source``: how it was measured and when, or the document it is from.
    """

    value: Positive
    unit: Unit
    mode: Literal["alone", "overlapped"]
    source: Text


@dataclass(frozen=True)
class GpuProfile:
    """The GPU. ``architecture`` is the vendor's name of the generation, such as sm_90.

    ``multiprocessors``: units that a kernel's blocks are spread over, 0 if not known. ``unified``: its
    memory is the host's, so that what lies there counts once.
    """

    name: Text
    memory_nbytes: Count
    architecture: str = ""
    multiprocessors: Annotated[int, Meta(ge=0)] = 0
    unified: bool = False


@dataclass(frozen=True)
class HostProfile:
    """The CPU and its memory. ``isa`` as in ``machine.probe.ISA_FLAGS``."""

    cpu: Text
    cores: Count
    memory_nbytes: Count
    isa: tuple[str, ...] = ()
    numa_nodes: Count = 1


@dataclass(frozen=True)
class LinkProfile:
    """What connects host and GPU, such as "PCIe 5.0 x16" or "NVLink-C2C"."""

    name: Text


@dataclass(frozen=True)
class MachineProfile:
    """A machine: its parts and its rates by name.

    Names in use, GB/s ones also with ``_overlapped`` (PCIe and host memory beside each other):

    - ``dram_read`` with the best number of threads, ``dram_read_t<n>`` with n; ``hbm_read``
    - ``pcie_h2d``, ``pcie_d2h``: copy engines; ``pcie_gather``: a kernel that reads pinned memory
    - ``cpu_experts_<format>``: expert bytes that the CPU computes on with the best number of threads,
      ``cpu_experts_<format>_t<n>`` with n, ``cpu_experts_<format>_of16`` with 16 tokens of each expert
    - ``gpu_flops_<dtype>``, ``cpu_flops_<dtype>`` (GFLOP/s)
    - ``kernel_launch`` (one by one), ``graph_launch`` (a graph of one kernel), ``graph_kernel`` (each of
      many in a graph), ``graph_read`` (of one there that reads memory, without its bytes),
      ``flag_round_trip`` (GPU to CPU thread and back), ``thread_wake`` (s)

    ``best_threads``: for the CPU's part beside this GPU, None if not measured. ``measured_at``: UTC, ISO
    8601, empty for catalogued machines. ``gpu`` and ``link`` are None on a machine without a GPU.
    ``disturbed``: the groups of measurements during which other programs kept more than a tenth of the CPUs
    busy, and the share that they had: what was measured then is too low.
    """

    name: Text
    origin: Literal["measured", "catalogued"]
    host: HostProfile
    gpu: GpuProfile | None = None
    link: LinkProfile | None = None
    rates: Mapping[str, Rate] = field(default_factory=dict[str, Rate])
    best_threads: Count | None = None
    measured_at: str = ""
    disturbed: Mapping[str, Share] = field(default_factory=dict[str, Share])
    version: int = MACHINE_PROFILE_VERSION

    def to_json(self) -> str:
        """This profile as JSON text."""
        return record_to_json(self)

    @staticmethod
    def from_json(text: str | bytes, source: str = "the machine profile") -> MachineProfile:
        """Read a profile.

        Raises:
            ConfigError: a field is missing, unknown, of the wrong type or value, or contradicts
                another one; the message names it.
        """
        profile = record_from_json(MachineProfile, text, source)
        _check(profile, source)
        return profile

    @staticmethod
    def load(path: Path) -> MachineProfile:
        """Read a profile from a file."""
        try:
            return MachineProfile.from_json(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(
                f"cannot read the machine profile {path}: {error.strerror}",
                hint="`headrace bench machine --output FILE` writes one",
            ) from None

    def save(self, path: Path) -> None:
        """Write the profile to a file, replacing one that is there; readers see the old or the new."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        partial.replace(path)

    def gbps(self, name: str) -> float | None:
        """A rate in GB/s; None if the profile does not have it."""
        rate = self.rates.get(name)
        return None if rate is None else rate.value


def _check(profile: MachineProfile, source: str) -> None:
    """What types cannot say: names, modes, and a link needs a GPU."""
    for name, rate in profile.rates.items():
        if RATE_NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{source}: rates has the name {name!r}; names are of a-z, 0-9 and _",
                param="rates",
            )
        for start, unit in UNITS.items():
            if name.startswith(start) and rate.unit != unit:
                raise ConfigError(
                    f"{source}: rates[{name!r}].unit is {rate.unit!r}; it must be {unit!r}",
                    hint="GB/s is 10^9 bytes a second, s is seconds a call",
                    param=f"rates[{name!r}].unit",
                )
        if name.endswith(OVERLAPPED) != (rate.mode == "overlapped"):
            raise ConfigError(
                f"{source}: rates[{name!r}].mode is {rate.mode!r}; names of overlapped rates, and "
                f"of no others, end in {OVERLAPPED}",
                param=f"rates[{name!r}].mode",
            )
    if profile.link is not None and profile.gpu is None:
        raise ConfigError(
            f"{source}: link is given and gpu is not",
            hint="a link joins a GPU and its host: leave it out, or add the GPU",
            param="link",
        )
