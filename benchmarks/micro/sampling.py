"""What the choice of a token costs: on the host, and on the GPU where its logits are.

    PYTHONPATH=src python -m benchmarks.micro.sampling [--out FILE] [--quick]

Device times are those of one CUDA graph that chooses for a batch many times over, rotating over several
sets of logits as a step's would be: written just before, so in the second-level cache. The host's are of
``engine.sampler.choose`` for one row, and of the copy that brings the row's logits to it. `torch` is what
greedy rows took before: argmax, gather and stack. `step` is a whole decoding step of an engine whose model
takes no time: scheduling, launch, choice, text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.micro.gpu_ops import timed
from benchmarks.residency.geometry import Figures, parser, report
from headrace.checkpoint.open import open_checkpoint
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.status import EngineInfo
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.engine.engine import Engine
from headrace.engine.parts import EngineParts
from headrace.engine.sampler import SamplingState, choose, uniform
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.kv.storage import allocate_kv
from headrace.machine.device import CudaDevice
from headrace.ops.records import GREEDY_RULE, Rule
from headrace.ops.registry import resolve
from headrace.text.tokenizer import load_tokenizer

DEVICE = torch.device("cuda")
VOCABS = {"gpt_oss": 201_088, "qwen3": 151_936}
BATCHES = (1, 4, 16)
CALLS = 20  # of a graph
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 0.7, "top_k": 40},
    "top_k_top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_k_large_top_p": {"temperature": 1.0, "top_k": 20_000, "top_p": 0.9},
}

# Log-probabilities are worked out on the host, and so their rows' tokens are chosen there.
STEPS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "temperature_logprobs": {"temperature": 1.0, "logprobs": 0},
}


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> np.ndarray:
    """float32 [rows, vocab]. model: a few likely tokens above a wide field, as a model's; normal: nothing
    stands out, thousands are as likely as each other."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 2
    if kind == "model":
        best = rng.integers(vocab, size=(rows, 60))
        np.put_along_axis(logits, best, 18 - np.sort(rng.exponential(2.5, best.shape)), 1)
    return logits.astype(np.float32)


def rule_of(params: dict[str, Any], seed: int) -> Rule:
    p = SamplingParams(**params)
    if p.temperature == 0:
        return GREEDY_RULE
    return p.temperature, p.min_p, float(p.top_k), p.top_p, uniform(seed, 0, 1)


def graph_us(device: CudaDevice, work: Callable[[], Any], replays: int = 9) -> float:
    return round(timed(device, [work] * CALLS, replays) * 1e6, 2)


def old_greedy(logits: torch.Tensor) -> torch.Tensor:
    ids = logits.argmax(-1, keepdim=True)
    return torch.stack((logits.gather(-1, ids).squeeze(-1), ids.squeeze(-1).float()))


def host_us(logits: np.ndarray, params: dict[str, Any]) -> float:
    state = SamplingState(SamplingParams(**params), 0, 0, ())
    times = []
    for position in range(5):
        start = time.perf_counter()
        choose(logits, state, position)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


def copy_us(logits: torch.Tensor) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits.cpu().numpy()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


class Said:
    """``engine.runner.DecoderLike`` that computes nothing and always says the same logits [1, V]."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.spec = replace(open_checkpoint("tiny").spec, vocab=logits.shape[1])
        self.on_routing = None
        self._logits = logits

    def forward(self, token_ids: torch.Tensor, batch: Any, kv: Any) -> torch.Tensor:
        return self._logits[:1, :8].expand(token_ids.shape[0], 8)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(hidden.shape[0], -1).contiguous()


def step_us(device: CudaDevice, batch: int, params: dict[str, Any], vocab: int) -> float:
    """Median of an engine's decoding steps whose model takes no time: what choosing adds to a step."""
    context, block, steps = 256, 16, 60
    checkpoint = open_checkpoint("tiny")
    values = logits_of("normal", 1, vocab, 3)
    values[:, checkpoint.spec.vocab :] -= 60.0  # ids that have a text
    decoder = Said(torch.from_numpy(values).to(DEVICE))
    blocks = batch * context // block
    kv = allocate_kv(checkpoint.spec, blocks + 1, block, "bf16", DEVICE)
    graphs = DecodeGraphs(decoder, kv, device, max_batch=batch, context=context)
    graphs.capture()
    info = EngineInfo("said", "", context, vocab, 0, 0, "bf16", block, 1, {}, (), 0.0)
    limits = SchedulerConfig(blocks, block, context, context, batch, prefix_cache=False)
    tokenizer = load_tokenizer(checkpoint.text)
    engine = Engine(EngineParts(decoder, kv, tokenizer, limits, info, device, graphs))
    for i in range(batch):
        sampling = SamplingParams(max_tokens=steps, ignore_eos=True, seed=i, **params)
        engine.submit(GenerationRequest(f"r{i}", (1, 2, 3), sampling))
    times = []
    while engine.has_work():
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    engine.close()
    return round(statistics.median(times[5:-5]) * 1e6, 1)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="the larger vocabulary only")
    args = made.parse_args()
    device, figures = CudaDevice(), Figures()
    ops = resolve(("triton", "reference"))
    counters = torch.zeros(max(BATCHES), dtype=torch.int32, device=DEVICE)
    with torch.inference_mode():
        for name, vocab in list(VOCABS.items())[: 1 if args.quick else None]:
            for kind in ("model", "normal"):
                values = logits_of(kind, max(BATCHES), vocab, 0)
                logits = torch.from_numpy(values).to(DEVICE)
                where = f"{name}_{kind}"
                for batch in BATCHES:
                    given = logits[:batch].contiguous()
                    if kind == "model":
                        figures.say(f"{where}_b{batch}_copy_us", copy_us(given))
                        torch_us = graph_us(device, lambda x=given: old_greedy(x))
                        figures.say(f"{where}_b{batch}_greedy_torch_us", torch_us)
                    for rule, params in PARAMS.items():
                        rules = torch.tensor(
                            [rule_of(params, i) for i in range(batch)],
                            dtype=torch.float64,
                            device=DEVICE,
                        )
                        took = graph_us(device, lambda x=given, r=rules: ops.sample(x, r, counters))
                        figures.say(f"{where}_b{batch}_{rule}_us", took)
                for batch in BATCHES if kind == "model" else ():
                    for rule, params in STEPS.items():
                        took = step_us(device, batch, params, vocab)
                        figures.say(f"{name}_b{batch}_step_{rule}_us", took)
                for rule, params in PARAMS.items():
                    figures.say(f"{where}_host_{rule}_us_a_row", host_us(values[0], params))
    report("sampling", figures.found, args.out)


if __name__ == "__main__":
    main()
