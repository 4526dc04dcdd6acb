"""Bar 03.4: bytes of KV cache per token and key/value head, counted from the allocator.

python -m benchmarks.attention.bytes [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from headrace.core.kv_formats import FORMATS, MAX_RANK, pool_shape
from headrace.core.model_spec import LayerSpec, ModelSpec, RopeSpec
from headrace.kv.storage import allocate_cache, allocated_nbytes

LAYERS, HEADS, KV_HEADS = 32, 32, 8
BLOCK_TOKENS = 64
BATCH_TOKENS = 512  # the default step: rows of open pages are counted, too
TOKENS = (1024, 8192, 32768)
HEAD_DIMS = (64, 128, 256)
LIMIT = 2.35  # at 32,768 tokens and heads of 128


def kv_bytes_per_token(
    kv_format: str, tokens: int, head_dim: int, *, block_tokens: int = BLOCK_TOKENS
) -> float:
    """One sequence of ``tokens``; everything: pages, first keys, open pages, directions."""
    spec = ModelSpec(
        family="llama",
        hidden=HEADS * head_dim,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        vocab=8,
        intermediate=8,
        norm_eps=1e-5,
        rope=RopeSpec(10000.0, head_dim),
        max_context=tokens,
        tie_embeddings=True,
        layers=(LayerSpec(None, False),) * LAYERS,
    )
    pool = pool_shape(
        FORMATS[kv_format],
        -(-tokens // block_tokens),
        block_tokens,
        max_num_seqs=1,
        max_batch_tokens=BATCH_TOKENS,
    )
    along = torch.zeros(LAYERS, KV_HEADS, MAX_RANK, head_dim)
    caches = allocate_cache(spec, pool, kv_format, torch.device("cpu"), along)
    return allocated_nbytes(caches) / tokens / LAYERS / KV_HEADS


def table() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for head_dim in HEAD_DIMS:
        for tokens in TOKENS:
            plain = kv_bytes_per_token("bf16", tokens, head_dim)
            for name in ("fp8", "nvfp4k-fp8v"):
                nbytes = kv_bytes_per_token(name, tokens, head_dim)
                rows.append(
                    {
                        "head_dim": head_dim,
                        "tokens": tokens,
                        "format": name,
                        "nbytes_per_token_and_head": round(nbytes, 2),
                        "bf16": plain,
                        "ratio": round(plain / nbytes, 3),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = table()
    print("| head | tokens | format | bytes a token and head | bf16 | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    if args.json:
        what = {"block_tokens": BLOCK_TOKENS, "sequences": 1, "max_batch_tokens": BATCH_TOKENS}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**what, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
