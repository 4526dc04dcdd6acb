"""This machine as a profile: the one that `headrace bench machine` left, or rough rates taken now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from headrace.core.words import counted
from headrace.kv.storage import is_out_of_memory
from headrace.machine.dram_probe import dram_read_gbps
from headrace.machine.gpu_rates import hbm_read_gbps, product_gflops
from headrace.machine.probe import Machine
from headrace.machine.profile import GpuProfile, HostProfile, LinkProfile, MachineProfile, Rate
from headrace.machine.profile_store import profile_of
from headrace.machine.quick_probe import pcie_h2d_gbps
from headrace.ops.measure import gpu_kernels

_PRODUCT = 1024  # rows and columns of the product that shows the CPU's arithmetic


def this_machine(machine: Machine, threads: int, *, on_gpu: bool = False) -> MachineProfile:
    """The measured profile of this machine, with rough rates for what it lacks.

    Takes a quarter of a second where nothing was measured before, and a second more with ``on_gpu``: the
    GPU's own rates are wanted, too. Without it the profile has no GPU: the engine computes on the CPU,
    under the CPU's roof, whatever else is in the machine.
    """
    gpu = machine.gpus[0] if machine.gpus else None
    found, _ = profile_of(machine)
    if found is None:
        found = MachineProfile(
            name=machine.cpu.model,
            origin="measured",
            host=HostProfile(
                cpu=machine.cpu.model,
                cores=machine.cpu.num_cores,
                memory_nbytes=machine.memory.total_nbytes,
                isa=machine.cpu.isa,
                numa_nodes=machine.cpu.num_numa_nodes,
            ),
            gpu=GpuProfile(gpu.name, gpu.memory_total_nbytes) if gpu else None,
            link=LinkProfile("PCIe") if gpu else None,
        )
    if not on_gpu:
        found = replace(found, gpu=None, link=None)
    rates = _quick_rates(found, threads)
    if on_gpu:
        rates |= _gpu_rates(found)
    return with_rates(found, rates)


def with_rates(profile: MachineProfile, rates: Mapping[str, Rate]) -> MachineProfile:
    """``profile`` with more rates; those that it has stay."""
    return replace(profile, rates={**rates, **profile.rates})


def measured_rate(value: float, unit: str, how: str) -> Rate:
    """A rate taken just now."""
    day = datetime.now(UTC).date().isoformat()
    return Rate(value, unit, "alone", f"measured {day}: {how}")  # type: ignore[arg-type]


def _quick_rates(profile: MachineProfile, threads: int) -> dict[str, Rate]:
    rates: dict[str, Rate] = {}
    if "dram_read" not in profile.rates:
        best = dram_read_gbps(threads, passes=3)
        rates["dram_read"] = measured_rate(
            best, "GB/s", f"a read of 192 MiB, {counted(threads, 'thread')}"
        )
    if "cpu_flops_f32" not in profile.rates:
        how = f"float32 product of {_PRODUCT} x {_PRODUCT}, NumPy's BLAS"
        rates["cpu_flops_f32"] = measured_rate(_product_gflops(), "GFLOP/s", how)
    if profile.gpu is not None and "pcie_h2d" not in profile.rates:
        link = pcie_h2d_gbps()
        if link is not None:
            rates["pcie_h2d"] = measured_rate(link, "GB/s", "pinned copy of 64 MiB")
    return rates


def _gpu_rates(profile: MachineProfile) -> dict[str, Rate]:
    """What pricing a step on the GPU needs and the profile does not have; left out where memory is short."""
    kernels = gpu_kernels()
    rates: dict[str, Rate] = {}
    if kernels is None:
        return rates
    try:
        if "hbm_read" not in profile.rates:
            rates["hbm_read"] = measured_rate(
                hbm_read_gbps(kernels), "GB/s", "kernel that only reads"
            )
        for dtype in ("bf16", "f32"):
            name = f"gpu_flops_{dtype}"
            gflops = None if name in profile.rates else product_gflops(dtype)
            if gflops is not None:
                rates[name] = measured_rate(gflops, "GFLOP/s", "square product")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return rates


def _product_gflops() -> float:
    a: npt.NDArray[np.float32] = np.ones((_PRODUCT, _PRODUCT), np.float32)
    best = min(_timed(a) for _ in range(5))
    return 2 * _PRODUCT**3 / best / 1e9


def _timed(a: npt.NDArray[np.float32]) -> float:
    start = time.perf_counter()
    np.dot(a, a)
    return time.perf_counter() - start
