"""Seconds that this engine's kernels take on a GPU, one after another in a captured graph, as in a step.

On matrices and caches of a model's shapes, but nobody's: ``explain.kernel_rates`` predicts steps from them.
Everything is read cold: each call has data of its own, and the GPU's cache is filled with other data before
each run. (A norm whose 2 KB of weights were in the cache took 1.4 us instead of 1.9, H200, 2026-11-30.) Times
are the GPU's own, of a graph of many calls, so that they hold what a kernel costs beside its bytes: its
start, its tail, the fill of the memory's pipeline. The shortest of several runs counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headrace.core.errors import InternalError
from headrace.core.step import ScheduledChunk
from headrace.engine.batch import build_batch
from headrace.engine.gpu_profiler import mark_seconds
from headrace.engine.stand_in import packed
from headrace.engine.this_machine import measured_rate
from headrace.explain import leaf
from headrace.explain.gpu_kernel_rates import ATTENTION_POINTS, FEW_ROWS
from headrace.explain.running_cost import MATRICES, RunningModel, Stored, rate_name
from headrace.formats.base import PackedTensor
from headrace.formats.planes import in_planes
from headrace.kv.storage import DTYPES
from headrace.machine.device import Device, Graph
from headrace.machine.profile import Rate
from headrace.ops.measure import Marks, step_marks
from headrace.ops.records import (
    GREEDY_RULE,
    Activation,
    AttentionBatch,
    AttentionBlock,
    DenseBlock,
    LayerKV,
    RopeTable,
)
from headrace.ops.registry import BLOCKS, OpSet

COLD_NBYTES = 128 << 20  # more than twice the 50 MB of an H200's L2 cache
LARGEST_NBYTES = 256 << 20  # of one matrix: of larger ones fewer rows are taken, at the same rate
MANY = 2048  # rows of a prompt's part
HEAD_ROWS = 64  # of logits
PROMPT_TOKENS = 8192  # that its last rows attend to
CALLS = 48  # of one graph at least, so that what it costs itself does not count
RUNS = 5
_HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


class GpuProbe:
    """Times calls on one device.

    Args:
        make_marks: of the device.
        cold_nbytes: what turns go over; tests take less.
    """

    def __init__(
        self,
        device: Device,
        ops: OpSet,
        model: RunningModel,
        *,
        make_marks: Callable[[torch.device], Marks] = step_marks,
        cold_nbytes: int = COLD_NBYTES,
    ) -> None:
        self._device, self._ops, self._model = device, ops, model
        self._marks = make_marks(device.torch_device)
        self._cold = cold_nbytes
        self._biases: dict[int, torch.Tensor] = {}
        self._counters = torch.zeros(FEW_ROWS, dtype=torch.int32, device=device.torch_device)
        self._other = torch.zeros(cold_nbytes, dtype=torch.uint8, device=device.torch_device)

    def rates(self) -> dict[str, Rate]:
        """Every rate by name; see ``explain.kernel_rates``."""
        with torch.inference_mode():
            found = self._rows()
            found |= self._matrices(found)
            if self._model.kv_format in DTYPES:
                found |= self._attention()
        return found

    # ---- timing ---------------------------------------------------------------------------------

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Seconds of one call: of a graph of all of them in turns, the shortest of a few runs."""
        count = max(CALLS, len(calls))
        graph = self._device.graph()

        def work() -> tuple[torch.Tensor, ...]:
            self._marks.begin()
            for index in range(count):
                calls[index % len(calls)]()
            self._marks.point()
            return ()

        graph.capture(work)
        return min(self._cold_run(graph, 1)[0] for _ in range(RUNS)) / count

    def _cold_run(self, graph: Graph, intervals: int) -> list[float]:
        """Seconds between the graph's marks, replayed while the cache holds something else."""
        self._other.add_(1)
        graph.replay()
        return self._marks.seconds(intervals)

    def _turns(self, nbytes: float) -> int:
        """Copies of data of a call: one for each of ``CALLS``, within the memory that caches hold."""
        return max(1, min(CALLS, int(self._cold // max(nbytes, 1)) + 1))

    def _ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, device=self._device.torch_device)

    # ---- products -------------------------------------------------------------------------------

    def _matrices(self, known: Mapping[str, Rate]) -> dict[str, Rate]:
        found: dict[str, Rate] = {}
        for ident, kinds in MATRICES.items():
            stored = [self._model.matrices[k] for k in kinds if k in self._model.matrices]
            if not stored or ident in (leaf.EMBED, leaf.EXPERTS_GPU):
                continue
            shapes = [_fewer_rows(s, LARGEST_NBYTES) for s in stored]
            sets = [self._set(shapes) for _ in range(self._turns(_nbytes(self._set(shapes))))]
            nbytes, elements = _nbytes(sets[0]), sum(w.rows * w.cols for w in sets[0])
            cols, name = shapes[0].cols, rate_name(ident)
            how = ", ".join(f"{s.format} {s.rows:,} x {s.cols:,}" for s in shapes)
            row = self._ones(1, cols, dtype=_row_dtype(ident, shapes))
            calls = [partial(self._product, ident, row, w) for w in sets]
            if ident == leaf.DENSE_FFN and row.dtype != torch.float32:
                one = self._dense_s(cols, sets) - known["call_rmsnorm"].value
            else:
                one = self.seconds(calls)
            if (
                shapes != stored
            ):  # a larger one's tail is the same, and its bytes go on at the same rate
                nbytes, one = self._whole(ident, stored, row, (nbytes, one))
            count = HEAD_ROWS if ident == leaf.LM_HEAD else MANY
            rows = self._ones(count, cols)
            many = self.seconds([partial(self._product, ident, rows, w) for w in sets[:4]])
            found[f"kernel_one_{name}"] = measured_rate(
                nbytes / one / 1e9, "GB/s", f"{how}, one row, in a graph, cold"
            )
            found[f"kernel_many_{name}"] = measured_rate(
                2 * count * elements / many / 1e9, "GFLOP/s", f"{how}, {count:,} rows"
            )
        return found

    def _bias(self, rows: int) -> torch.Tensor:
        """The same each time: a graph refers to it."""
        if rows not in self._biases:
            self._biases[rows] = self._ones(rows)
        return self._biases[rows]

    def _dense_s(self, hidden: int, sets: Sequence[Sequence[PackedTensor]]) -> float:
        """Seconds of a layer's half, which rounds what its kernels pass on to each other, with its norm."""
        if not self._ops.has("dense_block"):
            raise InternalError("a device with kernels for 16 bits has no block of them")
        x, norm = self._ones(1, hidden), self._ones(hidden)
        blocks = [DenseBlock(norm, 1e-5, w[0], w[1], w[2], Activation()) for w in sets]
        return self.seconds([partial(self._ops.dense_block, x, b) for b in blocks])

    def _whole(
        self, ident: str, stored: Sequence[Stored], row: torch.Tensor, most: tuple[float, float]
    ) -> tuple[float, float]:
        """Bytes and seconds of matrices that are too large to try, from ``most`` and from half of it."""
        half = self._set([_fewer_rows(s, LARGEST_NBYTES // 2) for s in stored])
        seconds = self.seconds([partial(self._product, ident, row, half)])
        slope = (most[1] - seconds) / (most[0] - _nbytes(half))
        nbytes = sum(s.nbytes / s.count for s in stored)
        return nbytes, most[1] + max(slope, 0.0) * (nbytes - most[0])

    def _set(self, shapes: Sequence[Stored]) -> list[PackedTensor]:
        device = self._device.torch_device
        return [_matrix(s, device) for s in shapes]

    def _product(self, ident: str, x: torch.Tensor, weights: Sequence[PackedTensor]) -> object:
        ops = self._ops
        if ident == leaf.QKV:
            return ops.linear_group(x, weights, [None] * len(weights))
        if ident == leaf.DENSE_FFN:
            inner = ops.gated_linear(x, weights[0], weights[1], Activation())
            return ops.linear(inner.to(x.dtype), weights[2])
        if ident == leaf.ROUTER:
            moe = self._model.spec.moe
            assert moe is not None
            bias, how = self._bias(weights[0].rows), (moe.scoring, moe.normalize)
            if ops.has("route") and x.shape[0] == 1:
                return ops.route(
                    x, weights[0], bias, moe.num_experts_per_token, *how, self._counters
                )
            logits = ops.linear(x, weights[0], bias)
            return ops.router_topk(logits, moe.num_experts_per_token, *how)
        return ops.linear(x, weights[0])

    # ---- rows -----------------------------------------------------------------------------------

    def _rows(self) -> dict[str, Rate]:
        spec, ops = self._model.spec, self._ops
        x, many = self._ones(1, spec.hidden), self._ones(MANY, spec.hidden)
        weights = [self._ones(spec.hidden) for _ in range(CALLS)]
        norm_s = self.seconds([partial(ops.rmsnorm, x, weight, 1e-5) for weight in weights])
        rows_s = self.seconds([lambda: ops.rmsnorm(many, weights[0], 1e-5)])
        logits = self._ones(1, spec.vocab)
        rules = torch.tensor([GREEDY_RULE], dtype=torch.float64, device=logits.device)
        best_s = self.seconds([lambda: ops.sample(logits, rules, self._counters)])
        table = packed("bf16", 64, spec.hidden, self._device.torch_device)
        ids = torch.zeros(1, dtype=torch.int64, device=self._device.torch_device)
        embed_s = self.seconds([lambda: ops.embed(table, ids)])
        how = f"rows of {spec.hidden:,}, in a graph"
        return {
            "call_rmsnorm": measured_rate(norm_s, "s", f"one of the {how}"),
            "call_token_embedding": measured_rate(embed_s, "s", f"one of the {how}"),
            "call_sampling": measured_rate(best_s, "s", f"the best of {spec.vocab:,} logits"),
            "kernel_rows": measured_rate(
                4 * MANY * spec.hidden / rows_s / 1e9, "GFLOP/s", f"RMSNorm of {MANY:,} {how}"
            ),
        }

    # ---- attention ------------------------------------------------------------------------------

    def _attention(self) -> dict[str, Rate]:
        """Seconds of a layer's attention by length, and what turning and writing keys and values takes."""
        spec = self._model.spec
        heads = f"{spec.num_heads}:{spec.num_kv_heads} heads of {spec.head_dim}"
        how = f"{heads}, {self._model.kv_format}, in a graph, cold"
        q = self._ones(1, spec.num_heads, spec.head_dim)
        found: dict[str, Rate] = {}
        points = _points(spec.max_context)
        for tokens in points:
            batch = self._batch(1, tokens)
            calls = [partial(self._decode, q, c, batch) for c in self._caches(tokens)]
            found[f"attention_t{tokens}"] = measured_rate(
                self.seconds(calls), "s", f"{how}, {tokens:,} tokens"
            )
        longest = min(PROMPT_TOKENS, points[-1])
        new = min(MANY, longest // 2)
        queries = self._ones(new, spec.num_heads, spec.head_dim)
        batch, caches = self._batch(new, longest), self._caches(longest)[:4]
        calls = [partial(self._prefill, queries, c, batch) for c in caches]
        met = new * (longest - new) + new * (new + 1) / 2
        flops = (4 * spec.head_dim + 1) * spec.num_heads * met
        found["kernel_attention_prefill"] = measured_rate(
            flops / self.seconds(calls) / 1e9, "GFLOP/s", f"{how}, {new:,} rows of {longest:,}"
        )
        rotation = self._rotation()
        if rotation is not None:
            found["call_rope_rotation"] = measured_rate(rotation, "s", f"{how}: with the append")
        return found

    def _decode(self, q: torch.Tensor, cache: LayerKV, batch: AttentionBatch) -> object:
        return self._ops.attention_decode(q, cache, batch, self._scale, None, None)

    def _prefill(self, q: torch.Tensor, cache: LayerKV, batch: AttentionBatch) -> object:
        return self._ops.attention_prefill(q, cache, batch, self._scale, None, None)

    @property
    def _scale(self) -> float:
        return self._model.spec.head_dim**-0.5

    def _batch(self, new: int, context: int) -> AttentionBatch:
        size = self._model.block_tokens
        chunk = ScheduledChunk(
            0, (0,) * new, context - new, tuple(range(-(-context // size))), True
        )
        _, batch = build_batch([chunk], size, self._device.torch_device)
        # As in a captured step the table has room for the longest sequence, and the grid follows it.
        room = -(-_points(self._model.spec.max_context)[-1] // size) - batch.block_tables.shape[1]
        table = torch.nn.functional.pad(batch.block_tables, (0, max(room, 0)))
        return replace(batch, block_tables=table.contiguous()) if new == 1 else batch

    def _caches(self, context: int) -> list[LayerKV]:
        spec, size, dtype = (
            self._model.spec,
            self._model.block_tokens,
            DTYPES[self._model.kv_format],
        )
        shape = (-(-context // size), spec.num_kv_heads, size, spec.head_dim)
        nbytes = 2 * context * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        device = self._device.torch_device

        def half() -> torch.Tensor:
            return torch.full(shape, 0.5, dtype=dtype, device=device)

        return [LayerKV(half(), half()) for _ in range(self._turns(nbytes))]

    def _rotation(self) -> float | None:
        """Seconds of a layer's rotation with the cache's write, a part of a block: between two marks.

        None where the engine has no such block.
        """
        spec, model, op = self._model.spec, self._model, self._ops.chosen.get("attention_block")
        kinds = ("q", "k", "v", "o")
        if op is None or not op.marks_parts or any(k not in model.matrices for k in kinds):
            return None
        q, k, v, o = (model.matrices[kind] for kind in kinds)
        device, tokens = self._device.torch_device, ATTENTION_POINTS[0]
        half = self._ones(tokens, (spec.rope.dim or spec.head_dim) // 2)
        block = AttentionBlock(
            norm=self._ones(spec.hidden), eps=1e-5,
            weights=(
                _matrix(q, device), _matrix(k, device),
                _matrix(v, device), _matrix(o, device),
            ),
            biases=(None, None, None, None), q_norm=None, k_norm=None,
            table=RopeTable(cos=half, sin=half, interleaved=False),
            heads=(spec.num_heads, spec.num_kv_heads, spec.head_dim), scale=self._scale,
            window=None, sinks=None,
        )  # fmt: skip
        x, batch = self._ones(1, spec.hidden), self._batch(1, tokens)
        parts = BLOCKS["attention_block"]
        around = (parts.index("linear_group"), parts.index("rope"))

        def mark(part: int) -> None:
            if part in around:
                self._marks.point()

        caches = self._caches(tokens)
        graph = self._device.graph()

        def work() -> tuple[torch.Tensor, ...]:
            self._marks.begin()
            for index in range(CALLS):
                op.function(x, block, caches[index % len(caches)], batch, mark=mark)
            return ()

        graph.capture(work)
        runs = [self._cold_run(graph, 2 * CALLS)[1::2] for _ in range(RUNS)]
        return max(min(sum(run) for run in runs) / CALLS - self.mark_s(), 1e-7)

    def mark_s(self) -> float:
        """What a mark adds to a graph."""
        return mark_seconds(self._device, self._marks)


def _points(max_context: int) -> tuple[int, ...]:
    """Lengths up to the model's longest, two at least."""
    shorter = sum(t < max_context for t in ATTENTION_POINTS)
    return ATTENTION_POINTS[: max(shorter + 1, 2)]


def _matrix(of: Stored, device: torch.device) -> PackedTensor:
    """A matrix as the loader leaves it on a GPU."""
    return in_planes(packed(of.format, of.rows, of.cols, device))


def _fewer_rows(stored: Stored, most_nbytes: int) -> Stored:
    """A matrix of the same kind within so many bytes."""
    nbytes = stored.nbytes / stored.count
    if nbytes <= most_nbytes:
        return stored
    return replace(stored, rows=max(1, int(stored.rows * most_nbytes / nbytes)))


def _nbytes(weights: Sequence[PackedTensor]) -> int:
    return sum(w.nbytes for w in weights)


def _row_dtype(ident: str, shapes: Sequence[Stored]) -> torch.dtype:
    """What a decoding step's row is when it comes: rounded where it was made, or float32."""
    formats: set[Any] = {s.format for s in shapes}
    inside = ident in (leaf.QKV, leaf.O_PROJECTION, leaf.DENSE_FFN)
    if inside and len(formats) == 1:
        return _HALVES.get(formats.pop(), torch.float32)
    return torch.float32
