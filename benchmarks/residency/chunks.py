"""Memory and time of a prompt's chunks by their length, experts in host memory.

    python -m benchmarks.residency.chunks --layers 18 --vram-gib 8

For each length: the most that PyTorch allocated beside what lay there before, and how fast a chunk is, with
rows in pieces (the engine's way) and all at once; then long prompts by the length of their chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lock import alone
from benchmarks.residency import decode, decoding, model
from benchmarks.residency import geometry as geo
from benchmarks.residency.prefill import BLOCK_TOKENS, Prompts, profile
from headrace.core.step import PIECE_ROWS
from headrace.kv.storage import allocate_kv
from headrace.ops.registry import resolve

CHUNKS = (2048, 4096, 8192, 16_384)
PROMPTS = (8192, 16_384, 32_768)
AT_ONCE = 1 << 30  # rows of a piece: a batch is never cut
RESERVE_NBYTES = 5 << 29


def memory_of(chunk: Prompts, tokens: int) -> dict[str, float]:
    """A chunk's peak beside what is allocated before, MB, and its seconds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    took = [chunk(tokens) for _ in range(2)]
    return {
        "s": min(took),
        "peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
        "reserved_mb": (torch.cuda.max_memory_reserved() - reserved) / 1e6,
    }


def difference(chunk: Prompts, tokens: int) -> float:
    """The largest of the last row's logits' between the two ways, relative to the largest logit."""
    found: list[torch.Tensor] = []
    for rows in (PIECE_ROWS, AT_ONCE):
        chunk.begin_again()
        chunk.piece_rows = rows
        chunk(tokens)
        found.append(chunk.logits)
    chunk.piece_rows = PIECE_ROWS
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())


def ttft(chunk: Prompts, tokens: int, size: int) -> float:
    """Seconds of a prompt in chunks of ``size``."""
    return sum(chunk(min(size, tokens - at), at) for at in range(0, tokens, size))


def measure(chunk: Prompts, say: Callable[[str, Any], None], layers: int) -> None:
    for tokens in CHUNKS:
        say(f"in_pieces_{tokens}", memory_of(chunk, tokens))
    for tokens in CHUNKS[2:]:
        say(f"profile_{tokens}", profile(lambda n=tokens: chunk(n), layers))
    for tokens in CHUNKS[2:]:
        chunk.piece_rows = AT_ONCE
        say(f"profile_at_once_{tokens}", profile(lambda n=tokens: chunk(n), layers))
    chunk.piece_rows = PIECE_ROWS
    for size in reversed(CHUNKS):
        for tokens in PROMPTS:
            say(f"ttft_{tokens}_in_{size}", ttft(chunk, tokens, size))
    say("difference", difference(chunk, CHUNKS[2]))
    chunk.piece_rows = AT_ONCE
    for tokens in CHUNKS:
        say(f"at_once_{tokens}", memory_of(chunk, tokens))
    chunk.piece_rows = PIECE_ROWS


def main() -> None:
    parser = geo.parser(__doc__)
    decode.add_options(parser)
    parser.add_argument("--pcie-peak", type=float, default=54.7, help="GB/s, for the floor")
    parser.add_argument("--lock", type=Path, help="a file; for runs beside each other")
    options = parser.parse_args()
    figures = geo.Figures(options=vars(options))
    say = figures.say
    device, free_before, store = decode.begun(options)
    later: Any = decoding.Later()
    of = model.spec(options.layers)
    context = max(PROMPTS) + BLOCK_TOKENS
    decoder = model.build(of, resolve(device.backends), device, later, context)
    blocks = context // BLOCK_TOKENS
    kv = allocate_kv(of, blocks + 1, BLOCK_TOKENS, "bf16", device.torch_device)
    slots = decode.slots_within(options, device, store.layout, free_before, RESERVE_NBYTES)
    later.target = executor = decode.executor_of(device, store, options.placement, slots, options)
    say("slots", slots)
    chunk = Prompts(options, device, executor, (decoder, kv, blocks))
    try:
        with torch.inference_mode():
            for tokens in (64, *CHUNKS):
                print("warm-up", tokens, chunk(tokens), flush=True)
            with alone(options.lock):
                measure(chunk, say, options.layers)
        figures.found["total_s"] = figures.seconds()
    finally:
        if executor.service is not None:
            executor.service.stop()
    geo.report("residency/chunks", figures.found, options.out)


if __name__ == "__main__":
    main()
