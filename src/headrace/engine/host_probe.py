"""What the engine's host side takes for a decoding step on a GPU, whatever the model computes.

An engine around a decoder that does next to nothing, in a captured graph with as many kernels as the
model's: scheduling, filling the inputs, starting the graph, fetching the result, choosing the token, its
text. The kernels' own time is the GPU's and is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.model_spec import ModelSpec
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.status import EngineInfo
from headrace.core.step import StepStats
from headrace.engine.decode_graphs import DecodeGraphs, Work
from headrace.engine.engine import Engine
from headrace.engine.parts import EngineParts
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.engine.this_machine import measured_rate
from headrace.kv.storage import allocate_kv
from headrace.layers.moe import RoutingObserver
from headrace.machine.device import Device
from headrace.machine.profile import Rate
from headrace.ops.measure import Marks
from headrace.ops.records import AttentionBatch, LayerCache
from headrace.text.tokenizer import load_tokenizer

STEPS, WARM_UP = 96, 16
LONG_TOKENS = 8192  # of the second run: the host fills in a block table
BLOCK_TOKENS = 16
WIDTH = 64


class _Idle:
    """``engine.runner.DecoderLike``: adds one to a row ``kernels`` times."""

    def __init__(self, spec: ModelSpec, device: torch.device, kernels: int) -> None:
        self.spec = spec
        self.on_routing: RoutingObserver | None = None
        self._kernels = kernels
        self._row = torch.zeros(1, WIDTH, device=device)
        self._logits = torch.zeros(1, spec.vocab, device=device)

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[LayerCache], /
    ) -> torch.Tensor:
        for _ in range(self._kernels):
            self._row.add_(1.0)
        return self._row.expand(token_ids.shape[0], WIDTH)

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        return self._logits.expand(hidden.shape[0], self.spec.vocab).contiguous()


def probe_host(device: Device, kernels: int, marks: Marks) -> dict[str, Rate]:
    """``step_host``, ``block_host`` and ``token_host``: the host's seconds of a step, what they grow by for
    each block of a sequence, and those of a token's text.

    Args:
        kernels: of the model's step.
        marks: of the device.
    """
    checkpoint = open_checkpoint("tiny")
    spec, context = checkpoint.spec, LONG_TOKENS + STEPS + BLOCK_TOKENS
    decoder = _Idle(spec, device.torch_device, kernels)
    blocks = -(-context // BLOCK_TOKENS)
    kv = allocate_kv(spec, blocks + 1, BLOCK_TOKENS, "bf16", device.torch_device)
    graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=context)
    graphs.capture()

    def around(work: Work) -> Work:
        def marked() -> tuple[torch.Tensor, ...]:
            marks.begin()
            outputs = work()
            marks.point()
            return outputs

        return marked

    graphs.swap(1, graphs.record(1, around))  # the choice of a token is the GPU's work, too
    info = EngineInfo("probe", "", context, spec.vocab, 0, 0, "bf16", BLOCK_TOKENS, 1, {}, (), 0.0)
    limits = SchedulerConfig(blocks, BLOCK_TOKENS, context, context, 1, prefix_cache=False)
    tokenizer = load_tokenizer(checkpoint.text)
    engine = Engine(EngineParts(decoder, kv, tokenizer, limits, info, device, graphs))
    engine.run_ahead(False)  # or the GPU would hide what is measured
    short_s, text_s = _steps(engine, marks, BLOCK_TOKENS)
    long_s, _ = _steps(engine, marks, LONG_TOKENS)
    engine.close()
    each = (long_s - short_s) / ((LONG_TOKENS - BLOCK_TOKENS) / BLOCK_TOKENS)
    how = f"steps that compute nothing, {kernels:,} kernels in a graph"
    return {
        "step_host": measured_rate(max(short_s - text_s, 1e-7), "s", how),
        "block_host": measured_rate(max(each, 1e-9), "s", f"{how}, after {LONG_TOKENS:,} tokens"),
        "token_host": measured_rate(max(text_s, 1e-7), "s", "text of a token"),
    }


def _steps(engine: Engine, marks: Marks, prompt: int) -> tuple[float, float]:
    """The host's seconds of a decoding step after so many tokens, and those of texts: medians."""
    hosts: list[float] = []
    texts: list[float] = []

    def seen(stats: StepStats) -> None:
        if stats.phase == "decode":
            hosts.append(stats.seconds - marks.seconds(1)[0])
            texts.append(sum(c.seconds for c in stats.classes if c.id == "text"))

    engine.observe = seen
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    engine.submit(GenerationRequest(f"probe-{prompt}", (1,) * prompt, sampling))
    while engine.has_work():
        engine.step()
    return median(hosts[WARM_UP:]), median(texts[WARM_UP:])
