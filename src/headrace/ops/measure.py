"""What the machine's measurements need from the kernels: plain reads, and probes on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from headrace.machine.dram_probe import dram_read_gbps
from headrace.machine.gpu_rates import device_properties
from headrace.machine.pages import HostBlock
from headrace.ops.registry import unavailable_reason

# threads, CPUs to keep them on (none: where the system likes), seconds -> GB/s
ReadLoad = Callable[[int, Sequence[int], float], float]

# 24 programs gather at the link's rate (H200 machine, 2026-11-29: 16 reached 51.3 of 55.5 GB/s).
_GATHER_PROGRAMS = 24
_READ_PROGRAMS_PER_SM = 8
_WORDS = 2048  # 16 KiB a program at once
_MOST_LOOKS = 2_000_000  # about two seconds over PCIe


class Marks(Protocol):
    """Points in a device's work, and the seconds between them. Works inside captured graphs."""

    def begin(self) -> None:
        """The first point; earlier ones are forgotten."""
        ...

    def point(self) -> None:
        """One more point, behind all work that was launched so far."""
        ...

    def stamps(self, count: int) -> torch.Tensor:
        """Where the device notes when it passes the first ``count`` + 1 points: int64, nanoseconds."""
        ...

    def seconds(self, count: int) -> list[float]:
        """Between the first ``count`` + 1 points, as last passed; waits for the device."""
        ...


def step_marks(device: torch.device) -> Marks:
    """Marks of a device that runs Triton's kernels."""
    from headrace.ops.triton.marks import StampMarks

    return StampMarks(device)


def read_load(block: HostBlock) -> ReadLoad:
    """A plain read loop over a block: the C++ one, or NumPy's where that is not built."""
    if unavailable_reason("cpu") is not None:
        return lambda threads, cpus, seconds: dram_read_gbps(threads)
    from headrace.ops.cpu import _native

    def load(threads: int, cpus: Sequence[int], seconds: float) -> float:
        return (
            _native.read_bandwidth(block.address, block.nbytes, threads, list(cpus), seconds) / 1e9
        )

    return load


def gpu_kernels() -> TritonProbes | None:
    """Probes for the current CUDA device; None without one or without Triton."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    return TritonProbes()


class TritonProbes:
    """``machine.gpu_rates.GpuKernels`` in Triton, with the C++ thread that answers flags."""

    def __init__(self) -> None:
        from headrace.ops.triton import probes

        self._probes: Any = probes  # launches are Triton's syntax

    def read(self, source: torch.Tensor) -> None:
        words = source.view(torch.int64)
        most: int = device_properties().multi_processor_count * _READ_PROGRAMS_PER_SM
        programs = min(most, -(-words.numel() // _WORDS))
        sums = torch.empty(programs, dtype=torch.int64, device=source.device)
        self._probes.read_kernel[(programs,)](words, sums, words.numel(), _WORDS, num_warps=8)

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        words = source.view(torch.int64)
        self._probes.gather_kernel[(_GATHER_PROGRAMS,)](
            words, target.view(torch.int64), words.numel(), _WORDS, num_warps=8
        )

    def nothing(self, word: torch.Tensor) -> None:
        self._probes.nothing_kernel[(1,)](word, num_warps=1)

    def ping(self, seq: torch.Tensor, ack: torch.Tensor, count: int) -> None:
        self._probes.ping_kernel[(1,)](seq, ack, count, _MOST_LOOKS, num_warps=1)

    def answer(self, seq: torch.Tensor, ack: torch.Tensor, count: int, timeout_s: float) -> int:
        if unavailable_reason("cpu") is not None:
            return 0
        from headrace.ops.cpu import _native

        return _native.answer_flags(seq.data_ptr(), ack.data_ptr(), count, timeout_s)
