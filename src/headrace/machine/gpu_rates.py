"""Rates of a CUDA GPU and of its link: products, copies, launches. Kernels come from above.

Times are the GPU's own (events), the shortest of several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from headrace.core.errors import MachineError
from headrace.machine.pages import HostBlock
from headrace.machine.pinned import CudaPinner
from headrace.machine.profile import GpuProfile

# One copy: long enough for the engines' full rate (1 MB pieces lose a sixth: 46.9 of 55.5 GB/s on the
# H200 machine, 2026-11-29), short enough to stop soon.
CHUNK_NBYTES = 64 << 20
_HOST_NBYTES = 512 << 20
_HBM_NBYTES = 4 << 30  # far beyond any L2 cache
_PRODUCT = 8192  # rows, columns and depth of the matrix product
_LAUNCHES = 1000
# Reads whose time is mostly what a kernel costs beside its bytes: the start, the first bytes' way from
# memory, the last program's end. As large as a layer's matrices of a small model.
_SHORT_NBYTES, _SHORTS = 1 << 20, 4


_cuda: Any = torch.cuda  # its own types are incomplete


def device_properties() -> Any:
    """The current CUDA device's properties, as torch names them."""
    return _cuda.get_device_properties(_cuda.current_device())


class GpuKernels(Protocol):
    """Kernels that the measurements need, made by ``headrace.ops.measure``."""

    def read(self, source: torch.Tensor) -> None:
        """Read a tensor of the GPU's memory once."""
        ...

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pinned host memory into the GPU's by a kernel."""
        ...

    def nothing(self, word: torch.Tensor) -> None:
        """Launch the smallest kernel."""
        ...

    def ping(self, seq: torch.Tensor, ack: torch.Tensor, count: int) -> None:
        """Raise ``seq`` and wait for ``ack`` to follow, ``count`` times, with bounded waits."""
        ...

    def answer(self, seq: torch.Tensor, ack: torch.Tensor, count: int, timeout_s: float) -> int:
        """Answer on the calling thread, without the interpreter lock; how many were answered."""
        ...


class PinnedBuffer:
    """Host memory that a GPU reads, given back by ``close``."""

    def __init__(self, nbytes: int = _HOST_NBYTES) -> None:
        self._block = HostBlock(nbytes)
        self._block.bytes[:] = 1
        self._pinner = CudaPinner()
        refusal = self._pinner.pin(self._block.address, nbytes)
        if refusal is not None:
            raise MachineError(
                f"{nbytes / 1e6:.0f} MB of memory cannot be pinned: {refusal}",
                hint="close programs that pin memory (other inference engines)",
            )
        self.bytes: torch.Tensor = torch.from_numpy(self._block.bytes)  # pyright: ignore[reportUnknownMemberType]

    def close(self) -> None:
        torch.cuda.synchronize()
        self._pinner.unpin(self._block.address)
        self._block.release()


class Link:
    """Traffic over PCIe: copies or gathers that go on for as long as asked.

    The calling thread issues them one after another, two in flight, as the engine's host loop does:
    threads that take its core slow both.
    """

    def __init__(self, kernels: GpuKernels, buffer: PinnedBuffer) -> None:
        self._kernels = kernels
        self._host = buffer.bytes
        self._device = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cuda")

    def rate(self, kind: str, busy: Callable[[], bool]) -> float:
        """GB/s of traffic of one kind (h2d, d2h, gather) while ``busy()`` is true."""
        pieces = [
            self._host[first : first + CHUNK_NBYTES]
            for first in range(0, self._host.numel(), CHUNK_NBYTES)
        ]
        flight: list[Any] = []
        torch.cuda.synchronize()
        start, done, number = time.perf_counter(), 0, 0
        while busy() or not done:
            self._one(kind, pieces[number % len(pieces)])
            number += 1
            flight.append(_event())
            flight[-1].record()
            if len(flight) > 2:
                flight.pop(0).synchronize()
                done += 1
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return done * CHUNK_NBYTES / spent / 1e9

    def rate_alone(self, kind: str, seconds: float) -> float:
        """GB/s with nothing beside it."""
        self._one(kind, self._host[:CHUNK_NBYTES])  # compiled and warm
        torch.cuda.synchronize()
        end = time.perf_counter() + seconds
        return self.rate(kind, lambda: time.perf_counter() < end)

    def _one(self, kind: str, piece: torch.Tensor) -> None:
        if kind == "h2d":
            self._device.copy_(piece, non_blocking=True)
        elif kind == "d2h":
            piece.copy_(self._device, non_blocking=True)
        else:
            self._kernels.gather(piece, self._device)


class CudaSide:
    """Everything that is measured with the current CUDA device; see ``machine.bandwidth.GpuSide``."""

    def __init__(self, kernels: GpuKernels) -> None:
        self._kernels = kernels
        properties = device_properties()
        self.profile = GpuProfile(
            properties.name,
            properties.total_memory,
            f"sm_{properties.major}{properties.minor}",
            properties.multi_processor_count,
            bool(getattr(properties, "is_integrated", False)),
        )
        self._buffer = PinnedBuffer()
        self.link = Link(kernels, self._buffer)

    def hbm_read_gbps(self) -> float:
        return hbm_read_gbps(self._kernels)

    def product_gflops(self, dtype: str) -> float | None:
        return product_gflops(dtype)

    def launch_times(self) -> dict[str, float]:
        return launch_times(self._kernels)

    def flag_round_trip_s(self) -> float | None:
        return flag_round_trip_s(self._kernels)

    def peaks(self) -> dict[str, float]:
        """What the GPU's clocks allow, in the unit of the rate, by its name."""
        properties = device_properties()
        clock_khz = getattr(properties, "memory_clock_rate", 0)
        width = getattr(properties, "memory_bus_width", 0)  # bits
        if not clock_khz or not width:
            return {}
        return {"hbm_read": 2 * clock_khz * 1e3 * width / 8 / 1e9}  # two transfers a clock

    def close(self) -> None:
        self._buffer.close()


def hbm_read_gbps(kernels: GpuKernels) -> float:
    """Rate of a kernel that only reads, over far more than any cache."""
    free = torch.cuda.mem_get_info()[0]
    nbytes = min(_HBM_NBYTES, free // 4 // CHUNK_NBYTES * CHUNK_NBYTES)
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    return nbytes / _best_s(lambda: kernels.read(memory)) / 1e9


def product_gflops(dtype: str, size: int | None = None) -> float | None:
    """GFLOP/s of a square matrix product; None if this GPU or build has none in the dtype.

    size: rows, columns and depth; None: what is measured by.
    """
    n = size or (_PRODUCT if dtype != "f32" else _PRODUCT // 2)
    try:
        call = _product(dtype, n)
        call()
        torch.cuda.synchronize()
    except RuntimeError:
        return None
    return 2 * n**3 / _best_s(call) / 1e9


def _product(dtype: str, n: int) -> Callable[[], Any]:
    if dtype == "fp8":
        a = torch.ones(n, n, device="cuda").to(torch.float8_e4m3fn)
        b = torch.ones(n, n, device="cuda").to(torch.float8_e4m3fn).t()
        one = torch.ones((), device="cuda")
        scaled: Any = getattr(torch, "_scaled_mm")  # noqa: B009  torch has no public name for it yet
        return lambda: scaled(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    # Values matter: a chip draws less power, and clocks higher, on zeros.
    x = torch.randn(n, n, device="cuda").to(kind)
    y = torch.randn(n, n, device="cuda").to(kind)
    return lambda: torch.mm(x, y)


def launch_times(kernels: GpuKernels) -> dict[str, float]:
    """Seconds of a launch: kernels one by one, a graph of one kernel, and each kernel of a graph.

    ``graph_read``: of a kernel of a graph that reads what no cache holds, without its bytes.
    """
    word = torch.zeros(1, dtype=torch.int32, device="cuda")

    def launch() -> None:
        for _ in range(_LAUNCHES):
            kernels.nothing(word)

    kernels.nothing(word)
    one, many = _captured(lambda: kernels.nothing(word)), _captured(launch)

    def replay() -> None:
        for _ in range(_LAUNCHES):
            one.replay()

    memory = torch.zeros(_SHORT_NBYTES * _SHORTS * _LAUNCHES // 8, dtype=torch.uint8, device="cuda")

    def reads(nbytes: int) -> Callable[[], None]:
        pieces = [memory[i : i + nbytes] for i in range(0, memory.numel(), nbytes)]

        def read() -> None:
            for index in range(_LAUNCHES):
                kernels.read(pieces[index % len(pieces)])

        return read

    kernels.read(memory)
    short, longer = (
        _best_s(_captured(reads(n * _SHORT_NBYTES)).replay) / _LAUNCHES for n in (1, _SHORTS)
    )
    return {
        "graph_read": max(short - (longer - short) / (_SHORTS - 1), 1e-9),
        "kernel_launch": _best_s(launch) / _LAUNCHES,
        "graph_launch": _best_s(replay) / _LAUNCHES,
        "graph_kernel": _best_s(many.replay) / _LAUNCHES,
    }


def flag_round_trip_s(kernels: GpuKernels, count: int = 2000) -> float | None:
    """Seconds from a flag raised by the GPU to the CPU's answer seen there; None if one is lost."""
    import threading

    block = PinnedBuffer(2 << 20)
    words = block.bytes.view(torch.int32)
    words.zero_()
    # On cache lines of their own: each side writes one of them.
    seq, ack = words[0:1], words[1024:1025]
    answered: list[int] = []

    def serve(times: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: answered.append(kernels.answer(seq, ack, times, 2.0))
        )
        thread.start()
        return thread

    best = float("inf")
    for times in (10, count, count):  # the first compiles
        thread = serve(times)
        start, end = _event(), _event()
        start.record()
        kernels.ping(seq, ack, times)
        end.record()
        torch.cuda.synchronize()
        thread.join()
        if times == count:
            best = min(best, start.elapsed_time(end) / 1e3 / count)
    block.close()
    return best if answered == [10, count, count] else None


def _captured(call: Callable[[], None]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _event() -> Any:
    return cast(Any, torch.cuda.Event(enable_timing=True))


def _best_s(call: Callable[[], Any], runs: int = 5) -> float:
    """The shortest of a few runs, in GPU seconds, after one that is not counted."""
    call()
    best = float("inf")
    for _ in range(runs):
        start, end = _event(), _event()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
