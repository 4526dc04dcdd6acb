"""Seconds of a step by class on a GPU: marks between the kernels, in a captured graph, too.

A kernel that notes the GPU's clock is launched behind every operation (``ops.measure.Marks``). Where steps
are replayed from graphs, one step in ``EVERY`` replays a second recording of the same step with the marks
in it; the others run the product's own graph and are what a step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.core.step import ClassStats, ScheduledChunk, StepPlan
from headrace.engine.decode_graphs import DecodeGraphs, StepResult, Work
from headrace.engine.profiler import StepProfiler
from headrace.explain import leaf
from headrace.machine.device import Device, Graph
from headrace.ops.measure import Marks

# Of the replayed steps one is slowed down by its marks, the third one first, when threads are awake and pages
# touched. SmolLM2's has 244 marks of 1.0 us in 0.9 ms (H200, 2026-11-30): one step in 24 costs 1.1%.
EVERY, FIRST = 24, 2
CHAIN = 200  # marks of the graph that shows what one costs; the shortest of RUNS replays
RUNS = 5
# What the executor's paths do, by class; ``waited``: for fetches, before what they brought is computed.
PATHS = {
    "begin_step": leaf.ROUTER,
    "prepare": leaf.ROUTER,
    "plan": leaf.ROUTER,
    "hits": leaf.EXPERTS_GPU,
    "fetched": leaf.EXPERTS_GPU,
    "await_cpu": leaf.EXPERTS_CPU,
    "combine": leaf.EXPERTS_GPU,
}
WAITS = {"fetched": leaf.EXPERT_FETCH}
# Host ranges within which the GPU works.
COMPUTING = ("decoder", "logits", "sampler")


def mark_seconds(device: Device, marks: Marks) -> float:
    """What one mark adds to a graph: a chain of small kernels with and without marks between them.

    More than a kernel's start alone, since a kernel of another kind follows.
    """
    word = torch.zeros(1, device=device.torch_device)

    def best(between: bool) -> float:
        graph = device.graph()

        def work() -> tuple[torch.Tensor, ...]:
            marks.begin()
            for _ in range(CHAIN):
                word.add_(1.0)
                if between:
                    marks.point()
            if not between:
                marks.point()
            return ()

        graph.capture(work)
        times: list[float] = []
        for _ in range(RUNS):
            graph.replay()
            times.append(sum(marks.seconds(CHAIN if between else 1)))
        return min(times)

    with torch.inference_mode():
        return max(best(True) - best(False), 0.0) / CHAIN


class _MarkedPaths:
    """An executor's paths with a mark behind each of their launches."""

    def __init__(self, paths: Any, mark: Callable[[str], None]) -> None:
        self._paths, self._mark = paths, mark

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._paths, name)
        if name not in PATHS:
            return found

        def marked(*args: Any) -> Any:
            if name in WAITS:
                self._mark(WAITS[name])
            result = found(*args)
            self._mark(PATHS[name])
            return result

        return marked


class GpuStepProfiler(StepProfiler):
    """See ``StepProfiler``.

    Args:
        marks: of the device.
        graphs: that replay decoding steps, if any do.
        executor: of experts that lie in host memory, if there is one (``experts.executor``).
    """

    def __init__(
        self,
        decoder: object,
        kv_format: str,
        block_tokens: int,
        marks: Marks,
        graphs: DecodeGraphs | None,
        executor: Any = None,
        *,
        device: Device,
    ) -> None:
        super().__init__(decoder, kv_format, block_tokens)
        self._device = device
        self._marks, self._graphs, self._executor = marks, graphs, executor
        self._recorded: dict[int, tuple[Graph, StepResult, list[str]]] = {}
        self._labels: list[str] = []
        self._replays = 0
        self._swapped: tuple[int, tuple[Graph, StepResult]] | None = None
        self._marking = False
        self._mark_s = 0.0
        self.samples = graphs is not None

    def start(self) -> None:
        """Watch from now on."""
        self._replays = 0
        if self._graphs is not None and not self._mark_s:
            self._mark_s = mark_seconds(self._device, self._marks)

    def stop(self) -> None:
        """Leave the operations and graphs alone."""
        self._leave()
        self._recorded.clear()

    def begins(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Mark this step, if it is its turn."""
        self._leave()
        graphs, rows = self._graphs, len(chunks)
        single = all(len(chunk.token_ids) == 1 for chunk in chunks)
        if graphs is None or not single or rows > graphs.max_batch:
            self._enter()
            self._labels = []
            self._marks.begin()
            return
        if self._replays % EVERY == FIRST:
            self._enter()
            size = graphs.size_of(rows)
            if size not in self._recorded:
                self._record(graphs, size)
            graph, result, self._labels = self._recorded[size]
            self._swapped = size, graphs.swap(size, (graph, result))
        self._replays += 1

    def _record(self, graphs: DecodeGraphs, size: int) -> None:
        labels = self._labels = list[str]()

        def around(work: Work) -> Work:
            def marked() -> tuple[torch.Tensor, ...]:
                labels.clear()
                self._marks.begin()
                outputs = work()
                self._mark(leaf.SAMPLING)
                return outputs

            return marked

        graph, result = graphs.record(size, around)
        self._recorded[size] = graph, result, labels

    def _enter(self) -> None:
        self._marking = True
        self.ops.mark(lambda name, args, part: self._mark(self.class_of(name, args, part)))
        self.decoder.watch_mixtures(lambda: self._mark(leaf.EXPERTS_GPU))
        if self._executor is not None:
            self._executor.paths = _MarkedPaths(self._executor.paths, self._mark)

    def _leave(self) -> None:
        if not self._marking:
            return
        self._marking = False
        self.ops.mark(None)
        self.decoder.watch_mixtures(None)
        if self._executor is not None:
            self._executor.paths = self._executor.paths._paths
        if self._swapped is not None and self._graphs is not None:
            self._graphs.swap(*self._swapped)
        self._swapped = None

    def _mark(self, label: str) -> None:
        self._labels.append(label)
        self._marks.point()

    def take(self, plan: StepPlan, ranges: dict[str, float]) -> tuple[ClassStats, ...]:
        """The classes of the step that has just run; those of the GPU only where it was marked."""
        self.slowed = self._swapped is not None
        marked, cost_s = self._marking, self._mark_s if self.slowed else 0.0
        self._leave()
        if marked:
            times = self._marks.seconds(len(self._labels))
            for label, seconds in zip(self._labels, times):
                self._add(label, max(seconds - cost_s, 0.0))
            # What the host needs to start the GPU's work and to fetch its result.
            waiting = sum(ranges.get(name, 0.0) for name in COMPUTING) - sum(times)
            self._add(leaf.LAUNCHES, max(waiting, 0.0))
        return super().take(plan, {n: s for n, s in ranges.items() if n not in COMPUTING})
