"""Rates of this machine in a fraction of a second, for an engine that starts without a profile.

They are rough: a tenth of a second each, beside whatever else runs. ``headrace bench machine``
measures them properly, and live steps correct them.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from headrace.machine.pages import HostBlock

# Larger than last-level caches of desktop CPUs (Zen X3D: 96 MB), small enough to touch in no time.
_DRAM_NBYTES = 192 << 20
_PIECE_NBYTES = 2 << 20
_PCIE_NBYTES = 64 << 20


def dram_read_gbps(threads: int, nbytes: int = _DRAM_NBYTES) -> float:
    """DRAM read rate in GB/s (10^9 bytes a second), NumPy's maximum as the read loop: one pass."""
    block = HostBlock(nbytes)
    words: npt.NDArray[np.int64] = block.bytes.view(np.int64)
    step = _PIECE_NBYTES // 8

    def write(first: int) -> None:
        words[first : first + step] = 1

    def read(first: int) -> int:
        return int(words[first : first + step].max())

    pieces = range(0, len(words), step)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, pieces))
        start = time.perf_counter()
        list(pool.map(read, pieces))
        spent = time.perf_counter() - start
    block.release()
    return nbytes / spent / 1e9


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
