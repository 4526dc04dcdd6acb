"""Rates that this engine's kernels reach here, on matrices and caches of a model's shapes, but not its own.

``explain.kernel_rates`` predicts steps from them. Those of decoding are ``engine.step_probe``'s; here are
those of a prompt's rows. Each call is timed by itself and the median kept, as of the steps that are
compared with it: neighbours on the machine slow both. Two to four seconds in all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from headrace.core.model_spec import MoeSpec
from headrace.core.step import ScheduledChunk
from headrace.engine.batch import build_batch
from headrace.engine.stand_in import packed
from headrace.engine.step_probe import COLD_NBYTES, probe_steps
from headrace.engine.this_machine import measured_rate
from headrace.explain import leaf
from headrace.explain.running_cost import MATRICES, RunningModel, Stored, rate_name
from headrace.formats.base import PackedTensor
from headrace.kv.storage import DTYPES
from headrace.machine.profile import Rate
from headrace.ops.records import Activation, ExpertWeights, LayerKV
from headrace.ops.registry import OpSet

EDGE = 2048  # width of the rows that are normalised
TINY_ROWS, TINY_COLS = 16, 32
MANY = 256  # rows that are multiplied at once
CONTEXT = 4096  # that many rows' last ones attend to
ROUNDS = 3


def probe_kernels(ops: OpSet, model: RunningModel) -> dict[str, Rate]:
    """Every rate that predicting this model's steps takes, by name."""
    rates = probe_steps(ops, model)
    rates["op_call"] = measured_rate(_call_s(ops), "s", "a product too small to wake threads")
    for ident, probe in class_probes(ops, model).items():
        name = f"kernel_many_{rate_name(ident)}"
        rates[name] = measured_rate(probe.gflops(), "GFLOP/s", f"{probe.how}, {MANY} rows")
    if model.kv_format in DTYPES:  # a quantised cache is not laid out by hand
        rates["kernel_attention_prefill"] = _attention(ops, model)
    x = torch.ones(MANY, EDGE)
    norm = torch.ones(EDGE)
    seconds = _each(lambda: ops.rmsnorm(x, norm, 1e-5))
    rates["kernel_rows"] = measured_rate(4 * MANY * EDGE / seconds / 1e9, "GFLOP/s", "RMSNorm")
    return rates


def _call_s(ops: OpSet) -> float:
    """Seconds of a call from Python that comes after a matrix has been through the caches."""
    tiny, row = packed("f32", TINY_ROWS, TINY_COLS), torch.ones(1, TINY_COLS)
    large = [packed("f32", EDGE // 2, EDGE // 2) for _ in range(COLD_NBYTES // (EDGE * EDGE))]
    wide, turn = torch.ones(1, EDGE // 2), itertools.cycle(large)
    return _each(lambda: ops.linear(row, tiny), 200, lambda: ops.linear(wide, next(turn)))


def _each(
    call: Callable[[], object], rounds: int = ROUNDS, before: Callable[[], object] = lambda: None
) -> float:
    """Median seconds of a call after ``before``; the first one does not count."""
    times: list[float] = []
    for _ in range(rounds + 1):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[1:])


@dataclass(frozen=True)
class ClassProbe:
    """A class's operations on synthetic matrices of its shapes.

    make: new matrices; call: runs the operations on [T, K] rows with them; elements: multiply-adds of a
    row.
    """

    make: Callable[[], Any]
    call: Callable[[torch.Tensor, Any], object]
    width: int
    elements: float
    how: str

    def gflops(self) -> float:
        """At many rows."""
        weights, rows = self.make(), torch.ones(MANY, self.width)
        seconds = _each(lambda: self.call(rows, weights))
        return 2 * MANY * self.elements / seconds / 1e9


def class_probes(ops: OpSet, model: RunningModel) -> dict[str, ClassProbe]:
    """A probe for every class of the model that multiplies with matrices."""
    found: dict[str, ClassProbe] = {}
    for ident, kinds in MATRICES.items():
        stored = [model.matrices[kind] for kind in kinds if kind in model.matrices]
        if not stored or ident in (leaf.EMBED, leaf.EXPERTS_GPU):
            continue
        found[ident] = ClassProbe(
            make=partial(_matrices, stored),
            call=partial(_CALLS[ident], ops),
            width=stored[0].cols,
            elements=sum(s.elements / s.count for s in stored),
            how=", ".join(f"{s.format} {s.rows} x {s.cols}" for s in stored),
        )
    if model.spec.moe is not None and "expert" in model.matrices:
        found[leaf.EXPERTS_GPU] = _expert_probe(ops, model, model.spec.moe)
    return found


def _matrices(stored: Sequence[Stored]) -> list[PackedTensor]:
    return [packed(s.format, s.rows, s.cols) for s in stored]


def _qkv(ops: OpSet, x: torch.Tensor, weights: Sequence[PackedTensor]) -> object:
    return ops.linear_group(x, weights, [None] * len(weights))


def _linear(ops: OpSet, x: torch.Tensor, weights: Sequence[PackedTensor]) -> object:
    return ops.linear(x, weights[0])


def _feed_forward(ops: OpSet, x: torch.Tensor, weights: Sequence[PackedTensor]) -> object:
    gate, up, down = weights
    return ops.linear(ops.gated_linear(x, gate, up, Activation()), down)


_CALLS: dict[str, Callable[[OpSet, torch.Tensor, Sequence[PackedTensor]], object]] = {
    leaf.QKV: _qkv,
    leaf.O_PROJECTION: _linear,
    leaf.DENSE_FFN: _feed_forward,
    leaf.ROUTER: _linear,
    leaf.LM_HEAD: _linear,
}


def _expert_probe(ops: OpSet, model: RunningModel, moe: MoeSpec) -> ClassProbe:
    """One layer's experts; each row uses other ones."""
    stored, width, inner = model.matrices["expert"], model.spec.hidden, moe.intermediate
    count, chosen = moe.num_experts, moe.num_experts_per_token
    turn = itertools.count()

    def make() -> ExpertWeights:
        def stack(rows: int, cols: int) -> list[PackedTensor]:
            return [packed(stored.format, rows, cols) for _ in range(count)]

        return ExpertWeights(stack(inner, width), stack(inner, width), stack(width, inner))

    def call(x: torch.Tensor, weights: ExpertWeights) -> object:
        first = torch.arange(x.shape[0])[:, None] * chosen + next(turn) * chosen
        ids = ((first + torch.arange(chosen)) % count).to(torch.int32)
        shares = torch.full((x.shape[0], chosen), 1 / chosen)
        return ops.moe(x, ids, shares, weights, Activation())

    return ClassProbe(
        make=make,
        call=call,
        width=width,
        elements=chosen * 3 * width * inner,
        how=f"{chosen} of {count} experts, {stored.format} 3 x {width} x {inner}",
    )


def _attention(ops: OpSet, model: RunningModel) -> Rate:
    """GFLOP/s of a prompt's last rows, with the model's heads."""
    spec, dtype, size = model.spec, DTYPES[model.kv_format], model.block_tokens
    scale = spec.head_dim**-0.5
    chunk = ScheduledChunk(0, (0,) * MANY, CONTEXT - MANY, tuple(range(CONTEXT // size)), True)
    batch = build_batch([chunk], size, torch.device("cpu"))[1]
    shape = (CONTEXT // size, spec.num_kv_heads, size, spec.head_dim)
    cache = LayerKV(torch.full(shape, 0.5, dtype=dtype), torch.full(shape, 0.5, dtype=dtype))
    queries = torch.full((MANY, spec.num_heads, spec.head_dim), 0.5)
    many_s = _each(lambda: ops.attention_prefill(queries, cache, batch, scale, None, None))
    met = MANY * (CONTEXT - MANY) + MANY * (MANY + 1) / 2
    flops = (4 * spec.head_dim + 1) * spec.num_heads * met
    how = f"{spec.num_heads}:{spec.num_kv_heads} heads of {spec.head_dim}, {model.kv_format}"
    return measured_rate(
        flops / many_s / 1e9, "GFLOP/s", f"{how}, {MANY} after {CONTEXT - MANY} tokens"
    )
