"""Products of few rows with packed matrices on a GPU: exactness and GB/s of stored bytes, in a graph.

python -m benchmarks.micro.gpu_packed --limit 40 --out packed.json

Shapes of Qwen3-30B-A3B: q, k and v together 5,120 x 2,048, o 2,048 x 4,096, the head 151,936 x 2,048.
Kernels are compiled by several processes first. Matrices rotate, so that none is found in a cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lock import alone

TUNINGS = {
    "A": {},
    "B": {"split_warps": 2},
    "C": {"split_warps": 2, "split": 8},
    "D": {"split_rows_of": 16, "split_warps": 2, "split": 2},
    "E": {"split": 1},
    "F": {"split_rows_of": 16, "split_warps": 2},
    "G": {"split_rows_of": 4},
    "a": {},
    "b": {"float_rows": 16},
}
# (format, tuning, columns, rows, tokens), the most important first
CASES = [
    *(("q4_k", t, 4096, 2048, 1) for t in "ABCDFG"),
    *(("q4_k", t, 2048, 5120, 1) for t in "ABDEF"),
    *(("q6_k", t, 4096, 2048, 1) for t in "ABF"),
    *(("q8_0", t, 4096, 2048, 1) for t in "AF"),
    *(("q6_k", t, 2048, 5120, 1) for t in "AE"),
    *((f, "A", 2048, 5120, 4) for f in ("q4_k", "q6_k", "q8_0")),
    *((f, "A", 2048, 151_936, 1) for f in ("q4_k", "q6_k", "q5_k")),
    *((f, t, 2048, 5120, 1) for f in ("iq4_xs", "iq4_nl", "mxfp4") for t in "ab"),
]
EXPANDED = ("q4_k", "q6_k", "q8_0", "iq4_xs")
PLAIN = ((5120, 2048), (2048, 4096), (151_936, 2048))
ROTATE_NBYTES = 150_000_000


Case = tuple[str, str, int, int, int]


def tuning_of(case: Case) -> Any:
    from headrace.ops.triton.packed_few import PackedTuning

    found = PackedTuning(**TUNINGS[case[1]])
    return found if case[3] <= found.split_rows else replace(found, split=1)


def check(case: Case) -> dict[str, Any]:
    """Compiles; errors against float64 of what the bytes stand for."""
    import numpy as np
    import torch

    from headrace.formats.base import PackedTensor, dequantize
    from headrace.formats.planes import in_planes
    from headrace.ops.triton.packed_few import linear_packed
    from tests.fixtures.cpu_oracle import random_packed

    fmt, _, columns, _, tokens = case
    w = random_packed(fmt, 64, columns, np.random.default_rng(3))
    on_gpu = in_planes(w)
    on_gpu = PackedTensor(fmt, w.shape, {k: v.contiguous().cuda() for k, v in on_gpu.parts.items()})
    x = torch.randn(tokens, columns)
    start = time.perf_counter()
    y = linear_packed(x.cuda(), (on_gpu,), (None,), None, tuning_of(case))[0]
    want = x.double() @ dequantize(w).double().T
    error = float((y.cpu().double() - want).abs().max() / want.abs().max())
    found: dict[str, Any] = {"error": error, "compile_s": round(time.perf_counter() - start, 1)}
    if tokens > 1:
        one = linear_packed(x.cuda()[:1], (on_gpu,), (None,), None, tuning_of(case))[0]
        found["same_alone"] = bool(torch.equal(one[0], y[0]))
    return found


def matrix(fmt: str, rows: int, columns: int) -> Any:
    """Random bytes on the GPU, in planes."""
    import torch

    from headrace.core.block_planes import SCALES_APART
    from headrace.core.numeric import FORMATS
    from headrace.formats.base import PackedTensor

    def part(nbytes: int) -> torch.Tensor:
        return torch.randint(0, 60, (rows, nbytes), dtype=torch.uint8, device="cuda")

    if fmt not in SCALES_APART:
        return PackedTensor(
            fmt, (rows, columns), {"blocks": part(FORMATS[fmt].row_nbytes(columns))}
        )
    weights, codes, scales = SCALES_APART[fmt]
    blocks = columns // weights
    return PackedTensor(
        fmt, (rows, columns), {"codes": part(blocks * codes), "scales": part(blocks * scales)}
    )


def speed(case: Case) -> dict[str, Any]:
    """GB/s of stored bytes, us of a product without cutting the activation into terms."""
    import torch

    from benchmarks.residency.kernels import timed
    from headrace.ops.triton import packed_few
    from headrace.ops.triton.packed_few import linear_packed

    fmt, _, columns, rows, tokens = case
    first = matrix(fmt, rows, columns)
    count = max(1, min(24, ROTATE_NBYTES // first.nbytes))
    many = [first, *(matrix(fmt, rows, columns) for _ in range(count - 1))]
    x = torch.randn(tokens, columns, device="cuda")
    terms, packed_few._terms = packed_few._terms(x), lambda _: terms
    tune = tuning_of(case)
    seconds = timed(lambda: [linear_packed(x, (w,), (None,), None, tune) for w in many]) / count
    packed_few._terms = TERMS
    return {"us": round(seconds * 1e6, 2), "gbps": round(first.nbytes / seconds / 1e9)}


TERMS: Any = None


def plain(rows: int, columns: int, tokens: int) -> dict[str, Any]:
    """The same with a bfloat16 matrix."""
    import torch

    from benchmarks.residency.kernels import timed
    from headrace.formats.base import PackedTensor
    from headrace.ops.triton.few_rows import linear_few

    count = max(1, min(24, ROTATE_NBYTES // (rows * columns * 2)))
    many = [
        PackedTensor("bf16", (rows, columns), {"data": torch.randn(rows, columns, device="cuda").bfloat16()})
        for _ in range(count)
    ]  # fmt: skip
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    seconds = timed(lambda: [linear_few(x, (w,), (None,)) for w in many]) / count
    return {"us": round(seconds * 1e6, 2), "gbps": round(rows * columns * 2 / seconds / 1e9)}


def prompts(fmt: str) -> list[dict[str, Any]]:
    """us of expanding a matrix, and of cuBLAS's product with rows of a prompt, 5,120 x 2,048."""
    import torch

    from benchmarks.residency.kernels import timed
    from headrace.ops.triton.packed_many import expanded

    w = [matrix(fmt, 5120, 2048) for _ in range(12)]
    seconds = timed(lambda: [expanded(one) for one in w]) / len(w)
    found: list[dict[str, Any]] = [{"format": fmt, "expand_us": round(seconds * 1e6, 2)}]
    wide = [expanded(one) for one in w]
    for tokens in (32, 128, 512, 2048):
        x = torch.randn(tokens, 2048, device="cuda").bfloat16()
        seconds = timed(lambda x=x: [torch.mm(x, m.T, out_dtype=torch.float32) for m in wide])
        found.append({"tokens": tokens, "mm_us": round(seconds / len(w) * 1e6, 2)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds altogether")
    parser.add_argument("--lock", type=Path, help="a file; for runs beside others")
    parser.add_argument("--prompts", action="store_true", help="expanding matrices, too")
    parser.add_argument("--compilers", type=int, default=14)
    parser.add_argument("--cases", help="of a compiling process: numbers, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("packed.json"))
    args = parser.parse_args()
    begun = time.perf_counter()
    if args.cases:
        for number in map(int, args.cases.split(",")):
            try:
                found = check(CASES[number])
            except Exception as error:
                print(f"{CASES[number]}: {error!r}"[:600], file=sys.stderr, flush=True)
                continue
            print(json.dumps([number, found]), flush=True)
        return
    own = [sys.executable, "-m", "benchmarks.micro.gpu_packed", "--cases"]
    workers = []
    for n in range(args.compilers):
        numbers = ",".join(map(str, range(n, len(CASES), args.compilers)))
        if numbers:
            workers.append(subprocess.Popen([*own, numbers], stdout=subprocess.PIPE, text=True))
    results: dict[str, Any] = {"cases": [], "plain": [], "prompts": []}
    try:
        import torch

        from benchmarks.residency.kernels import read_only, timed
        from headrace.ops.triton import packed_few

        global TERMS
        TERMS = packed_few._terms
        data = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
        out = torch.zeros(132 * 8, dtype=torch.int32, device="cuda")
        seconds = timed(lambda: read_only[(132 * 8,)](data, out, data.numel(), 4096, num_warps=8))
        results["read_only_gbps"] = round(data.nbytes / seconds / 1e9)
        x = torch.randn(1, 2048, device="cuda")
        results["terms_us"] = timed(lambda: [TERMS(x) for _ in range(24)]) / 24 * 1e6
        print(json.dumps(results), flush=True)
        with alone(args.lock):
            for rows, columns in PLAIN:
                for tokens in (1, 4, 16):
                    results["plain"].append([rows, columns, tokens, plain(rows, columns, tokens)])
        print(json.dumps(results["plain"]), flush=True)
        if args.prompts:
            results["prompts"] = [prompts(fmt) for fmt in EXPANDED]
            print(json.dumps(results["prompts"]), flush=True)
        # Kernels that no process has compiled in time are left out.
        checked: dict[int, Any] = {}
        for worker in workers:
            left = args.limit * 0.72 - (time.perf_counter() - begun)
            try:
                text, _ = worker.communicate(timeout=max(left, 0.1))
            except subprocess.TimeoutExpired:
                worker.kill()
                text, _ = worker.communicate()
            checked |= dict(json.loads(line) for line in text.splitlines() if line[:1] == "[")
        print("compiled", len(checked), round(time.perf_counter() - begun, 1), flush=True)
        with alone(args.lock):
            for number, case in enumerate(CASES):
                if number not in checked or time.perf_counter() - begun > args.limit:
                    continue
                result = {"case": case, **checked[number], **speed(case)}
                results["cases"].append(result)
                print(json.dumps(result), flush=True)
    finally:
        for worker in workers:
            worker.kill()
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
