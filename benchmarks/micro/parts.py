"""What the small parts of a start and of a step cost: opening, tokenizer, NaN scan, sampling.

    python -m benchmarks.micro.parts

Prints one JSON object of milliseconds, the best of a few runs each. These were once assertions; a busy
machine made them fail, and a figure that nobody compares is better than a test that cries wolf.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.foundation.common import commit, machine
from headrace.checkpoint.open import open_checkpoint
from headrace.core.request import SamplingParams
from headrace.engine.sampler import SamplingState, choose
from headrace.formats.base import PackedTensor, find_nan
from headrace.text.tokenizer import load_tokenizer


def best_ms(call: Callable[[], Any], runs: int = 5) -> float:
    """The quickest of ``runs`` calls."""
    times: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e3, 4)


def main() -> None:
    source = open_checkpoint("smollm2").text
    blocks = torch.zeros(16384, 2048 // 32 * 20, dtype=torch.uint8)
    packed = PackedTensor("q4_1", (16384, 2048), {"blocks": blocks})
    rng = np.random.default_rng(0)
    small = rng.standard_normal(49152).astype(np.float32)
    large = (rng.standard_normal(200_000) * 3).astype(np.float32)
    greedy, nucleus = SamplingParams(temperature=0.0), SamplingParams(top_p=0.95)
    print(
        json.dumps(
            {
                "machine": machine(),
                "commit": commit(),
                "milliseconds": {
                    "open SmolLM2's GGUF": best_ms(lambda: open_checkpoint("smollm2")),
                    "build its tokenizer": best_ms(lambda: load_tokenizer(source)),
                    "scan 21 MB of Q4_1 for NaN scales": best_ms(lambda: find_nan(packed)),
                    "greedy, 49k vocabulary": best_ms(
                        lambda: choose(small, SamplingState(greedy, 0, 0, ()), 0), 50
                    ),
                    "top-p 0.95, 200k vocabulary": best_ms(
                        lambda: choose(large, SamplingState(nucleus, 0, 0, ()), 0), 20
                    ),
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
