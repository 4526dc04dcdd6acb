"""Rates of this machine in a fraction of a second, for an engine that starts without a profile.

They are rough: a tenth of a second each, beside whatever else runs. ``headrace bench machine``
measures them properly, and live steps correct them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from headrace.machine.dram_probe import dram_read_gbps
from headrace.machine.gpu_rates import product_gflops
from headrace.machine.probe import Machine
from headrace.machine.profile import Rate, Unit
from headrace.machine.profile_store import profile_of

_PCIE_NBYTES = 64 << 20
_SQUARE = 4096  # 0.2 ms on an H200, 6 ms on a GPU of 22 TFLOP/s: far more than a launch


def starting_rates(machine: Machine, threads: int) -> tuple[Mapping[str, Rate], bool]:
    """Rates to begin with: the stored profile's, or quick probes; and whether they were probed.

    Probed are ``dram_read`` and, with a GPU, ``pcie_h2d`` and ``gpu_flops_bf16``: names as in
    ``machine.profile``. They take less than half a second.
    """
    profile, _ = profile_of(machine)
    if profile is not None:
        return profile.rates, False
    probed: dict[str, tuple[float | None, Unit]] = {
        "dram_read": (dram_read_gbps(threads), "GB/s"),
        "pcie_h2d": (pcie_h2d_gbps(), "GB/s"),
        "gpu_flops_bf16": (gpu_bf16_gflops(), "GFLOP/s"),
    }
    return {
        name: Rate(value, unit, "alone", "quick probe at start")
        for name, (value, unit) in probed.items()
        if value is not None
    }, True


def pcie_h2d_gbps(nbytes: int = _PCIE_NBYTES) -> float | None:
    """Rate of copies from pinned memory to the GPU in GB/s; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return nbytes / min(times) / 1e9


def gpu_bf16_gflops() -> float | None:
    """Rate of a bfloat16 product in GFLOP/s; None without a GPU."""
    return product_gflops("bf16", _SQUARE) if torch.cuda.is_available() else None
