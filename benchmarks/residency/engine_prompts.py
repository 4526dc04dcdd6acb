"""Long prompts in a whole engine whose experts are streamed: chunks of its own choice, and of 2,048 tokens.

    python -m benchmarks.residency.engine_prompts --layers 12 --vram-gib 4 --folder /dev/shm

Qwen3-30B-A3B's geometry in a GGUF file with random weights, as ``packed_dense``'s. Time to the first token of
prompts alone; then the steps of a sequence that decodes while a prompt comes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lock import alone
from headrace.core.config import EngineConfig
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.engine.engine import Engine
from tests.fixtures.random_gguf import QWEN3_30B_A3B, write_random
from tests.fixtures.toy_engine import drain

CONTEXT = 40_960
DECODED = 64


def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    """No prefix of another seed's."""
    return tuple((7 * i + 13 * seed) % 241 + 3 for i in range(tokens))


def ttft(engine: Engine, tokens: int, seed: int) -> float:
    begun = time.perf_counter()
    once = SamplingParams(max_tokens=1)
    engine.submit(GenerationRequest("p", prompt(tokens, seed), once))
    drain(engine)
    return round(time.perf_counter() - begun, 3)


def beside(engine: Engine, tokens: int, seed: int) -> dict[str, float]:
    """Steps of a decoding sequence: before a prompt of so many tokens comes, and until it has its answer."""
    longer = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    engine.submit(GenerationRequest("talk", prompt(16, seed), longer))
    times: list[float] = []
    for step in range(DECODED):
        if step == DECODED // 2:
            engine.submit(
                GenerationRequest("p", prompt(tokens, seed + 1), SamplingParams(max_tokens=1))
            )
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    engine.cancel("talk")
    drain(engine)
    alone_s = sorted(times[8 : DECODED // 2])
    slow = [t for t in times[DECODED // 2 :] if t > 5 * alone_s[len(alone_s) // 2]]
    return {
        "step_ms": round(1e3 * alone_s[len(alone_s) // 2], 2),
        "slow_steps": len(slow),
        "longest_ms": round(1e3 * max(slow, default=0.0), 1),
        "all_ms": round(1e3 * sum(slow), 1),
    }


def run(path: Path, most: int | None, args: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    engine = Engine.load(
        EngineConfig(
            str(path), device="cuda", context=CONTEXT, experts="hybrid", max_num_seqs=2,
            vram_budget_nbytes=int(args.vram_gib * 2**30), max_batch_tokens=most,
        )
    )  # fmt: skip
    found: dict[str, Any] = {"given": most, "load_s": round(time.perf_counter() - begun, 1)}
    for choice in engine.info.choices:
        if choice.name in ("max_batch_tokens", "vram", "expert_slots", "experts"):
            found[choice.name] = f"{choice.value}: {choice.reason}"
    print(json.dumps(found), flush=True)
    ttft(engine, 3000, 99)  # kernels are compiled
    ttft(engine, 700, 98)
    torch.cuda.reset_peak_memory_stats()
    with alone(args.lock):
        for tokens in args.prompts:
            found[f"ttft_s_{tokens}"] = [ttft(engine, tokens, seed) for seed in (1, 2)]
            print(tokens, found[f"ttft_s_{tokens}"], flush=True)
        found["beside"] = beside(engine, args.prompts[0], 5)
    planned = engine.info.memory["gpu"]
    found["planned_mb"] = {name: round(nbytes / 1e6) for name, nbytes in planned.items()}
    found["allocated_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
    found["reserved_mb"] = round(torch.cuda.max_memory_reserved() / 1e6)
    engine.close()
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--vram-gib", type=float, default=4.0)
    parser.add_argument("--prompts", type=int, nargs="*", default=[16_384, 8192, 32_768])
    parser.add_argument(
        "--batch-tokens", type=int, nargs="*", default=[0, 2048], help="0: its choice"
    )
    parser.add_argument("--lock", type=Path, help="a file; for runs beside each other")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    path = args.folder / f"qwen3-geometry-{args.layers}-{CONTEXT}.gguf"
    if not path.exists():
        begun = time.perf_counter()
        kinds = [("q4_k", "q4_k", "q4_k" if i % 2 else "q6_k") for i in range(args.layers)]
        write_random(path, kinds, replace(QWEN3_30B_A3B, context=CONTEXT), distinct=4)
        print("written", round(time.perf_counter() - begun, 1), flush=True)
    found: list[dict[str, Any]] = []
    for most in args.batch_tokens:
        found.append(run(path, most or None, args))
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
