"""Prefill attention on a GPU: our formats beside torch SDPA and FlashInfer (bar 03.3).

    PYTHONPATH=src python -m benchmarks.attention.prefill [--sweep] [--quick] [--out FILE]

Prints one JSON object: causal, one sequence, whole prompts and a chunk of 2,048 rows at their end; medians
of replays of a CUDA graph. FLOPs count the keys that a row sees.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.attention import gpu
from benchmarks.attention.gpu import DEVICE, DIM, HEADS, KV_HEADS
from headrace.core.kv_formats import FORMATS
from headrace.machine.device import CudaDevice
from headrace.ops.registry import resolve
from headrace.ops.triton import tuning

TOKENS = 16384
CHUNK = 2048
PAGES = {"bf16": 32, "fp8": 64, "nvfp4k-fp8v": 64}


def figures(seconds: float, rows: int, context: int) -> dict[str, Any]:
    seen = rows * (2 * context - rows + 1) / 2
    flops = 2 * 2 * HEADS * DIM * seen
    return {"us": round(seconds * 1e6, 1), "tflops": round(flops / seconds / 1e12, 1)}


def ours(device: CudaDevice, kv_format: str, rows: int, page: int) -> dict[str, Any]:
    ops = resolve(("triton", "reference"))
    q = torch.randn(rows, HEADS, DIM, device=DEVICE)
    if FORMATS[kv_format].sealed:
        cache, batch = gpu.sealed(kv_format, 1, TOKENS, page, rows)
        work = partial(ops.sealed_attention_prefill, q, cache, batch, DIM**-0.5)
    else:
        cache, batch = gpu.paged(1, TOKENS, (KV_HEADS, DIM, page), rows)
        work = partial(ops.attention_prefill, q, cache, batch, DIM**-0.5)
    return figures(gpu.timed(device, [work] * 3), rows, TOKENS)


def sdpa(device: CudaDevice, backend: Any) -> dict[str, Any]:
    q = torch.randn(1, HEADS, TOKENS, DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = (
        torch.randn(1, KV_HEADS, TOKENS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    work = gpu.sdpa(backend, q, k, v, True)
    return figures(gpu.timed(device, [work] * 3), TOKENS, TOKENS)


def flashinfer(device: CudaDevice) -> dict[str, Any]:
    import flashinfer  # pyright: ignore[reportMissingImports]

    q = torch.randn(TOKENS, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = (
        torch.randn(TOKENS, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    work = partial(flashinfer.single_prefill_with_kv_cache, q, k, v, causal=True)
    return figures(gpu.timed(device, [work] * 3), TOKENS, TOKENS)


def sweep(device: CudaDevice, results: list[dict[str, Any]]) -> None:
    """The tuning table's candidates, one change from the table's row at a time."""
    where = tuning.capability(DEVICE)
    changes: dict[str, list[dict[str, Any]]] = {
        "plain": [
            {"tau": 8}, {"polynomial": 1}, {"tau": 8, "polynomial": 1}, {"tile": 64, "num_stages": 3},
            {"rows": 64, "num_warps": 4, "tile": 64, "num_stages": 3}, {"rows": 64, "num_warps": 4},
        ],
        "sealed": [
            {"tau": 8}, {"polynomial": 1}, {"num_stages": 3}, {"num_warps": 4},
            {"rows": 64, "num_warps": 4}, {"rows": 256},
        ],
    }  # fmt: skip
    for kind, kv_format in (("plain", "bf16"), ("sealed", "nvfp4k-fp8v")):
        row = tuning.PREFILL.get((where, kind), tuning.PREFILL[((0, 0), kind)])
        for change in changes[kind]:
            tuning.PREFILL[(where, kind)] = replace(row, **change)
            about = {"op": "sweep", "format": kv_format, "rows": TOKENS, "change": change}
            gpu.attempt(results, about, partial(ours, device, kv_format, TOKENS, PAGES[kv_format]))
        tuning.PREFILL[(where, kind)] = row


def bars(results: list[dict[str, Any]]) -> dict[str, Any]:
    peer = min(
        (r for r in results if r["op"] == "peer" and "us" in r), key=lambda r: r["us"], default=None
    )
    found = {f: gpu.best(results, op="ours", format=f, rows=TOKENS) for f in PAGES}
    return {
        "03.3 bf16 against the fastest peer": {"found": gpu.ratio(peer, found["bf16"]), "wanted": 0.85},
        "03.3 time of low-bit history over bf16's": {
            "found": gpu.ratio(found["nvfp4k-fp8v"], found["bf16"]), "wanted": 1.1,
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time the tuning's candidates, too")
    parser.add_argument("--quick", action="store_true", help="whole prompts only")
    parser.add_argument("--out", help="write the report to a file, too")
    args = parser.parse_args()
    device = CudaDevice()
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        peak = gpu.read_rate(device)
        for rows in (TOKENS,) if args.quick else (TOKENS, CHUNK):
            for kv_format, page in PAGES.items():
                for size in (page,) if kv_format == "bf16" or args.quick else (page, 128):
                    about = {"op": "ours", "format": kv_format, "page": size, "rows": rows}
                    gpu.attempt(results, about, partial(ours, device, kv_format, rows, size))
        for name, backend in gpu.sdpa_backends():
            gpu.attempt(results, {"op": "peer", "name": name}, partial(sdpa, device, backend))
        if importlib.util.find_spec("flashinfer") is not None:
            gpu.attempt(results, {"op": "peer", "name": "flashinfer"}, partial(flashinfer, device))
        if args.sweep:
            sweep(device, results)
    gpu.write(gpu.report("attention_prefill", device, peak, bars(results), results), args.out)


if __name__ == "__main__":
    main()
