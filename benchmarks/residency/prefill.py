"""Time to the first token of prompts, experts in host memory (bar 02.5).

    python -m benchmarks.residency.prefill --layers 18 --vram-gib 8

A prompt of random tokens goes through the decoder in one chunk, its last row through the output matrix;
the turn of 10 tokens follows a prompt of 2,048 on the cache that this one left.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.residency import decode, model
from benchmarks.residency import geometry as geo
from headrace.core.step import ScheduledChunk
from headrace.engine.batch import build_batch
from headrace.experts.random_store import random_store
from headrace.kv.storage import allocate_kv
from headrace.machine.device import CudaDevice
from headrace.ops.registry import resolve

BLOCK_TOKENS = 16
LONGEST = 8192


def main() -> None:
    parser = geo.parser(__doc__)
    decode.add_options(parser)
    options = parser.parse_args()
    begin = time.perf_counter()
    figures: dict[str, Any] = {"options": vars(options)}
    device = CudaDevice()
    torch.ones(1, device=device.torch_device)
    free_before = device.memory().free_nbytes + decode.CONTEXT_NBYTES
    layout = geo.layout(num_slices=options.slices)
    store = random_store(layout, options.layers, geo.EXPERTS, seed=1, threads=16, pin=True)
    later = decode.Later()
    of = model.spec(options.layers)
    decoder = model.build(of, resolve(device.backends), device, later)
    blocks = 2 * LONGEST // BLOCK_TOKENS
    kv = allocate_kv(of, blocks + 1, BLOCK_TOKENS, "bf16", device.torch_device)
    # The longest chunk's activations: some 14 rows of float32 for each of its tokens.
    workspace = 14 * 4 * LONGEST * geo.HIDDEN
    slots = decode.slots_within(options, device, layout, free_before, workspace)
    executor = decode.executor_of(device, store, options.placement, slots, options)
    later.target = executor
    generator = torch.Generator().manual_seed(6)

    def chunk(tokens: int, start: int = 0) -> float:
        ids = tuple(torch.randint(geo.VOCAB, (tokens,), generator=generator).tolist())
        executor.step_begins(tokens)
        torch.cuda.synchronize()
        at = time.perf_counter()
        given, batch = build_batch(
            [ScheduledChunk(0, ids, start, tuple(range(blocks)), True)],
            BLOCK_TOKENS,
            device.torch_device,
        )
        hidden = decoder.forward(given, batch, kv)
        int(decoder.logits(hidden[-1:]).argmax())
        took = time.perf_counter() - at
        executor.step_ended()
        return took

    try:
        with torch.inference_mode():
            chunk(64)  # kernels are compiled
            chunk(200)
            for tokens in (64, 2048, LONGEST):
                took = [chunk(tokens) for _ in range(2)]
                figures[f"ttft_s_{tokens}"] = took
                print(tokens, took, f"{tokens / min(took):.0f} tok/s", flush=True)
            turns = [chunk(10, 2048 + 10 * turn) for turn in range(4)]
            figures["turn_of_10_s"] = turns
            print("turn of 10", turns, flush=True)
        figures["slots"] = slots
        figures["total_s"] = time.perf_counter() - begin
    finally:
        if executor.service is not None:
            executor.service.stop()
    geo.report("residency/prefill", figures, options.out)


if __name__ == "__main__":
    main()
