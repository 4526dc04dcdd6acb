"""Prefill attention on a GPU: our formats beside torch SDPA and FlashInfer (bars 03.3, 03.5).

    PYTHONPATH=src python -m benchmarks.attention.prefill [--sweep] [--quick] [--out FILE]

Causal, one sequence, whole prompts and a chunk of 2,048 rows at their end; medians of replays of a CUDA
graph. FLOPs count the keys that a row sees. Prints a line for each configuration and the bars at the end;
--out writes JSON, anew after each result. --sweep times the candidates of the tuning table instead.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.attention import gpu
from benchmarks.attention.gpu import DEVICE, DIM, HEADS, KV_HEADS
from headrace.core.kv_formats import FORMATS
from headrace.machine.device import CudaDevice
from headrace.ops.registry import resolve
from headrace.ops.triton import prefill_layout, prefill_tma, tuning

TOKENS = 16384
CHUNK = 2048
PAGES = {"bf16": 32, "fp8": 64, "nvfp4k-fp8v": 64}
NO_RESIDUALS = ("nvfp4k-fp8v, R = 0", 64)  # what residuals are compared with, and its page


def figures(seconds: float, rows: int, context: int) -> dict[str, Any]:
    seen = rows * (2 * context - rows + 1) / 2
    flops = 2 * 2 * HEADS * DIM * seen
    return {"us": round(seconds * 1e6, 1), "tflops": round(flops / seconds / 1e12, 1)}


def ours(
    device: CudaDevice, kv_format: str, rows: int, page: int, rank: int = gpu.RANK
) -> dict[str, Any]:
    ops = resolve(("triton", "reference"))
    q = torch.randn(rows, HEADS, DIM, device=DEVICE)
    if FORMATS[kv_format].sealed:
        cache, batch = gpu.sealed(kv_format, 1, TOKENS, page, rows, rank)
        work = partial(ops.sealed_attention_prefill, q, cache, batch, DIM**-0.5)
    else:
        cache, batch = gpu.paged(1, TOKENS, (KV_HEADS, DIM, page), rows)
        work = partial(ops.attention_prefill, q, cache, batch, DIM**-0.5)
    return figures(gpu.seconds_of(device, [work]), rows, TOKENS)


def sdpa(device: CudaDevice, backend: Any) -> dict[str, Any]:
    q = torch.randn(1, HEADS, TOKENS, DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = (
        torch.randn(1, KV_HEADS, TOKENS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    work = gpu.sdpa(backend, q, k, v, True)
    return figures(gpu.seconds_of(device, [work]), TOKENS, TOKENS)


def flashinfer(device: CudaDevice) -> dict[str, Any]:
    import flashinfer  # pyright: ignore[reportMissingImports]

    q = torch.randn(TOKENS, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = (
        torch.randn(TOKENS, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    work = partial(flashinfer.single_prefill_with_kv_cache, q, k, v, causal=True)
    return figures(gpu.seconds_of(device, [work]), TOKENS, TOKENS)


# One change each from the launches over pages as they lie.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {}, {"tau": 8}, {"num_stages": 5, "tile": 64}, {"num_stages": 5, "tile": 64, "tau": 8},
        {"polynomial": 0},
    ],
    "sealed": [
        {}, {"tau": 8}, {"polynomial": 1}, {"num_stages": 5}, {"rows": 64}, {"num_warps": 8},
    ],
}  # fmt: skip
KINDS = (("plain", "bf16"), ("sealed", "nvfp4k-fp8v"), ("sealed", "fp8"))


@contextmanager
def launched(kind: str, change: dict[str, Any]) -> Iterator[None]:
    """Launches over pages as they lie, with a change."""
    where = tuning.capability(DEVICE)
    row = tuning.PREFILL.get((where, kind), tuning.PREFILL[((0, 0), kind)])
    with (
        patch.dict(tuning.PREFILL, {(where, kind): replace(row, **change)}),
        patch.object(prefill_layout, "takes", lambda *args: False),
    ):
        yield


def sweep(run: gpu.Run) -> None:
    """Times of the laid out past, whole and without laying it out, and of the table's candidates."""
    for kind, kv_format in KINDS:
        for change in ("laid out", "layout alone"):
            about = {
                "op": "sweep",
                "kind": kind,
                "format": kv_format,
                "rows": TOKENS,
                "change": change,
            }
            with (
                patch.object(prefill_tma, "_launch", lambda q, *a, **k: q)
                if "alone" in change
                else nullcontext()
            ):
                run.attempt(about, partial(ours, run.device, kv_format, TOKENS, PAGES[kv_format]))
    for kind, kv_format in KINDS:
        for change in CHANGES[kind]:
            with launched(kind, change):
                about = {"op": "sweep", "kind": kind, "format": kv_format, "rows": TOKENS}
                work = partial(ours, run.device, kv_format, TOKENS, PAGES[kv_format])
                run.attempt(about | {"change": change}, work)


def bars(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Each bar's figure and what is wanted."""
    peer = gpu.best(results, op="peer")
    found = {f: gpu.best(results, op="ours", format=f, rows=TOKENS) for f in PAGES}
    told = "" if peer is None else f" ({peer['name']}, {peer['tflops']} TFLOP/s)"
    low = gpu.ratio(found["nvfp4k-fp8v"], found["bf16"])

    def residuals(rows: int) -> float | None:
        same = gpu.best(results, op="ours", format="nvfp4k-fp8v", page=NO_RESIDUALS[1], rows=rows)
        return gpu.ratio(same, gpu.best(results, op="ours", format=NO_RESIDUALS[0], rows=rows))

    return {
        f"03.3 bf16 over the fastest peer{told}": {
            "found": gpu.ratio(peer, found["bf16"]), "wanted": 0.85,
        },
        "03.3 time of low-bit history over bf16's, at most": {"found": low, "wanted": 1.1},
        f"03.5 time of R = 4 over R = 0, {TOKENS} rows, at most": {
            "found": residuals(TOKENS), "wanted": 1.05,
        },
        f"03.5 time of R = 4 over R = 0, {CHUNK} rows behind {TOKENS - CHUNK}, at most": {
            "found": residuals(CHUNK), "wanted": 1.05,
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time the tuning's candidates instead")
    parser.add_argument("--quick", action="store_true", help="whole prompts only")
    parser.add_argument("--out", help="write a report in JSON, too")
    args = parser.parse_args()
    with torch.inference_mode():
        run = gpu.Run("attention_prefill", CudaDevice(), args.out)
        if args.sweep:
            sweep(run)
            run.finish({})
            return
        for name, backend in gpu.sdpa_backends():
            run.attempt({"op": "peer", "name": name}, partial(sdpa, run.device, backend))
        if importlib.util.find_spec("flashinfer") is not None:
            run.attempt({"op": "peer", "name": "flashinfer"}, partial(flashinfer, run.device))
        for rows in (TOKENS,) if args.quick else (TOKENS, CHUNK):
            for kv_format, page in PAGES.items():
                for size in (page,) if kv_format == "bf16" or args.quick else (page, 128):
                    about = {"op": "ours", "format": kv_format, "page": size, "rows": rows}
                    run.attempt(about, partial(ours, run.device, kv_format, rows, size))
            name, size = NO_RESIDUALS
            about = {"op": "ours", "format": name, "page": size, "rows": rows}
            run.attempt(about, partial(ours, run.device, "nvfp4k-fp8v", rows, size, 0))
        run.finish(bars(run.results))


if __name__ == "__main__":
    main()
