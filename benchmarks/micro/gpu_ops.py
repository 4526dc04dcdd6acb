"""How fast the GPU's operations are: bytes a second beside what a plain read of memory gets.

    PYTHONPATH=src python -m benchmarks.micro.gpu_ops [--model REF] [--quick]

Prints one JSON object. Each figure is the median of replays of one CUDA graph that runs the operation
over operands that rotate through more memory than the caches hold; `percent` is of the read rate
measured in the same run. With --model also decoding of a whole model, by replays alone and through
the engine, against the bytes of its matrices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.formats.base import PackedTensor
from headrace.machine.device import CudaDevice
from headrace.ops.records import AttentionBatch, LayerKV
from headrace.ops.registry import resolve
from headrace.ops.triton.products import product

CACHE_NBYTES = 1 << 30  # operands rotate over this much: twenty times an H200's L2
DEVICE = torch.device("cuda")


@triton.jit
def read_kernel(x, out, n, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK * LOOPS
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(LOOPS):
        acc += tl.load(x + start + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def timed(device: CudaDevice, works: Sequence[Callable[[], Any]], replays: int = 9) -> float:
    """Seconds of one of ``works``, all of which run one after the other in a graph."""
    graph = device.graph()

    def run() -> tuple[torch.Tensor, ...]:
        for work in works:
            work()
        return ()

    graph.capture(run)
    times = []
    for _ in range(replays):
        start, stop = device.event(), device.event()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times) / len(works)


def read_rate(device: CudaDevice) -> float:
    """GB/s of a plain read of 2 GiB."""
    x = torch.ones(1 << 29, dtype=torch.int32, device=DEVICE)
    block, loops = 2048, 16
    programs = x.numel() // (block * loops)
    out = torch.empty(programs, dtype=torch.int32, device=DEVICE)
    work = lambda: read_kernel[(programs,)](x, out, x.numel(), block, loops, num_warps=8)  # noqa: E731
    return x.numel() * 4 / timed(device, [work]) / 1e9


def copies(nbytes: int) -> int:
    return max(2, min(64, CACHE_NBYTES // nbytes))


def linears(device: CudaDevice, ops: Any, peak: float, quick: bool) -> list[dict[str, Any]]:
    results = []
    shapes = {
        "gpt_oss_qkv": (5120, 2880),
        "gpt_oss_o": (2880, 4096),
        "gpt_oss_head": (201088, 2880),
        "llama8b_down": (4096, 14336),
        "smollm2_qkv": (960, 576),
    }
    for name, (rows, cols) in shapes.items():
        count = copies(rows * cols * 2)
        weights = [
            PackedTensor("bf16", (rows, cols), {"data": w})
            for w in torch.randn(count, rows, cols, device=DEVICE, dtype=torch.bfloat16)
        ]
        for tokens in (1, 16) if quick else (1, 2, 4, 8, 16, 64, 512):
            x = torch.randn(tokens, cols, device=DEVICE)
            x16 = x.bfloat16()
            ours = timed(device, [lambda w=w, x=x: ops.linear(x, w) for w in weights])
            cublas = timed(device, [lambda w=w, x=x16: product(x, w) for w in weights])
            gbps = rows * cols * 2 / ours / 1e9
            results.append(
                {
                    "op": "linear", "shape": name, "tokens": tokens, "us": round(ours * 1e6, 2),
                    "gbps": round(gbps, 1), "percent": round(100 * gbps / peak, 1),
                    "cublas_without_cast_us": round(cublas * 1e6, 2),
                    "tflops": round(2 * tokens * rows * cols / ours / 1e12, 2),
                }
            )  # fmt: skip
    return results


def paged(
    sequences: int, context: int, shape: tuple[int, int, int], rows: int
) -> tuple[LayerKV, AttentionBatch]:
    kv_heads, dim, block = shape
    blocks = -(-context // block)
    size = (sequences * blocks, kv_heads, block, dim)
    cache = LayerKV(*(torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)))
    tables = torch.randperm(sequences * blocks, device=DEVICE).int().view(sequences, blocks)
    batch = AttentionBatch(
        query_start=torch.arange(sequences + 1, device=DEVICE, dtype=torch.int32) * rows,
        context_lens=torch.full((sequences,), context, device=DEVICE, dtype=torch.int32),
        block_tables=tables,
        positions=torch.arange(context - rows, context, device=DEVICE).repeat(sequences),
        slots=torch.zeros(sequences * rows, device=DEVICE, dtype=torch.int64),
        decode=rows == 1,
    )
    return cache, batch


def decodes(device: CudaDevice, ops: Any, peak: float, quick: bool) -> list[dict[str, Any]]:
    results = []
    geometries = {"gqa32:8x128": (32, 8, 128), "gpt_oss64:8x64": (64, 8, 64)}
    sizes = [(1, 1024), (1, 4096), (1, 32768), (1, 131072), (8, 32768), (16, 2048)]
    for name, (heads, kv_heads, dim) in geometries.items():
        for sequences, context in sizes[::2] if quick else sizes:
            nbytes = sequences * context * kv_heads * dim * 4
            q = torch.randn(sequences, heads, dim, device=DEVICE)
            sets = [
                paged(sequences, context, (kv_heads, dim, 32), 1) for _ in range(copies(nbytes))
            ]
            seconds = timed(
                device,
                [partial(ops.attention_decode, q, *one, dim**-0.5) for one in sets],
            )
            gbps = nbytes / seconds / 1e9
            results.append(
                {
                    "op": "attention_decode", "heads": name, "sequences": sequences,
                    "context": context, "us": round(seconds * 1e6, 2), "gbps": round(gbps, 1),
                    "percent": round(100 * gbps / peak, 1),
                }
            )  # fmt: skip
    return results


def prefills(device: CudaDevice, ops: Any, quick: bool) -> list[dict[str, Any]]:
    results = []
    for context in (2048,) if quick else (512, 2048, 8192):
        heads, kv_heads, dim = 32, 8, 128
        cache, batch = paged(1, context, (kv_heads, dim, 32), context)
        q = torch.randn(context, heads, dim, device=DEVICE)
        seconds = timed(device, [partial(ops.attention_prefill, q, cache, batch, dim**-0.5)])
        flops = 2 * 2 * heads * dim * context * (context + 1) / 2
        results.append(
            {
                "op": "attention_prefill", "tokens": context, "us": round(seconds * 1e6, 1),
                "tflops": round(flops / seconds / 1e12, 1),
            }
        )  # fmt: skip
    return results


def small_ops(device: CudaDevice, ops: Any) -> list[dict[str, Any]]:
    """Operations whose launch is what they cost, by gpt-oss's shapes, one row."""
    x, weight = torch.randn(1, 2880, device=DEVICE), torch.ones(2880, device=DEVICE)
    logits = torch.randn(1, 128, device=DEVICE)
    head = torch.randn(1, 201088, device=DEVICE)
    calls = {
        "rmsnorm": lambda: ops.rmsnorm(x, weight, 1e-5),
        "router_topk": lambda: ops.router_topk(logits, 4, "topk_softmax", True),
        "argmax_201088": lambda: head.argmax(-1),
    }
    return [
        {"op": name, "us": round(timed(device, [call] * 50) * 1e6, 2)}
        for name, call in calls.items()
    ]


def whole_model(ref: str, peak: float) -> list[dict[str, Any]]:
    """Decoding of a model through its captured graphs, and through the engine."""
    from headrace.core.config import EngineConfig
    from headrace.core.request import GenerationRequest, SamplingParams
    from headrace.core.step import ScheduledChunk
    from headrace.engine.engine import Engine

    engine = Engine.load(EngineConfig(ref, device="cuda", context=4096))
    choices = {c.name: c.value for c in engine.info.choices}
    spec = engine._decoder.spec
    from headrace.engine.vram_plan import dense_nbytes

    nbytes = dense_nbytes(spec, choices["dense_format"])
    graphs, blocks = engine._runner._graphs, tuple(range(128))
    results = []
    for batch in (1, 2, 4, 8, 16):
        chunks = [ScheduledChunk(i, (5,), 200, blocks, True) for i in range(batch)]
        times = []
        for _ in range(30):
            start = time.perf_counter()
            graphs.run(chunks).picked.cpu()
            times.append(time.perf_counter() - start)
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        for i in range(batch):
            prompt = tuple((7 * i + j) % 200 for j in range(8))
            engine.submit(GenerationRequest(f"b{batch}-{i}", prompt, params))
        steps = []
        while engine.has_work():
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        step = statistics.median(times)
        results.append(
            {
                "op": "decode", "model": spec.family, "batch": batch, "dense_nbytes": nbytes,
                "replay_us": round(step * 1e6, 1),
                "replay_tokens_per_s": round(batch / step, 1),
                "engine_tokens_per_s": round(batch / statistics.median(steps), 1),
                "percent_of_floor": round(100 * nbytes / peak / 1e9 / step, 1),
            }
        )  # fmt: skip
    engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="also decode with this model")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    args = parser.parse_args()
    device = CudaDevice()
    ops = resolve(("triton", "reference"))
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    with torch.inference_mode():
        peak = read_rate(device)
        results = small_ops(device, ops)
        results += linears(device, ops, peak, args.quick)
        results += decodes(device, ops, peak, args.quick)
        results += prefills(device, ops, args.quick)
    torch.cuda.empty_cache()
    if args.model:
        results += whole_model(args.model, peak)
    report = {
        "benchmark": "gpu_ops",
        "commit": commit.stdout.strip(),
        "gpu": device.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_gbps": round(peak, 1),
        "results": results,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
