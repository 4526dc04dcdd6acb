"""Rates that this engine's kernels reach here, on matrices and caches of a model's shapes, but not its own.

``explain.kernel_rates`` predicts steps from them. Everything is read cold, as in a step: matrices and
caches take turns over more memory than caches hold, and a call is made after others have filled them.
Each call is timed by itself and the median kept, as of the steps that are compared with it: neighbours
on the machine slow both. Two to four seconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.core.config import EngineConfig
from headrace.core.model_spec import MoeSpec
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.step import ScheduledChunk, StepStats
from headrace.engine.batch import build_batch
from headrace.engine.engine import Engine
from headrace.engine.sampler import SamplingState, choose
from headrace.engine.this_machine import measured_rate
from headrace.explain import leaf
from headrace.explain.running_cost import MATRICES, RunningModel, Stored, rate_name
from headrace.formats.base import PackedTensor, load_formats
from headrace.kv.storage import DTYPES
from headrace.machine.profile import Rate
from headrace.ops.records import Activation, AttentionBatch, ExpertWeights, LayerKV
from headrace.ops.registry import OpSet

T = TypeVar("T")

COLD_NBYTES = 96 << 20  # three times the last-level cache of the CPUs at hand
EDGE = 2048  # width of the rows that are normalised
TINY_ROWS, TINY_COLS = 16, 32
MANY = 256  # rows that are multiplied at once
CONTEXTS = (512, 4096)
VOCAB = 65536
SAMPLER_ROWS = 64
ROUNDS = 7
STEPS = 48
HOST = (leaf.SCHEDULE, leaf.DETOKENIZE)
# A byte whose pattern is a harmless number in every format's scales: 1.06 as two of them in float16,
# 2^-67 as an exponent, 0.5 in E4M3.
FILLING = 60


def probe_kernels(ops: OpSet, model: RunningModel) -> dict[str, Rate]:
    """Every rate that predicting this model's steps takes, by name."""
    call_s = _call_s(ops)
    rates = {"op_call": measured_rate(call_s, "s", "a product too small to wake threads")}
    for ident, probe in class_probes(ops, model).items():
        one, many = probe.rates(call_s)
        name = rate_name(ident)
        rates[f"kernel_one_{name}"] = measured_rate(one, "GB/s", f"{probe.how}, one row, in turns")
        rates[f"kernel_many_{name}"] = measured_rate(many, "GFLOP/s", f"{probe.how}, {MANY} rows")
    if model.kv_format in DTYPES:  # a quantised cache is not laid out by hand
        rates |= _attention(ops, model, call_s)
    x = torch.ones(MANY, EDGE)
    norm = torch.ones(EDGE)
    seconds = _each([x], lambda rows: ops.rmsnorm(rows, norm, 1e-5))
    rates["kernel_rows"] = measured_rate(4 * MANY * EDGE / seconds / 1e9, "GFLOP/s", "RMSNorm")
    rates["kernel_sampler"] = measured_rate(_sampler_gbps(), "GB/s", f"greedy over {VOCAB} logits")
    step_s, token_s = _host()
    how = "steps of the embedded model, less its operations"
    rates["step_host"] = measured_rate(step_s, "s", how)
    rates["token_host"] = measured_rate(token_s, "s", "text of a token, the embedded model's")
    return rates


def _call_s(ops: OpSet) -> float:
    """Seconds of a call from Python that comes after a matrix has been through the caches."""
    tiny, row = packed("f32", TINY_ROWS, TINY_COLS), torch.ones(1, TINY_COLS)
    large = [packed("f32", EDGE // 2, EDGE // 2) for _ in range(COLD_NBYTES // (EDGE * EDGE))]
    wide, turn = torch.ones(1, EDGE // 2), itertools.cycle(large)
    return _each(
        [tiny], lambda matrix: ops.linear(row, matrix), 200,
        before=lambda: ops.linear(wide, next(turn)),
    )  # fmt: skip


def packed(name: str, rows: int, cols: int, device: torch.device | None = None) -> PackedTensor:
    """A matrix of format ``name`` whose bytes are all written, so that they lie in memory."""
    layout = load_formats()[name].layout((rows, cols))
    parts = {
        part: torch.full(
            want.shapes[0],
            FILLING if want.dtype is torch.uint8 else 0.5,
            dtype=want.dtype,
            device=device,
        )
        for part, want in layout.items()
    }
    return PackedTensor(name, (rows, cols), parts)


def _each(
    items: Sequence[T],
    call: Callable[[T], object],
    rounds: int = ROUNDS,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds of one call, each with the next of ``items`` and after ``before``."""
    times: list[float] = []
    for turn in range(rounds + 1):
        for item in items:
            before()
            start = time.perf_counter()
            call(item)
            if turn:
                times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


@dataclass(frozen=True)
class ClassProbe:
    """A class's operations on synthetic matrices of its shapes.

    make: a new set of matrices; call: runs the operations on [T, K] rows with one set; nbytes: of a set
    as read at one row; elements: multiply-adds of a row; copies: sets that take turns; calls: from Python.
    """

    make: Callable[[], Any]
    call: Callable[[torch.Tensor, Any], object]
    width: int
    nbytes: float
    elements: float
    copies: int
    calls: int
    how: str

    def rates(self, call_s: float) -> tuple[float, float]:
        """GB/s at one row, GFLOP/s at many; the calls from Python are taken off."""
        sets = [self.make() for _ in range(self.copies)]
        one, many = torch.ones(1, self.width), torch.ones(MANY, self.width)
        single = _each(sets, lambda weights: self.call(one, weights)) - self.calls * call_s
        several = _each(sets[:1], lambda weights: self.call(many, weights), 3)
        return self.nbytes / single / 1e9, 2 * MANY * self.elements / several / 1e9


def class_probes(ops: OpSet, model: RunningModel) -> dict[str, ClassProbe]:
    """A probe for every class of the model that multiplies with matrices."""
    found: dict[str, ClassProbe] = {}
    for ident, kinds in MATRICES.items():
        stored = [model.matrices[kind] for kind in kinds if kind in model.matrices]
        if not stored or ident in (leaf.EMBED, leaf.EXPERTS_GPU):
            continue
        nbytes = sum(s.nbytes / s.count for s in stored)
        found[ident] = ClassProbe(
            make=partial(_matrices, stored),
            call=partial(_CALLS[ident], ops),
            width=stored[0].cols,
            nbytes=nbytes,
            elements=sum(s.elements / s.count for s in stored),
            copies=_copies(nbytes, model.spec.num_layers),
            calls=2 if ident == leaf.DENSE_FFN else 1,
            how=", ".join(f"{s.format} {s.rows} x {s.cols}" for s in stored),
        )
    if model.spec.moe is not None and "expert" in model.matrices:
        found[leaf.EXPERTS_GPU] = _expert_probe(ops, model, model.spec.moe)
    return found


def _matrices(stored: Sequence[Stored]) -> list[PackedTensor]:
    return [packed(s.format, s.rows, s.cols) for s in stored]


def _copies(nbytes: float, layers: int) -> int:
    """Sets that take turns: more than caches hold, but no more than the model has layers."""
    return max(1, min(layers, round(COLD_NBYTES / nbytes) + 1))


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

    mixtures = sum(layer.moe for layer in model.spec.layers)
    one = 3 * width * inner
    return ClassProbe(
        make=make,
        call=call,
        width=width,
        nbytes=stored.nbytes / mixtures * chosen / count,
        elements=chosen * one,
        copies=_copies(stored.nbytes / mixtures, mixtures),
        calls=5,  # the choice is made here, by four small operations of torch
        how=f"{chosen} of {count} experts, {stored.format} 3 x {width} x {inner}",
    )


def _attention(ops: OpSet, model: RunningModel, call_s: float) -> dict[str, Rate]:
    """Attention with the model's heads: a layer's fixed time and the cache's rate from two lengths."""
    spec, dtype = model.spec, DTYPES[model.kv_format]
    scale = spec.head_dim**-0.5

    def batch(new: int, context: int) -> AttentionBatch:
        blocks = tuple(range(context // model.block_tokens))
        chunk = ScheduledChunk(0, (0,) * new, context - new, blocks, True)
        return build_batch([chunk], model.block_tokens, torch.device("cpu"))[1]

    def caches(context: int) -> list[LayerKV]:
        shape = (
            context // model.block_tokens,
            spec.num_kv_heads,
            model.block_tokens,
            spec.head_dim,
        )
        return [
            LayerKV(torch.full(shape, 0.5, dtype=dtype), torch.full(shape, 0.5, dtype=dtype))
            for _ in range(_copies(nbytes(context), 4 * spec.num_layers))
        ]

    def nbytes(context: int) -> int:
        return 2 * context * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    q = torch.full((1, spec.num_heads, spec.head_dim), 0.5)
    times: list[float] = []
    for context in CONTEXTS:
        single = batch(1, context)

        def decode(kv: LayerKV, batch: AttentionBatch = single) -> object:
            return ops.attention_decode(q, kv, batch, scale, None, None)

        found = _each(caches(context), decode)
        times.append(found - call_s)
    short, long = map(nbytes, CONTEXTS)
    per_byte = (times[1] - times[0]) / (long - short)
    queries = torch.full((MANY, spec.num_heads, spec.head_dim), 0.5)
    several = batch(MANY, CONTEXTS[1])
    many = _each(
        caches(CONTEXTS[1])[:1],
        lambda kv: ops.attention_prefill(queries, kv, several, scale, None, None),
        3,
    )
    met = MANY * (CONTEXTS[1] - MANY) + MANY * (MANY + 1) / 2
    flops = (4 * spec.head_dim + 1) * spec.num_heads * met
    how = f"{spec.num_heads}:{spec.num_kv_heads} heads of {spec.head_dim}, {model.kv_format}"
    return {
        "kernel_attention_decode": measured_rate(
            1 / per_byte / 1e9, "GB/s", f"{how}, {CONTEXTS[0]} to {CONTEXTS[1]} tokens, in turns"
        ),
        "attention_call": measured_rate(
            max(times[0] - short * per_byte, 1e-7), "s", f"{how}, without the cache's bytes"
        ),
        "kernel_attention_prefill": measured_rate(
            flops / many / 1e9, "GFLOP/s", f"{how}, {MANY} after {CONTEXTS[1] - MANY} tokens"
        ),
    }


def _sampler_gbps() -> float:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=VOCAB).astype(np.float32) for _ in range(SAMPLER_ROWS)]
    state = SamplingState(SamplingParams(temperature=0.0), 0, 0, (1,))
    return rows[0].nbytes / _each(rows, lambda logits: choose(logits, state, 1)) / 1e9


def _host() -> tuple[float, float]:
    """Host seconds of a step and of a token's text, from steps of the embedded model."""
    engine = Engine.load(EngineConfig("tiny", context=STEPS + 16, device="cpu"))
    seen: list[StepStats] = []
    engine.observe = seen.append
    engine.watch_classes(True)
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    engine.submit(GenerationRequest("probe", (1, 2, 3), sampling))
    try:
        while engine.has_work():
            engine.step()
    finally:
        engine.watch_classes(False)
        engine.close()
    steps = [s for s in seen if s.phase == "decode"]
    hosts = sorted(s.seconds - sum(c.seconds for c in s.classes if c.id not in HOST) for s in steps)
    texts = sorted(c.seconds for s in steps for c in s.classes if c.id == leaf.DETOKENIZE)
    token_s = texts[len(texts) // 4]
    return max(hosts[len(hosts) // 4] - token_s, 1e-6), max(token_s, 1e-7)
