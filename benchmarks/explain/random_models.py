"""Engines with random weights in the geometry of real models, for timing where the files cannot be taken.

Kernels take the same time for any numbers. What does depend on them is which experts a token uses, so
tokens are drawn at random: greedy output of random weights repeats itself, and repeats hit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.residency import geometry as geo
from headrace.checkpoint.open import open_checkpoint
from headrace.core.model_spec import LayerSpec, ModelSpec, RopeSpec
from headrace.core.status import EngineInfo
from headrace.core.step import SampledToken, ScheduledChunk, StepOutput, StepPlan
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.engine.engine import Engine
from headrace.engine.parts import EngineParts
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.experts.building import make_executor
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.live import LiveExperts
from headrace.experts.rates import RateTracker
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore
from headrace.kv.storage import allocate_kv
from headrace.machine.device import Device
from headrace.models.decoder import Decoder
from headrace.ops.records import Activation, LayerKV
from headrace.ops.registry import OpSet, resolve
from headrace.text.tokenizer import load_tokenizer

BLOCK_TOKENS = 16
CHUNK = 8192
SPARE_TOKENS = 4096


def smollm2_spec(layers: int = 30) -> ModelSpec:
    """SmolLM2-135M (config.json of the published model)."""
    return ModelSpec(
        family="llama", hidden=576, num_heads=9, num_kv_heads=3, head_dim=64, vocab=49_152,
        intermediate=1536, norm_eps=1e-5, rope=RopeSpec(100_000.0, 64), max_context=8192,
        tie_embeddings=True, layers=tuple(LayerSpec(None, False) for _ in range(layers)),
    )  # fmt: skip


class Later:
    """Stands in an executor's place until memory is known."""

    def __init__(self) -> None:
        self.target: Any = None

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self.target(layer, x, ids, weights)


class _Texts:
    """The embedded model's tokenizer for a larger vocabulary."""

    def __init__(self, vocab: int) -> None:
        self._inner = load_tokenizer(open_checkpoint("tiny").text)
        self.vocab_size = vocab

    def token_bytes(self, token_id: int, **options: Any) -> bytes:
        return self._inner.token_bytes(token_id % self._inner.vocab_size, **options)

    def is_special(self, token_id: int) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def expert_runtime(
    device: Device, store: HostStore, placement: Any, slots: int, rates: PathRates, threads: int
) -> tuple[HybridExecutor, LiveExperts]:
    """The executor and what drives it between steps, as the engine makes them."""
    shape = ExecutorShape(placement, 1, geo.TOP_K, slots)
    executor = make_executor(
        device, store, shape, Activation("swiglu_clamped"), threads=threads,
        cpus=tuple(sorted(os.sched_getaffinity(0))[1 : threads + 1]), rates=rates,
    )  # fmt: skip
    return executor, LiveExperts(executor, RateTracker(rates))


def new_kv(of: ModelSpec, context: int, device: Device) -> list[LayerKV]:
    """A cache of one sequence, with room to keep the prompts of shorter ones."""
    blocks = -(-(context + SPARE_TOKENS) // BLOCK_TOKENS)
    return allocate_kv(of, blocks + 1, BLOCK_TOKENS, "bf16", device.torch_device)


def engine_of(
    name: str,
    of: ModelSpec,
    decoder: Decoder,
    device: Device,
    context: int,
    runtime: LiveExperts | None = None,
    threads: int = 1,
    kv: Sequence[LayerKV] | None = None,
) -> Engine:
    """An engine of one sequence around ``decoder``, its steps captured."""
    kv = kv or new_kv(of, context, device)
    graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=context)
    if runtime is not None:
        runtime.executor.step_begins(1)
    graphs.capture()
    info = EngineInfo(
        model=name, family=of.family, context=context, vocab=of.vocab, weights_nbytes=0,
        kv_nbytes=0, kv_format="bf16", block_tokens=BLOCK_TOKENS, threads=threads,
        backends=decoder.ops.describe(), choices=(), load_s=0.0,
    )  # fmt: skip
    limits = SchedulerConfig(
        num_blocks=kv[0].keys.shape[0] - 1, block_tokens=BLOCK_TOKENS, context=context,
        max_batch_tokens=CHUNK, max_num_seqs=1,
    )  # fmt: skip
    texts: Any = _Texts(of.vocab)
    return Engine(EngineParts(decoder, kv, texts, limits, info, device, graphs, runtime))


def draw_tokens(engine: Engine, vocab: int, seed: int = 5) -> None:
    """Let the engine's steps yield random tokens instead of the model's own, the same at a position."""
    runner: Any = engine._runner  # the seam that a benchmark needs and a product does not
    compute, launch, land = runner.compute, runner.launch, runner.land
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (10_007,), generator=generator).tolist()

    def drawn(found: SampledToken, chunk: ScheduledChunk) -> SampledToken:
        return SampledToken(found.seq_id, ids[(chunk.start + len(chunk.token_ids)) % len(ids)])

    def computed(step: int, chunks: Sequence[ScheduledChunk], *args: Any) -> StepOutput:
        output: StepOutput = compute(step, chunks, *args)
        of = {chunk.seq_id: chunk for chunk in chunks}
        return StepOutput(output.step, tuple(drawn(s, of[s.seq_id]) for s in output.sampled))

    def launched(plan: StepPlan, states: Mapping[int, Any]) -> None:
        """With the tokens that were drawn for these positions, not with those that the device chose."""
        chunks = (replace(c, token_ids=(ids[c.start % len(ids)],)) for c in plan.chunks)
        launch(replace(plan, chunks=tuple(chunks), ahead=False) if plan.ahead else plan, states)

    def landed(plan: StepPlan) -> list[Any]:
        found = zip(land(plan), plan.chunks, strict=True)
        return [drawn(s, c) if isinstance(s, SampledToken) else s for s, c in found]

    runner.compute, runner.launch, runner.land = computed, launched, landed


def decoder_ops(device: Device) -> OpSet:
    """The operations that the device's engine would take."""
    return resolve(device.backends)
