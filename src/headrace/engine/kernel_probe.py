"""Rates that this engine's kernels reach here, on matrices and caches that are nobody's model.

``explain.kernel_rates`` predicts steps from them. Everything is read cold, as in a step: matrices and
caches take turns over more memory than caches hold. Minima of several rounds; two to four seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from headrace.core.config import EngineConfig
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.step import ScheduledChunk, StepStats
from headrace.engine.batch import build_batch
from headrace.engine.engine import Engine
from headrace.engine.sampler import SamplingState, choose
from headrace.engine.this_machine import measured_rate
from headrace.explain import leaf
from headrace.explain.running_cost import MATRICES, RunningModel
from headrace.formats.base import PackedTensor, load_formats
from headrace.kv.storage import DTYPES
from headrace.machine.profile import Rate
from headrace.ops.records import AttentionBatch, LayerKV
from headrace.ops.registry import OpSet

COLD_NBYTES = 96 << 20  # three times the last-level cache of the CPUs at hand
EDGE = 2048  # rows and columns of the matrices
SMALL_ROWS, TINY_ROWS, TINY_COLS = 256, 32, 256
MANY = 256  # rows that are multiplied at once
CONTEXT = 4096
BLOCK_TOKENS = 64
VOCAB = 65536
ROUNDS = 7
STEPS = 48
HOST = (leaf.SCHEDULE, leaf.DETOKENIZE)
# A byte whose pattern is a harmless number in every format's scales: 1.06 as two of them in float16,
# 2^-67 as an exponent, 0.5 in E4M3.
FILLING = 60


def probe_engine(engine: Engine) -> dict[str, Rate]:
    """``probe_kernels`` for a loaded, idle engine. Nothing on a device whose kernels it cannot time."""
    profiler = engine.watch_classes(True)
    engine.watch_classes(False)
    if profiler is None or profiler.model.gpu:
        return {}
    return probe_kernels(profiler.ops, profiler.model)


def probe_kernels(ops: OpSet, model: RunningModel) -> dict[str, Rate]:
    """Every rate that predicting this model's steps takes, by name."""
    call_s, wake_s = 0.0, 0.0
    rates: dict[str, Rate] = {}
    kinds = {kind for names in MATRICES.values() for kind in names} - {"embed"}
    formats = sorted({model.matrices[k].format for k in kinds if k in model.matrices})
    for name in formats:
        call_s, wake_s, matvec, matmul = _products(ops, name)
        rates[f"kernel_matvec_{name}"] = measured_rate(
            matvec, "GB/s", f"one row x {EDGE} x {EDGE}, cold"
        )
        rates[f"kernel_matmul_{name}"] = measured_rate(
            matmul, "GFLOP/s", f"{MANY} rows x {EDGE} x {EDGE}"
        )
    rates["op_call"] = measured_rate(call_s, "s", "a product too small to wake threads")
    rates["thread_wake"] = measured_rate(
        wake_s, "s", f"{SMALL_ROWS} x {EDGE}, less its bytes and the call"
    )
    rates |= _attention(ops, model, wake_s + call_s)
    x = torch.ones(MANY, EDGE)
    norm = torch.ones(EDGE)
    seconds = _best(lambda: ops.rmsnorm(x, norm, 1e-5))
    rates["kernel_rows"] = measured_rate(4 * MANY * EDGE / seconds / 1e9, "GFLOP/s", "RMSNorm")
    rates["kernel_sampler"] = measured_rate(_sampler_gbps(), "GB/s", f"greedy over {VOCAB} logits")
    step_s, token_s = _host()
    rates["step_host"] = measured_rate(
        step_s, "s", "steps of the embedded model, less its operations"
    )
    rates["token_host"] = measured_rate(token_s, "s", "text of a token, the embedded model's")
    return rates


def packed(name: str, rows: int, cols: int) -> PackedTensor:
    """A matrix of format ``name`` whose bytes are all written, so that they lie in memory."""
    layout = load_formats()[name].layout((rows, cols))
    parts = {
        part: torch.full(
            want.shapes[0], FILLING if want.dtype is torch.uint8 else 0.5, dtype=want.dtype
        )
        for part, want in layout.items()
    }
    return PackedTensor(name, (rows, cols), parts)


def _best(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _products(ops: OpSet, name: str) -> tuple[float, float, float, float]:
    """Seconds of a call, seconds of a wake, GB/s of one row, GFLOP/s of many."""
    tiny = packed(name, TINY_ROWS, TINY_COLS)
    row = torch.ones(1, TINY_COLS)
    call_s = _best(lambda: ops.linear(row, tiny), 200)
    large = [packed(name, EDGE, EDGE)]
    large += [packed(name, EDGE, EDGE) for _ in range(COLD_NBYTES // large[0].nbytes)]
    x = torch.ones(1, EDGE)

    def pass_over(matrices: list[PackedTensor]) -> None:
        for matrix in matrices:
            ops.linear(x, matrix)

    nbytes = large[0].nbytes
    each = _best(lambda: pass_over(large)) / len(large)
    small = [packed(name, SMALL_ROWS, EDGE) for _ in range(COLD_NBYTES // 4 // (nbytes // 8))]
    little = _best(lambda: pass_over(small)) / len(small)
    # Two sizes give slope and offset: seconds = offset + bytes / rate.
    per_byte = (each - little) / (nbytes - small[0].nbytes)
    offset = max(little - small[0].nbytes * per_byte, call_s)
    many = torch.ones(MANY, EDGE)
    multiplied = _best(lambda: ops.linear(many, large[0]), 3)
    return (
        call_s,
        max(offset - call_s, 1e-7),
        1 / per_byte / 1e9,
        2 * MANY * EDGE * EDGE / multiplied / 1e9,
    )


def _attention(ops: OpSet, model: RunningModel, offset_s: float) -> dict[str, Rate]:
    """Attention with the model's heads over caches of ``CONTEXT`` tokens."""
    spec, dtype = model.spec, DTYPES[model.kv_format]
    blocks = CONTEXT // BLOCK_TOKENS
    shape = (blocks, spec.num_kv_heads, BLOCK_TOKENS, spec.head_dim)
    one = 2 * CONTEXT * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    caches = [
        LayerKV(torch.full(shape, 0.5, dtype=dtype), torch.full(shape, 0.5, dtype=dtype))
        for _ in range(max(2, COLD_NBYTES // one))
    ]
    scale = spec.head_dim**-0.5

    def batch(new: int) -> AttentionBatch:
        chunk = ScheduledChunk(0, (0,) * new, CONTEXT - new, tuple(range(blocks)), True)
        return build_batch([chunk], BLOCK_TOKENS, torch.device("cpu"))[1]

    single, several = batch(1), batch(MANY)
    q = torch.full((1, spec.num_heads, spec.head_dim), 0.5)
    queries = torch.full((MANY, spec.num_heads, spec.head_dim), 0.5)

    def decode() -> None:
        for cache in caches:
            ops.attention_decode(q, cache, single, scale, None, None)

    seconds = _best(decode) / len(caches) - offset_s
    met = MANY * (CONTEXT - MANY) + MANY * (MANY + 1) / 2
    flops = (4 * spec.head_dim + 1) * spec.num_heads * met
    several_s = _best(
        lambda: ops.attention_prefill(queries, caches[0], several, scale, None, None), 3
    )
    how = f"{spec.num_heads}:{spec.num_kv_heads} heads of {spec.head_dim} over {CONTEXT} tokens"
    return {
        f"kernel_attention_decode_{model.kv_format}": measured_rate(
            one / seconds / 1e9, "GB/s", f"{how}, cold"
        ),
        f"kernel_attention_prefill_{model.kv_format}": measured_rate(
            flops / several_s / 1e9, "GFLOP/s", f"{how}, {MANY} at once"
        ),
    }


def _sampler_gbps() -> float:
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    state = SamplingState(SamplingParams(temperature=0.0), 0, 0, (1,))
    return logits.nbytes / _best(lambda: choose(logits, state, 1), 20) / 1e9


def _host() -> tuple[float, float]:
    """Host seconds of a step and of a token's text, from steps of the embedded model."""
    engine = Engine.load(EngineConfig("tiny", context=STEPS + 16))
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
