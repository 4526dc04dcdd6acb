"""Rotary embedding, the paged key/value cache and attention over it, in plain PyTorch."""

from __future__ import annotations

import torch

from headrace.ops.records import AttentionBatch, LayerKV, RopeTable

# Query rows that are scored at once, so that the scores of a long prompt stay small.
QUERY_ROWS = 256


def rope(x: torch.Tensor, table: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """Turn pairs of dimensions by position, in place (Su et al. 2021).

    x: float32 [T, H, hd], whose first 2 * table.cos.shape[1] dimensions turn; positions: int64 [T].
    Returns x.
    """
    half = table.cos.shape[1]
    cos = table.cos[positions].unsqueeze(1)
    sin = table.sin[positions].unsqueeze(1)
    if table.interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)
    return x


def kv_append(k: torch.Tensor, v: torch.Tensor, cache: LayerKV, slots: torch.Tensor) -> None:
    """Store this step's keys and values.

    k, v: float32 [T, Hkv, hd]; slots: int64 [T], block * block_tokens + row in the block.
    """
    block, row = slots // cache.block_tokens, slots % cache.block_tokens
    cache.keys[block, :, row] = k.to(cache.keys.dtype)
    cache.values[block, :, row] = v.to(cache.values.dtype)


def attention(
    q: torch.Tensor,
    cache: LayerKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q K^T * scale) V over each row's own past.

    q: float32 [T, H, hd]; head h reads key/value head h // (H / Hkv). The row at position p sees
    the keys p - window + 1 to p (0 to p without a window). sinks: float32 [H], one more logit of
    each head that takes part in the softmax's denominator only. Returns float32 [T, H, hd].
    """
    out = torch.empty_like(q)
    starts = [int(start) for start in batch.query_start]
    for seq, context in enumerate(int(n) for n in batch.context_lens):
        for start in range(starts[seq], starts[seq + 1], QUERY_ROWS):
            stop = min(start + QUERY_ROWS, starts[seq + 1])
            positions = batch.positions[start:stop]
            # Keys that no row of these sees are not gathered.
            first = 0 if window is None else max(int(positions[0]) - window + 1, 0)
            keys, values = _gather(cache, batch.block_tables[seq], first, context)
            distance = positions[:, None] - torch.arange(first, context, device=q.device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            out[start:stop] = attend(q[start:stop], keys, values, hidden, scale, sinks)
    return out


def _gather(
    cache: LayerKV, table: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions ``first`` to ``last``: float32 [Hkv, L, hd]."""
    size = cache.block_tokens
    begin = first // size
    blocks = table[begin : -(-last // size)].long()
    inside = slice(first - begin * size, last - begin * size)

    def rows(pages: torch.Tensor) -> torch.Tensor:
        return pages[blocks].transpose(0, 1).flatten(1, 2)[:, inside].float()

    return rows(cache.keys), rows(cache.values)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [T, H, hd], keys and values [Hkv, L, hd], hidden bool [T, L] -> [T, H, hd]."""
    rows, heads, dim = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    # [Hkv, group * T, hd]: the query heads that share a key head are rows of one product.
    grouped = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = (grouped @ keys.transpose(1, 2) * scale).view(kv_heads, group, rows, -1)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat((scores, extra), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]]
    mixed = weights.reshape(kv_heads, group * rows, -1) @ values
    return mixed.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
