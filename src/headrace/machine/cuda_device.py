"""One CUDA GPU, through torch's streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from headrace.core.errors import DoesNotFitError, MachineError
from headrace.machine.device_api import DeviceMemory, Outputs
from headrace.machine.probe import GpuInfo

# Memory that the driver takes for a process that computes with torch and Triton, where it cannot be
# seen from the difference in free memory.
CONTEXT_NBYTES = 600 * 2**20
# More than the driver ever takes for one. Where more is gone, other processes have begun to use the GPU
# meanwhile (a dozen starting at once: 8 GB), and what they took is not ours.
MOST_CONTEXT_NBYTES = 2 * 2**30

# Runs before a capture: kernels are compiled, cuBLAS takes its workspace, allocations settle.
_WARM_UP_RUNS = 2
# How torch begins the message of an error of the driver or of a kernel (c10/cuda/CUDAException.h).
_DRIVER_ERROR = "CUDA error"


def context_nbytes(now: DeviceMemory, free_before_nbytes: int | None) -> int:
    """What the driver took for this process, beside torch's memory.

    free_before_nbytes: what was free before the process began to use the device, None if it is not known.
    """
    if free_before_nbytes is None:
        return CONTEXT_NBYTES
    taken = max(free_before_nbytes - now.free_nbytes - now.reserved_nbytes, 0)
    return CONTEXT_NBYTES if taken > MOST_CONTEXT_NBYTES else taken


def visible_gpus() -> tuple[GpuInfo, ...]:
    """The GPUs that torch sees, in its order; asking for their memory starts CUDA on each."""
    if not torch.cuda.is_available():
        return ()
    found: list[GpuInfo] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(GpuInfo(index, torch.cuda.get_device_name(index), total, free, ""))
    return tuple(found)


def shared_memory_nbytes(index: int) -> int | None:
    """Shared memory that one program on a GPU may have; None where torch sees no such GPU."""
    cuda: Any = torch.cuda
    if not cuda.is_available() or index >= cuda.device_count():
        return None
    return cuda.get_device_properties(index).shared_memory_per_block_optin


class CudaGraph:
    """A captured graph. All graphs of a device share one pool of memory: results of one are valid
    until another one is replayed."""

    def __init__(self, device: torch.device, pool: Any, stream: Any) -> None:
        self._device = device
        self._pool, self._stream = pool, stream
        self._graph: Any = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Outputs]) -> Outputs:
        """Run ``work`` to warm up, then record it. Other threads may use the device meanwhile.

        Warming up is launched where everything else is. Where each capture warmed up on a stream of its own,
        kernels of all graphs began 0.1 to 0.5 us later once another graph had been captured and prompts of
        some hundred launches had run: watched steps of SmolLM2 took 0.64 ms, others 0.61 (H200, 2026-11-30).
        """
        for _ in range(_WARM_UP_RUNS):
            work()
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.graph(
            self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = work()
        return outputs

    def replay(self) -> None:
        """Queue the recorded work on the current stream."""
        self._graph.replay()


class CudaDevice:
    """One CUDA GPU.

    Raises:
        MachineError: there is none.
    """

    backends: Sequence[str] = ("triton", "reference")
    reads_pageable = False
    queues = True

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise MachineError(
                "no CUDA device: torch.cuda.is_available() is false",
                hint="check the driver with nvidia-smi, and that torch is a CUDA build",
            )
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)
        torch.cuda.set_device(self.torch_device)  # Triton launches on the current one
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._recorded_on: Any = torch.cuda.Stream(self.torch_device)
        self._first: CudaGraph | None = None

    def stream(self) -> Any:
        return torch.cuda.Stream(self.torch_device)

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def graph(self) -> CudaGraph:
        if self._first is None:
            # Torch lets go of a pool with its last graph, and then cannot use it again if something in it is
            # still in use: the workspace that cuBLAS takes for a stream is, when a capture is its first use.
            word = torch.zeros(1, device=self.torch_device)
            self._first = self._new_graph()
            self._first.capture(lambda: (word.add_(1.0),))
        return self._new_graph()

    def _new_graph(self) -> CudaGraph:
        return CudaGraph(self.torch_device, self._pool, self._recorded_on)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Page-locked host memory; torch rounds large blocks up to a power of two."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(
            total_nbytes=total,
            free_nbytes=free,
            reserved_nbytes=torch.cuda.memory_reserved(self.torch_device),
            allocated_nbytes=torch.cuda.memory_allocated(self.torch_device),
        )

    def limit_memory(self, nbytes: int, free_before_nbytes: int | None = None) -> int:
        """Bound torch's allocator to what ``nbytes`` leaves beside the driver's own memory.

        Raises:
            DoesNotFitError: the driver alone takes more.
        """
        context = context_nbytes(self.memory(), free_before_nbytes)
        left = nbytes - context
        if left <= 0:
            raise DoesNotFitError(
                f"{nbytes / 1e6:,.0f} MB of GPU memory: CUDA itself takes {context / 1e6:,.0f} MB",
                hint="give a larger --vram-budget",
            )
        cuda: Any = torch.cuda
        total: int = cuda.get_device_properties(self.torch_device).total_memory
        cuda.set_per_process_memory_fraction(min(left / total, 1.0), self.torch_device)
        return left

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def is_lost(self, error: BaseException) -> bool:
        """Errors of the driver stick to the context: each later call would report them again."""
        if isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(error, RuntimeError) and _DRIVER_ERROR in str(error)
