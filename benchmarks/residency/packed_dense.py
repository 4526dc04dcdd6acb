"""A GGUF file of Qwen3-30B-A3B's geometry on a GPU: matrices packed, and in bfloat16. Speed and memory.

python -m benchmarks.residency.packed_dense --layers 12 --folder /dev/shm --out packed_dense.json

The file is Q4_K_M's: attention in Q4_K with values in Q6_K, experts in Q4_K with down in Q6_K in every second
layer, the head in Q6_K. Weights are random, so the tokens are, too; all experts lie in GPU memory unless a
budget is given.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.lock import alone
from headrace.core.config import EngineConfig
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.engine.engine import Engine
from tests.fixtures.random_gguf import QWEN3_30B_A3B, write_random
from tests.fixtures.toy_engine import drain


def run(path: Path, dense: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    start = time.perf_counter()
    budget = None if args.vram_gib is None else int(args.vram_gib * 2**30)
    engine = Engine.load(
        EngineConfig(
            str(path), device="cuda", context=4096, dense_format=dense, vram_budget_nbytes=budget,
            max_num_seqs=args.batch,
        )
    )  # fmt: skip
    found: dict[str, Any] = {"dense": dense, "load_s": round(time.perf_counter() - start, 1)}
    for choice in engine.info.choices:
        if choice.name in ("dense_format", "vram", "expert_slots", "experts"):
            found[choice.name] = f"{choice.value}: {choice.reason}"
    weights = [w for kind, w in engine._decoder.matrices() if "expert" not in kind]
    found["dense_nbytes"] = sum({id(w): w.nbytes for w in weights}.values())
    found["allocated_nbytes"] = torch.cuda.memory_allocated()
    print(json.dumps(found), flush=True)
    with alone(args.lock):
        measure(engine, args, found)
    found["peak_nbytes"] = torch.cuda.max_memory_allocated()
    engine.close()
    print(json.dumps(found), flush=True)
    return found


def measure(engine: Engine, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Median step of decoding, best time to the first token."""
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    for batch in sorted({1, args.batch}):
        for _ in range(2):
            for n in range(batch):
                prompt = tuple((7 * j + 31 * n) % 250 + 3 for j in range(8))
                engine.submit(GenerationRequest(f"r{n}", prompt, params))
            times = []
            while engine.has_work():
                begun = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - begun)
            tail = sorted(times[-args.tokens // 2 :])
            found[f"step_ms_batch_{batch}"] = round(tail[len(tail) // 2] * 1e3, 3)
    for length in args.prompts:
        best = 1e9
        for attempt in range(2):
            prompt = tuple((7 * j + attempt + length) % 250 + 3 for j in range(length))
            begun = time.perf_counter()
            engine.submit(GenerationRequest("p", prompt, SamplingParams(max_tokens=1)))
            drain(engine)
            best = min(best, time.perf_counter() - begun)
        found[f"ttft_ms_{length}"] = round(best * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--vram-gib", type=float)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 2048])
    parser.add_argument("--dense", nargs="*", default=["packed", "bf16"])
    parser.add_argument("--lock", type=Path, help="a file; for runs beside each other")
    parser.add_argument("--out", type=Path, default=Path("packed_dense.json"))
    args = parser.parse_args()
    path = args.folder / f"qwen3-geometry-{args.layers}.gguf"
    if not path.exists():
        start = time.perf_counter()
        kinds = [("q4_k", "q4_k", "q4_k" if i % 2 else "q6_k") for i in range(args.layers)]
        write_random(path, kinds, QWEN3_30B_A3B, distinct=4)
        print("written", round(time.perf_counter() - start, 1), flush=True)
    found = []
    for dense in args.dense:
        found.append(run(path, dense, args))
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
