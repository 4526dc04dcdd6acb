"""How fast the CPU kernels are: bytes of weights a second, and floating-point operations a second.

    PYTHONPATH=src python -m benchmarks.micro.cpu_linear [--threads N] [--isa avx2] [--seconds 0.3]

Prints one JSON object. A matrix-vector product is bound by reading weights, so it stands beside a
plain read of the same bytes by the same threads; a product with many tokens is bound by arithmetic,
so it stands beside fused multiply-adds on registers only. Every figure is the best of the runs in its
time; `cached` matrices fit the L2 cache, `memory` ones are several times the last level.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.core.numeric import FORMATS
from headrace.formats.base import PackedTensor
from headrace.ops.cpu import _native, control
from headrace.ops.cpu.linear import linear

COLS = 2048
ROWS = {"cached": 256, "memory": 65536}
TOKENS = (2, 4, 8, 16, 64, 512)


def best_s(call: Callable[[], Any], seconds: float) -> float:
    """The shortest of the calls made in ``seconds``, at least three of them."""
    best, runs, stop = float("inf"), 0, time.perf_counter() + seconds
    while runs < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def weights(name: str, rows: int) -> PackedTensor:
    """Bytes whose values are finite: what they are does not change the time."""
    shape = (rows, COLS)
    if name in ("f32", "f16", "bf16"):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]
        return PackedTensor(name, shape, {"data": torch.ones(shape, dtype=dtype)})
    block = FORMATS[name].block_weights

    def full(cols: int) -> torch.Tensor:
        return torch.full((rows, cols), 0x31, dtype=torch.uint8)

    if name == "fp8_e4m3":
        return PackedTensor(name, shape, {"codes": full(COLS), "scale": torch.tensor(0.5)})
    if name in ("mxfp4", "nvfp4"):
        parts = {"codes": full(COLS // 2), "scales": full(COLS // block)}
        if name == "nvfp4":
            parts["global_scale"] = torch.tensor(0.5)
        return PackedTensor(name, shape, parts)
    return PackedTensor(name, shape, {"blocks": full(FORMATS[name].row_nbytes(COLS))})


def measure(name: str, args: argparse.Namespace, peaks: dict[str, float]) -> dict[str, Any]:
    result: dict[str, Any] = {"format": name}
    for place, rows in ROWS.items():
        w, x = weights(name, rows), torch.randn(1, COLS)
        gbps = w.nbytes / best_s(lambda w=w, x=x: linear(x, w), args.seconds) / 1e9
        result[f"matvec_{place}_gbps"] = round(gbps, 2)
        result[f"matvec_{place}_percent_of_read"] = round(
            100 * gbps / peaks[f"read_{place}_gbps"], 1
        )
    w = weights(name, 1024)
    for tokens in TOKENS:
        x = torch.randn(tokens, COLS)
        gflops = 2 * tokens * 1024 * COLS / best_s(lambda x=x: linear(x, w), args.seconds) / 1e9
        result[f"gemm_{tokens}_gflops"] = round(gflops, 1)
    result["gemm_512_percent_of_fma"] = round(
        100 * result["gemm_512_gflops"] / peaks["fma_gflops"], 1
    )
    return result


def find_peaks(args: argparse.Namespace) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for place, rows in ROWS.items():
        data = torch.ones(rows * COLS // (1 if place == "memory" else 2), dtype=torch.uint8)
        seconds = best_s(lambda d=data: _native.read(d.data_ptr(), d.numel()), args.seconds)
        peaks[f"read_{place}_gbps"] = data.numel() / seconds / 1e9
    steps = 1 << 17  # half a millisecond: short enough to run undisturbed
    operations = 2 * _native.multiply_adds(steps)
    peaks["fma_gflops"] = (
        operations / best_s(lambda: _native.multiply_adds(steps), args.seconds) / 1e9
    )
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=control.num_threads())
    parser.add_argument(
        "--isa", default="", help="scalar, avx2, avx512 or avx512_amx; the best by default"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each figure")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    args = parser.parse_args()
    control.select_isa(args.isa)
    control.set_num_threads(args.threads)
    peaks = find_peaks(args)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    report = {
        "benchmark": "cpu_linear",
        "commit": commit.stdout.strip(),
        "isa": control.isa(),
        "threads": args.threads,
        "cols": COLS,
        "peaks": {k: round(v, 1) for k, v in peaks.items()},
        "results": [measure(name, args, peaks) for name in args.formats],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
