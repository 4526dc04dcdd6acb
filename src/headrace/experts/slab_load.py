"""Filling slabs from a checkpoint, by many threads at once, with the time of each part of the work.

A thread takes one expert after another: it asks for an expert further on to be read in the background,
makes the slab's pages exist (*first touch*), waits for its own expert's bytes (*read*) and copies them
(*repack*). NumPy and the kernel give up the interpreter lock for all three.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from headrace.experts.slab import SlabLayout
from headrace.experts.slab_pack import write_slab
from headrace.formats.base import PackedTensor
from headrace.machine.pages import (
    PAGE_NBYTES,
    address_of,
    touch_for_reading,
    touch_for_writing,
    will_need,
)
from headrace.ops.records import ExpertWeights

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str, float], None]
# Experts that each thread lets the disk read ahead: 13 MB each for gpt-oss, so that requests of all
# threads together keep an SSD's queue full while they copy.
_AHEAD = 2


@dataclass
class LoadTimes:
    """Where the time of a load went.

    ``thread_s``: seconds by part (``read``, ``repack``, ``first_touch``, ``write`` summed over all
    threads; ``pin`` and ``random`` by the clock). Divided by ``threads`` a sum is the
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
        by_clock = part in ("pin", "random")
        return self.thread_s.get(part, 0.0) / (1 if by_clock else self.threads)

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

    def __init__(
        self, layouts: Sequence[SlabLayout], threads: int, progress: Progress | None = None
    ) -> None:
        """layouts: of each layer."""
        self.layouts = tuple(layouts)
        self.times = LoadTimes(threads=threads)
        self._progress = progress
        self._start = time.perf_counter()

    def repack(
        self,
        layers: Sequence[ExpertWeights],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Fill ``tensors[layer]``, uint8 [experts, slices, slice_nbytes]."""

        ahead = self._reader([(i, e) for i, t in enumerate(tensors) for e in range(len(t))], layers)

        def work(layer: int, expert: int) -> None:
            ahead(layer, expert)
            slab = tensors[layer][expert]
            with self.times.timing("first_touch"):
                touch_for_writing(slab.data_ptr(), slab.numel())
            self._pack(layer, layers[layer], expert, slab)

        self._run("repacking experts", _every(tensors, work))

    def copy(
        self,
        sources: Sequence[Bytes],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Fill ``tensors[layer]`` from slabs that are there already, such as a slab file's."""

        def work(layer: int, expert: int) -> None:
            nbytes = self.layouts[layer].slab_nbytes
            slab = tensors[layer][expert].view(-1).numpy()
            source = sources[layer][expert * nbytes : (expert + 1) * nbytes]
            with self.times.timing("first_touch"):
                touch_for_writing(address_of(slab), nbytes)
            with self.times.timing("read"):
                will_need(address_of(source), nbytes)
                touch_for_reading(address_of(source), nbytes)
            with self.times.timing("repack"):
                slab[:] = source
            self.times.count(nbytes)

        self._run("copying experts", _every(tensors, work))

    def write(
        self, layers: Sequence[ExpertWeights], sink: Callable[[int, int, Bytes], None]
    ) -> None:
        """Give every slab to ``sink(layer, expert, bytes)``, which is called from many threads."""
        own = threading.local()
        tasks = [(i, e) for i, layer in enumerate(layers) for e in range(len(layer.gate))]
        ahead = self._reader(tasks, layers)

        def work(layer: int, expert: int) -> None:
            ahead(layer, expert)
            layout = self.layouts[layer]
            slab: torch.Tensor | None = getattr(own, "slab", None)
            if slab is None or slab.shape[1] != layout.slice_nbytes:
                shape = (layout.num_slices, layout.slice_nbytes)
                slab = own.slab = torch.zeros(shape, dtype=torch.uint8)
            self._pack(layer, layers[layer], expert, slab)
            with self.times.timing("write"):
                sink(layer, expert, slab.view(-1).numpy())

        work_list = [partial(work, i, e) for i, e in tasks]
        self._run("writing the slab file", work_list)

    def finish(self) -> LoadTimes:
        """The times, from the making of this loader to now."""
        self.times.total_s = time.perf_counter() - self._start
        return self.times

    def _reader(
        self, tasks: Sequence[tuple[int, int]], layers: Sequence[ExpertWeights]
    ) -> Callable[[int, int], None]:
        """What asks for the expert that is ``_AHEAD`` turns of all threads after (layer, expert)."""
        distance = _AHEAD * self.times.threads
        place = {task: number for number, task in enumerate(tasks)}

        def ahead(layer: int, expert: int) -> None:
            number = place[layer, expert]
            first = number + distance
            wanted = tasks[first : first + 1] if number else tasks[: first + 1]
            with self.times.timing("read"):
                for at, e in wanted:
                    for address, nbytes in source_ranges(layers[at], e):
                        will_need(address, nbytes)

        return ahead

    def _pack(self, layer: int, experts: ExpertWeights, expert: int, slab: torch.Tensor) -> None:
        with self.times.timing("read"):
            for address, nbytes in source_ranges(experts, expert):
                touch_for_reading(address, nbytes)
        with self.times.timing("repack"):
            write_slab(experts, expert, self.layouts[layer], slab)
        self.times.count(self.layouts[layer].slab_nbytes)

    def report(self, stage: str, fraction: float) -> None:
        """Tell whoever watches, on the calling thread."""
        if self._progress is not None:
            self._progress(stage, fraction)

    def _run(self, stage: str, tasks: Sequence[Callable[[], None]]) -> None:
        pool = ThreadPoolExecutor(self.times.threads, thread_name_prefix="expert-load")
        try:
            running = [pool.submit(task) for task in tasks]
            for number, future in enumerate(as_completed(running), start=1):
                future.result()
                self.report(stage, number / len(tasks))
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


def _every(
    tensors: Sequence[torch.Tensor], work: Callable[[int, int], None]
) -> list[Callable[[], None]]:
    return [
        partial(work, layer, expert)
        for layer, tensor in enumerate(tensors)
        for expert in range(tensor.shape[0])
    ]
