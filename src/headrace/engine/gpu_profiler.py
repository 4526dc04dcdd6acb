"""Seconds of a step by class on a GPU: marks between the kernels, in a captured graph, too.

A kernel that notes the GPU's clock is launched behind every operation (``ops.measure.Marks``). Where steps
are replayed from graphs, one step in ``EVERY`` replays a second recording of the same step with the marks
in it; the others run the product's own graph and are what a step takes.

Steps that run ahead of the host (``engine.flights``) hide what it does meanwhile. Its classes then have the
seconds for which the GPU waited: from one result to the next, less the GPU's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.step import ClassStats, MovedBytes, ScheduledChunk, StepPlan
from headrace.engine.decode_graphs import DecodeGraphs, StepResult, Work
from headrace.engine.profiler import RANGE_CLASSES, StepProfiler, rows_of
from headrace.explain import leaf
from headrace.machine.device import Device, Graph
from headrace.machine.readback import ReadBack
from headrace.ops.measure import Marks

# Of the replayed steps one is slowed down by its marks, the seventh one first: after a bracket that counts.
# SmolLM2's has 244 marks and takes 1.2 ms longer than the others' 0.9, with the filing of what they say; one
# step in 64 were 2% of it (H200, 2026-11-30).
EVERY, FIRST = 256, 6
# Some of the others have two marks, around all of the GPU's work: what is left is the host's. Reading them
# costs 0.08 ms: one in eight was 1.2% of SmolLM2's step.
BRACKETS, FIRST_BRACKET, KEPT = 32, 4, 16
# A mark costs so much of what it does in a chain of small kernels: others overlap without it, or hide it.
LEAST, MOST = 0.5, 2.5
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
# Host ranges within which the GPU works; of a launched step the first only starts it.
LAUNCHING, WAITING = "decoder", ("logits", "sampler")
COMPUTING = (LAUNCHING, *WAITING)
NANO = 1e9

Mode = Literal["plain", "marked", "bracket", "eager"]
Recording = tuple[Graph, StepResult]


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


@dataclass
class _Recorded:
    """One size's other recordings: with every mark, and with the first and the last one only.

    names: classes of the marks, each once; places: of each mark's among them.
    """

    marked: Recording
    names: list[str]
    places: npt.NDArray[np.intp]
    bracket: Recording
    spans_s: list[float] = field(default_factory=list[float])  # of the brackets, newest last


@dataclass(frozen=True)
class _Turn:
    """How a step is watched; of which size its graph is, 0 without one."""

    mode: Mode
    size: int


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
        self._recorded: dict[int, _Recorded] = {}
        self._labels: list[str] = []
        self._replays = 0
        self._swapped: tuple[int, Recording] | None = None
        self._entered = False
        self._turn = _Turn("plain", 0)
        self._flying: deque[_Turn] = deque()  # launched and not taken, the oldest first
        self._stamps = ReadBack(device, 2, torch.int64)
        self._mark_s = 0.0
        self.samples = graphs is not None

    def start(self) -> None:
        """Watch from now on."""
        self._replays = 0
        self._flying.clear()
        self._stamps = ReadBack(self._device, 2, torch.int64)
        if self._graphs is not None and not self._mark_s:
            self._mark_s = mark_seconds(self._device, self._marks)

    def stop(self) -> None:
        """Leave the operations and graphs alone."""
        self._device.synchronize()  # one of the recordings may still be on its way
        self._leave()
        self._recorded.clear()

    def can_launch(self, chunks: Sequence[ScheduledChunk], *, ahead: bool) -> bool:
        """See ``StepProfiler``. What is not recorded yet is not recorded beside a step."""
        turn = self._next_turn(chunks)
        if turn.mode == "eager":
            return False
        return not ahead or turn.mode == "plain" or turn.size in self._recorded

    def _next_turn(self, chunks: Sequence[ScheduledChunk]) -> _Turn:
        graphs, rows = self._graphs, len(chunks)
        single = all(len(chunk.token_ids) == 1 for chunk in chunks)
        if graphs is None or not single or rows > graphs.max_batch:
            return _Turn("eager", 0)
        turn, size = self._replays % EVERY, graphs.size_of(rows)
        if turn == FIRST:
            return _Turn("marked", size)
        if self._replays == 0 or turn % BRACKETS == FIRST_BRACKET:
            return _Turn("bracket", size)
        return _Turn("plain", size)

    def begins(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Mark this step, if it is its turn."""
        self._leave()
        graphs, self._turn = self._graphs, self._next_turn(chunks)
        mode, size = self._turn.mode, self._turn.size
        if graphs is None or mode == "eager":
            self._enter()
            self._labels = []
            self._marks.begin()
            return
        self._replays += 1
        if mode == "plain":
            return
        if size not in self._recorded:
            self._record(graphs, size)
        found = self._recorded[size]
        self._labels = []  # replays say nothing; a device that runs the work again does
        recording = found.marked if mode == "marked" else found.bracket
        self._swapped = size, graphs.swap(size, recording)

    def launched(self) -> None:
        """See ``StepProfiler``: the marks follow the step to the host."""
        self._leave()
        turn = self._turn
        self._flying.append(turn)
        if turn.mode == "plain":
            return
        count = len(self._recorded[turn.size].places) if turn.mode == "marked" else 1
        with torch.inference_mode():
            self._stamps.post(self._marks.stamps(count))

    def _record(self, graphs: DecodeGraphs, size: int) -> None:
        labels = self._labels = list[str]()

        def bracket(work: Work) -> Work:
            def bracketed() -> tuple[torch.Tensor, ...]:
                labels.clear()
                self._marks.begin()
                outputs = work()
                if not self._entered:  # else the choice of tokens, which comes last, has its mark
                    self._mark(leaf.SAMPLING)
                return outputs

            return bracketed

        def every(work: Work) -> Work:
            def marked() -> tuple[torch.Tensor, ...]:
                self._enter()  # in the recorded work: a replay on a GPU calls no operation
                try:
                    return bracket(work)()
                finally:
                    self._unmark()

            return marked

        marked = graphs.record(size, every)
        names = list(dict.fromkeys(labels))
        places = np.array([names.index(label) for label in labels])
        self._wake()
        self._recorded[size] = _Recorded(marked, names, places, graphs.record(size, bracket))
        if len(places) >= self._stamps.numel:
            self._stamps = ReadBack(self._device, len(places) + 1, torch.int64)
        # A recording's first replay starts slowly (2.6 ms instead of 1.3, SmolLM2, H200): let it be one of
        # nobody's row, as those that capturing has run.
        for graph, _ in (marked, self._recorded[size].bracket):
            self._wake()
            with torch.inference_mode():
                graph.replay()
            self._device.synchronize()
        self._wake()

    def _wake(self) -> None:
        """A capture takes about as long as the CPU's experts stay awake without work."""
        if self._executor is not None:
            self._executor.step_begins(1)

    def _enter(self) -> None:
        self._entered = True
        self.ops.mark(lambda name, args, part: self._mark(self.class_of(name, args, part)))
        self.decoder.watch_mixtures(lambda: self._mark(leaf.EXPERTS_GPU))
        if self._executor is not None:
            self._executor.paths = _MarkedPaths(self._executor.paths, self._mark)

    def _leave(self) -> None:
        if self._swapped is not None and self._graphs is not None:
            self._graphs.swap(*self._swapped)
        self._swapped = None
        self._unmark()

    def _unmark(self) -> None:
        if not self._entered:
            return
        self._entered = False
        self.ops.mark(None)
        self.decoder.watch_mixtures(None)
        if self._executor is not None:
            self._executor.paths = self._executor.paths._paths

    def _mark(self, label: str) -> None:
        self._labels.append(label)
        self._marks.point()

    def take(self, plan: StepPlan, ranges: dict[str, float]) -> tuple[ClassStats, ...]:
        """The classes of the step that has just run; those of the GPU only where it was marked."""
        turn, mode = self._turn, self._turn.mode
        self._leave()
        self.slowed = mode == "marked"
        host = {n: s for n, s in ranges.items() if n not in COMPUTING}
        waited = sum(ranges.get(name, 0.0) for name in COMPUTING)
        if mode == "eager":
            times = self._marks.seconds(len(self._labels))
            for label, seconds in zip(self._labels, times):
                self._add(label, 1, seconds)
            # What the host needs to start the GPU's work and to fetch its result.
            self._add(leaf.LAUNCHES, 1, max(waited - sum(times), 0.0))
        elif mode == "marked":
            found = self._recorded[turn.size]
            self._add_marked(np.array(self._marks.seconds(len(found.places))), found)
        elif mode == "bracket":
            span = self._bracketed(self._marks.seconds(1)[0], turn.size)
            self._add(leaf.LAUNCHES, 1, max(waited - span, 0.0))
        if mode in ("eager", "marked"):
            return super().take(plan, host)
        return self._host_classes(plan, host)

    def take_launched(
        self, plan: StepPlan, ranges: dict[str, float], elapsed_s: float
    ) -> tuple[ClassStats, ...]:
        """See ``StepProfiler``. How long the GPU worked is known of this step, or of those like it."""
        turn = self._flying.popleft()
        self.slowed = turn.mode == "marked"
        busy_s = None
        if turn.mode != "plain":
            stamps: Any = self._stamps.take()
            times: npt.NDArray[np.float64] = np.diff(stamps.numpy()) / NANO
            busy_s = float(times.sum())
            if turn.mode == "marked":
                self._add_marked(times, self._recorded[turn.size])
            else:
                self._bracketed(busy_s, turn.size)
        elif turn.size in self._recorded and self._recorded[turn.size].spans_s:
            busy_s = median(self._recorded[turn.size].spans_s)
        host = {n: s for n, s in ranges.items() if n not in WAITING}
        if busy_s is not None:
            host = self._exposed(host, max(elapsed_s - busy_s, 0.0))
        launching = host.pop(LAUNCHING, 0.0)
        if busy_s is not None:
            self._add(leaf.LAUNCHES, 1, launching)
        if turn.mode == "marked":
            return super().take(plan, host)
        return self._host_classes(plan, host)

    @staticmethod
    def _exposed(host: dict[str, float], exposed_s: float) -> dict[str, float]:
        """The host's seconds by range, as many as were not hidden; what is more than the host's own is of
        starting the GPU and of hearing from it."""
        total = sum(host.values())
        share = min(exposed_s / total, 1.0) if total else 0.0
        found = {name: seconds * share for name, seconds in host.items()}
        found[LAUNCHING] = found.get(LAUNCHING, 0.0) + max(exposed_s - total, 0.0)
        return found

    def _add_marked(self, times: npt.NDArray[np.float64], found: _Recorded) -> None:
        times = np.maximum(times - self._cost_of_a_mark(float(times.sum()), found), 0.0)
        if self._executor is None and found.spans_s and times.any():
            # Marks keep small kernels from overlapping by more than is taken off: SmolLM2's classes were 6 to
            # 8 % more than its steps (H200, 2026-11-30). They tell the shares, the brackets what is shared.
            times *= min(median(found.spans_s) / float(times.sum()), 1.0)
        sums = np.bincount(found.places, times).tolist()
        for label, count, seconds in zip(found.names, np.bincount(found.places).tolist(), sums):
            self._add(label, count, seconds)

    def _bracketed(self, span_s: float, size: int) -> float:
        found = self._recorded[size]
        found.spans_s.append(span_s)
        del found.spans_s[:-KEPT]
        return span_s

    def _host_classes(self, plan: StepPlan, ranges: dict[str, float]) -> tuple[ClassStats, ...]:
        """Without what costs time to work out: every step of a server would pay for it."""
        for name, seconds in ranges.items():
            if name in RANGE_CLASSES:
                self._add(RANGE_CLASSES[name], 1, seconds)
        self.rows = rows_of(plan)
        none = MovedBytes()
        return tuple(ClassStats(i, calls, 0, none, s) for i, (calls, s) in self.classes().items())

    def _cost_of_a_mark(self, total_s: float, found: _Recorded) -> float:
        """What a mark took in this step: its kernel, and the overlap of those before and behind it.

        The whole difference to steps without them, as far as that is what marks can cost; steps whose
        experts are fetched differ for other reasons, too.
        """
        if not found.spans_s:
            return self._mark_s
        each = (total_s - median(found.spans_s)) / len(found.places)
        return min(max(each, LEAST * self._mark_s), MOST * self._mark_s)
