"""What this engine's decoding steps take on a CPU, class by class, on layers that are nobody's.

``explain.kernel_rates`` predicts steps from it. A stack of layers of the model's shapes, in its formats
(``engine.stand_in``), computes one token again and again after two lengths of cache, and serves a short
request in an engine of its own. Classes are timed as in a watched step, in the kernels themselves, so that
what calling them from Python takes is known beside them; probed one by one, small products came out a third
too fast, since the call that was taken off them had been measured with colder caches than theirs. Everything
is read cold: the stack is larger than caches, or is the whole model. The middle steps count, as of those that
are compared with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.status import EngineInfo
from headrace.core.step import ScheduledChunk, StepStats
from headrace.engine.batch import build_batch
from headrace.engine.engine import Engine
from headrace.engine.parts import EngineParts
from headrace.engine.profiler import StepProfiler
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.engine.stand_in import stand_in
from headrace.engine.this_machine import measured_rate
from headrace.explain import leaf
from headrace.explain.running_cost import (
    LOGIT_NBYTES,
    MATRICES,
    RunningModel,
    decode_rows,
    rate_name,
    running_cost,
)
from headrace.kv.storage import DTYPES, allocate_kv
from headrace.machine.device import HostDevice
from headrace.machine.profile import Rate
from headrace.models.decoder import Decoder
from headrace.ops.records import LayerKV
from headrace.ops.registry import OpSet
from headrace.text.tokenizer import load_tokenizer

COLD_NBYTES = 96 << 20  # three times the last-level cache of the CPUs at hand
LEAST_LAYERS = 2  # of which one's calls come after another's bytes
CONTEXTS = (512, 4096)
STEPS, WARM_UP = 24, 4
INSIDE = ("decoder", "logits", "sampler", "text")  # ranges of a step that others tell of
ROWS = (leaf.RMSNORM, leaf.ROPE, leaf.KV_APPEND)  # what reads and writes rows only

Times = dict[str, float]


def probe_steps(ops: OpSet, model: RunningModel) -> dict[str, Rate]:
    """The rates of a decoding step, by name."""
    layers = layers_to_time(model)
    positions = max(CONTEXTS) + STEPS + 2 * model.block_tokens
    decoder = stand_in(model, ops, layers, positions)
    plain = model.kv_format in DTYPES  # a quantised cache is not laid out by hand
    kv_format = model.kv_format if plain else "bf16"
    blocks = -(-positions // model.block_tokens) + 1
    kv = allocate_kv(decoder.spec, blocks, model.block_tokens, kv_format, torch.device("cpu"))
    for cache in kv:
        cache.keys.fill_(0.5)
        cache.values.fill_(0.5)
    profiler = StepProfiler(decoder, kv_format, model.block_tokens)
    profiler.start()
    try:
        short, long = (_forwards(decoder, kv, profiler, context) for context in CONTEXTS)
    finally:
        profiler.stop()
    how = f"{layers} layers of the model's shapes, one row, cold"
    found = _rates(profiler.model, short, long, how)
    if plain:
        found |= _attention(profiler.model, short, long, how)
    calls_s = (short[leaf.LAUNCHES] + long[leaf.LAUNCHES]) / 2
    found["layer_calls"] = measured_rate(calls_s / layers, "s", f"Python of a layer; {how}")
    return found | _engine_rates(decoder, kv, blocks, model, how)


def layers_to_time(model: RunningModel) -> int:
    """As few as read more than caches hold, with the head."""
    spec = model.spec
    kinds = {k: s for k, s in model.matrices.items() if k not in ("embed", "lm_head")}
    used = 1.0
    if spec.moe is not None:
        used = spec.moe.num_experts_per_token / spec.moe.num_experts
    nbytes = sum(s.nbytes * (used if kind == "expert" else 1) for kind, s in kinds.items())
    head = model.matrices["lm_head"].nbytes
    wanted = math.ceil((COLD_NBYTES - head) / (nbytes / spec.num_layers))
    first = 1 + next((i for i, layer in enumerate(spec.layers) if layer.moe), 0)
    return min(spec.num_layers, max(wanted, LEAST_LAYERS, first))


@torch.inference_mode()
def _forwards(
    decoder: Decoder, kv: Sequence[LayerKV], profiler: StepProfiler, context: int
) -> Times:
    """Seconds by class of a token after ``context`` others, its logits included."""
    size = profiler.model.block_tokens
    chunk = ScheduledChunk(0, (0,), context - 1, tuple(range(-(-context // size))), True)
    seen: list[Times] = []
    for _ in range(STEPS):
        tokens, batch = build_batch([chunk], size, torch.device("cpu"))
        profiler.classes()
        start = time.perf_counter()
        decoder.logits(decoder.forward(tokens, batch, kv))
        seconds = time.perf_counter() - start
        times = {ident: s for ident, (_, s) in profiler.classes().items()}
        known = sum(s for ident, s in times.items() if ident != leaf.LAUNCHES)
        seen.append({**times, leaf.LAUNCHES: max(seconds - known, 0.0)})
    return middle_step(seen[WARM_UP:])


def middle_step(seen: Sequence[Times]) -> Times:
    """The mean by class of the middle half of the steps, by what they took in all.

    Medians of each class by itself add up to less than the median step, where now one class is interrupted
    and now another.
    """
    ordered = sorted(seen, key=lambda times: sum(times.values()))
    middle = ordered[len(ordered) // 4 : -(len(ordered) // 4) or None]
    names = {name for one in middle for name in one}
    return {name: sum(one.get(name, 0.0) for one in middle) / len(middle) for name in names}


def _rates(model: RunningModel, short: Times, long: Times, how: str) -> dict[str, Rate]:
    costs = running_cost(model, decode_rows(1, CONTEXTS[0] - 1))
    found: dict[str, Rate] = {}
    for ident in MATRICES:
        if ident == leaf.EMBED or ident not in costs or not costs[ident].matrix_nbytes:
            continue
        seconds = (short[ident] + long[ident]) / 2
        rate = costs[ident].matrix_nbytes / max(seconds, 1e-9) / 1e9
        found[f"kernel_one_{rate_name(ident)}"] = measured_rate(rate, "GB/s", how)
    for ident in ROWS:
        seconds = (short[ident] + long[ident]) / 2 / costs[ident].calls
        found[f"call_{rate_name(ident)}"] = measured_rate(max(seconds, 1e-9), "s", how)
    embed_s = max((short[leaf.EMBED] + long[leaf.EMBED]) / 2, 1e-9)
    found[f"call_{rate_name(leaf.EMBED)}"] = measured_rate(embed_s, "s", how)
    return found


def _attention(model: RunningModel, short: Times, long: Times, how: str) -> dict[str, Rate]:
    """A layer's fixed time and the cache's rate, from two lengths."""
    ident, layers = leaf.ATTENTION_DECODE, model.spec.num_layers
    times = [one[ident] / layers for one in (short, long)]
    nbytes = [
        running_cost(model, decode_rows(1, n - 1))[ident].work.dram_nbytes / layers
        for n in CONTEXTS
    ]
    slope = max(times[1] - times[0], 1e-12) / (nbytes[1] - nbytes[0])
    fixed = max(times[0] - slope * nbytes[0], 1e-9)
    how = f"{how}, after {CONTEXTS[0]:,} and {CONTEXTS[1]:,} tokens"
    return {
        "kernel_attention_decode": measured_rate(1 / slope / 1e9, "GB/s", how),
        "attention_call": measured_rate(fixed, "s", f"{how}: without the cache's bytes"),
    }


def _engine_rates(
    decoder: Decoder, kv: Sequence[LayerKV], blocks: int, model: RunningModel, how: str
) -> dict[str, Rate]:
    """What the engine does around the decoder: for a step, for a token's choice, for its text."""
    context = (blocks - 1) * model.block_tokens
    info = EngineInfo(
        "probe", "", context, model.spec.vocab, 0, 0, model.kv_format, model.block_tokens, 1, {},
        (), 0.0,
    )  # fmt: skip
    limits = SchedulerConfig(blocks, model.block_tokens, context, context, 1, prefix_cache=False)
    tokenizer = load_tokenizer(open_checkpoint("tiny").text)
    engine = Engine(EngineParts(decoder, kv, tokenizer, limits, info, HostDevice()))
    seen: list[StepStats] = []
    engine.observe = seen.append
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    engine.submit(GenerationRequest("probe", (1,) * model.block_tokens, sampling))
    try:
        while engine.has_work():
            engine.step()
    finally:
        engine.close()
    ranges = [{c.id: c.seconds for c in s.classes} for s in seen if s.phase == "decode"]
    totals = [s.seconds for s in seen if s.phase == "decode"]
    around = [total - sum(one[n] for n in INSIDE) for total, one in zip(totals, ranges)]
    choice_s, text_s = (median(one[name] for one in ranges[WARM_UP:]) for name in INSIDE[-2:])
    gbps = model.spec.vocab * LOGIT_NBYTES / choice_s / 1e9
    return {
        "step_host": measured_rate(median(around[WARM_UP:]), "s", f"steps of {how}"),
        "kernel_sampler": measured_rate(gbps, "GB/s", f"greedy over {model.spec.vocab:,} logits"),
        "token_host": measured_rate(max(text_s, 1e-7), "s", "text of a token"),
    }
