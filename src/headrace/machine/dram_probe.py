"""One quick look at how fast memory is read. NumPy only, so that planning needs no torch."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from headrace.machine.pages import HostBlock

# Larger than last-level caches of desktop CPUs (Zen X3D: 96 MB), small enough to touch in no time.
_DRAM_NBYTES = 192 << 20
_PIECE_NBYTES = 2 << 20


def dram_read_gbps(threads: int, nbytes: int = _DRAM_NBYTES, *, passes: int = 1) -> float:
    """DRAM read rate in GB/s (10^9 bytes a second): the best of ``passes``, NumPy's maximum as the
    read loop."""
    block = HostBlock(nbytes)
    words: npt.NDArray[np.int64] = block.bytes.view(np.int64)
    step = _PIECE_NBYTES // 8

    def write(first: int) -> None:
        words[first : first + step] = 1

    def read(first: int) -> int:
        return int(words[first : first + step].max())

    def spent() -> float:
        start = time.perf_counter()
        list(pool.map(read, pieces))
        return time.perf_counter() - start

    pieces = range(0, len(words), step)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        list(pool.map(write, pieces))
        best = min(spent() for _ in range(passes))
    block.release()
    return nbytes / best / 1e9
