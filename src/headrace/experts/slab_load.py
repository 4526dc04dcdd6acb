"""Filling slabs from a checkpoint, by many threads at once, with the time of each part of the work.

A thread takes one expert after another: it makes the slab's pages exist (*first touch*), brings the
expert's bytes from the file into memory (*read*) and copies them (*repack*). NumPy and the kernel
give up the interpreter lock for all three.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from headrace.experts.slab import SlabLayout
from headrace.experts.slab_pack import write_slab
from headrace.formats.base import PackedTensor
from headrace.machine.pages import PAGE_NBYTES, address_of, touch_for_reading, touch_for_writing
from headrace.ops.records import ExpertWeights

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str, float], None]
Task = tuple[int, Callable[[], None]]  # the layer it belongs to, and the work


@dataclass
class LoadTimes:
    """Where the time of a load went.

    ``thread_s``: seconds by part (``read``, ``repack``, ``first_touch``, ``write`` summed over all
    threads; ``pin`` of the calling thread, beside the others). Divided by ``threads`` a sum is the
    part's share of the wall clock.
    """

    threads: int = 1
    total_s: float = 0.0
    nbytes: int = 0
    thread_s: dict[str, float] = field(default_factory=dict[str, float])
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def timing(self, part: str) -> Generator[None, None, None]:
        """Add the time of the block to a part; from any thread."""
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        with self._lock:
            self.thread_s[part] = self.thread_s.get(part, 0.0) + spent

    def count(self, nbytes: int) -> None:
        """Add to the bytes of slabs that were filled; from any thread."""
        with self._lock:
            self.nbytes += nbytes

    def wall_s(self, part: str) -> float:
        """The part's share of the wall clock."""
        return self.thread_s.get(part, 0.0) / (1 if part == "pin" else self.threads)

    def describe(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{name} {self.wall_s(name):.2f} s" for name in sorted(self.thread_s))
        rate = self.nbytes / self.total_s / 1e9 if self.total_s else 0.0
        return (
            f"{self.nbytes / 1e9:.1f} GB in {self.total_s:.2f} s ({rate:.1f} GB/s, {self.threads} "
            f"threads): {parts}"
        )


class Loader:
    """Fills slabs with ``threads`` threads and reports progress on the calling one."""

    def __init__(self, layout: SlabLayout, threads: int, progress: Progress | None = None) -> None:
        self.layout = layout
        self.times = LoadTimes(threads=threads)
        self._progress = progress
        self._start = time.perf_counter()

    def repack(
        self,
        layers: Sequence[ExpertWeights],
        tensors: Sequence[torch.Tensor],
        done: Callable[[int], None],
    ) -> None:
        """Fill ``tensors[layer]``, uint8 [experts, slices, slice_nbytes]; ``done`` after each layer."""

        def work(layer: int, expert: int) -> None:
            slab = tensors[layer][expert]
            with self.times.timing("first_touch"):
                touch_for_writing(slab.data_ptr(), slab.numel())
            self._pack(layers[layer], expert, slab)

        self._run("repacking experts", _every(tensors, work), done)

    def copy(
        self,
        sources: Sequence[Bytes],
        tensors: Sequence[torch.Tensor],
        done: Callable[[int], None],
    ) -> None:
        """Fill ``tensors[layer]`` from slabs that are there already, such as a slab file's."""
        nbytes = self.layout.slab_nbytes

        def work(layer: int, expert: int) -> None:
            slab = tensors[layer][expert].view(-1).numpy()
            source = sources[layer][expert * nbytes : (expert + 1) * nbytes]
            with self.times.timing("first_touch"):
                touch_for_writing(address_of(slab), nbytes)
            with self.times.timing("read"):
                touch_for_reading(address_of(source), nbytes)
            with self.times.timing("repack"):
                slab[:] = source
            self.times.count(nbytes)

        self._run("copying experts", _every(tensors, work), done)

    def write(
        self, layers: Sequence[ExpertWeights], sink: Callable[[int, int, Bytes], None]
    ) -> None:
        """Give every slab to ``sink(layer, expert, bytes)``, which is called from many threads."""
        own = threading.local()

        def work(layer: int, expert: int) -> None:
            slab: torch.Tensor | None = getattr(own, "slab", None)
            if slab is None:
                shape = (self.layout.num_slices, self.layout.slice_nbytes)
                slab = own.slab = torch.zeros(shape, dtype=torch.uint8)
            self._pack(layers[layer], expert, slab)
            with self.times.timing("write"):
                sink(layer, expert, slab.view(-1).numpy())

        tasks = ((i, e) for i, layer in enumerate(layers) for e in range(len(layer.gate)))
        work_list = [(i, lambda i=i, e=e: work(i, e)) for i, e in tasks]
        self._run("writing the slab file", work_list, lambda layer: None)

    def finish(self) -> LoadTimes:
        """The times, from the making of this loader to now."""
        self.times.total_s = time.perf_counter() - self._start
        return self.times

    def _pack(self, experts: ExpertWeights, expert: int, slab: torch.Tensor) -> None:
        with self.times.timing("read"):
            for address, nbytes in source_ranges(experts, expert):
                touch_for_reading(address, nbytes)
        with self.times.timing("repack"):
            write_slab(experts, expert, self.layout, slab)
        self.times.count(self.layout.slab_nbytes)

    def _run(self, stage: str, tasks: Sequence[Task], done: Callable[[int], None]) -> None:
        left = Counter(layer for layer, _ in tasks)
        pool = ThreadPoolExecutor(self.times.threads, thread_name_prefix="expert-load")
        try:
            running: dict[Future[None], int] = {pool.submit(task): at for at, task in tasks}
            for number, future in enumerate(as_completed(running), start=1):
                future.result()
                layer = running[future]
                left[layer] -= 1
                if not left[layer]:
                    done(layer)
                if self._progress is not None:
                    self._progress(stage, number / len(tasks))
        finally:
            pool.shutdown(cancel_futures=True)


def source_ranges(experts: ExpertWeights, index: int) -> list[tuple[int, int]]:
    """Where one expert's matrices lie in memory: addresses and bytes, overlapping ranges joined.

    Interleaved gate and up are two views of one range. What is smaller than a page is left out.
    """
    found: list[tuple[int, int]] = []
    for matrix in (experts.gate[index], experts.up[index], experts.down[index]):
        found += _ranges(matrix)
    joined: list[tuple[int, int]] = []
    for start, nbytes in sorted(found):
        if joined and start <= joined[-1][0] + joined[-1][1]:
            first, size = joined[-1]
            joined[-1] = (first, max(size, start + nbytes - first))
        else:
            joined.append((start, nbytes))
    return joined


def _ranges(matrix: PackedTensor) -> Iterable[tuple[int, int]]:
    for part in matrix.parts.values():
        if part.ndim == 2:
            rows, cols = part.shape
            nbytes = ((rows - 1) * part.stride(0) + cols) * part.element_size()
            if nbytes >= PAGE_NBYTES:
                yield part.data_ptr(), nbytes


def _every(tensors: Sequence[torch.Tensor], work: Callable[[int, int], None]) -> list[Task]:
    return [
        (layer, lambda layer=layer, expert=expert: work(layer, expert))
        for layer, tensor in enumerate(tensors)
        for expert in range(tensor.shape[0])
    ]
