"""What matrix tiles (AMX) gain: products of many tokens, and the CPU's experts with several tokens each.

    PYTHONPATH=src python -m benchmarks.micro.cpu_tiles --threads 15 [--isa avx512_amx] [--gigabytes 4]

Prints one JSON object. Dense products: GFLOP/s (two operations for each weight and token) of the kernels
on float32 registers and of tiles, in turn, the best of the runs in its time. Experts: requests for whole
experts at random, every token using each of them, in GB/s of slices, in each way that there is (one that a format
does not have is as `none`), in turn. `--isa avx512_bf16` runs the same tiles without AMX.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from typing import Any

import torch

from benchmarks.micro.cpu_experts import GPT_OSS, OTHER, Bench, Store, cpu_name
from benchmarks.micro.cpu_linear import best_s, weights
from headrace.experts.slab import slab_layout
from headrace.ops.cpu import control
from headrace.ops.cpu.linear import linear, tiled_linear

NEVER = 1 << 30
# How an item's products can be computed: the fewest tokens of a request and of an item for each (tune_tiles).
WAYS = {
    "none": {"tokens": NEVER, "pairs": NEVER, "narrow_pairs": NEVER, "block_pairs": NEVER},
    "blocks": {"tokens": NEVER, "pairs": NEVER, "narrow_pairs": NEVER, "block_pairs": 1},
    "narrow": {"tokens": 1, "pairs": NEVER, "narrow_pairs": 1, "block_pairs": NEVER},
    "whole": {"tokens": 1, "pairs": 1, "narrow_pairs": NEVER, "block_pairs": NEVER},
}
COLS = 2048  # as weights() makes them


def dense(name: str, args: argparse.Namespace) -> dict[str, Any]:
    w, found = weights(name, args.rows), dict[str, Any](format=name)
    for tokens in args.tokens:
        x = torch.randn(tokens, COLS)
        work = 2 * tokens * args.rows * COLS
        control.select_isa("avx512")
        registers = work / best_s(lambda x=x: linear(x, w), args.seconds) / 1e9
        control.select_isa(args.isa)
        tiles = work / best_s(lambda x=x: tiled_linear(x, w), args.seconds) / 1e9
        found[str(tokens)] = [round(registers, 1), round(tiles, 1)]
    return found


def experts(name: str, args: argparse.Namespace) -> dict[str, Any]:
    hidden, inner = GPT_OSS if name == "mxfp4" else OTHER
    store = Store(slab_layout(name, hidden, inner, has_bias=True), int(args.gigabytes * 1e9))
    cpus = sorted(os.sched_getaffinity(0))
    found: dict[str, Any] = {"format": name}
    most = max(args.expert_tokens)
    with Bench(store, args.threads, cpus, args.experts, most) as bench:
        reads: list[float] = []
        for tokens in args.expert_tokens:
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                reads.append(bench.quiet_gbps(args.expert_seconds, read=True))
                for way, found_so_far in rates.items():
                    bench.service.tune_tiles(**WAYS[way])
                    rate = bench.quiet_gbps(args.expert_seconds, read=False, tokens=tokens)
                    found_so_far.append(rate)
            found[str(tokens)] = {way: round(max(r), 1) for way, r in rates.items()}
        found["read_gbps"] = round(max(reads), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=control.num_threads())
    parser.add_argument("--isa", default="avx512_amx", help="avx512_amx or avx512_bf16")
    parser.add_argument("--seconds", type=float, default=0.1, help="time of a dense figure")
    parser.add_argument("--rows", type=int, default=4096, help="of a dense matrix")
    parser.add_argument("--formats", nargs="*", default=["mxfp4", "bf16", "q8_0", "q4_k"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--expert-formats", nargs="*", default=["mxfp4", "q8_0"])
    parser.add_argument("--expert-tokens", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--expert-seconds", type=float, default=0.2, help="time of a rate")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument("--experts", type=int, default=3, help="whole experts in a request")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the store")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    control.select_isa(args.isa)
    control.set_num_threads(args.threads)
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "benchmark": "cpu_tiles",
        "commit": args.commit or git.stdout.strip(),
        "cpu": cpu_name(),
        "isa": control.isa(),
        "threads": args.threads,
        "dense_rows_cols": [args.rows, COLS],
        "dense_gflops_registers_tiles": [],
        "experts_gbps_without_with_tiles": [],
    }
    for key, names, measure in (
        ("dense_gflops_registers_tiles", args.formats, dense),
        ("experts_gbps_without_with_tiles", args.expert_formats, experts),
    ):
        for name in names:
            report[key].append(measure(name, args))
            print("#", json.dumps(report[key][-1]), flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
