"""Causal attention of chunks over their paged past (flash attention, Dao 2022)."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.ops.records import AttentionBatch, LayerKV
from headrace.ops.triton.softmax import LOG2_E

_ROWS = 64  # query rows of a program: what a multiprocessor's wgmma takes at least
_TILE = 64  # keys that are multiplied at a time


@triton.jit
def prefill_kernel(
    q, keys, values, tables, query_start, context_lens, sinks, out,
    scale, window, num_sequences, heads, group, block_tokens, dim,
    stride_table, stride_block, stride_head,
    HAS_SINKS: tl.constexpr, LOG2: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Later rows have longer pasts: they start first, so that no long one is left for the end.
    pid, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    # Which sequence's tile is it? Each starts with a tile of its own.
    tiles = pid * 0
    sequence, first_tile = tiles - 1, tiles
    for s in range(0, num_sequences):
        count = tl.cdiv(tl.load(query_start + s + 1) - tl.load(query_start + s), ROWS)
        if (pid >= tiles) & (pid < tiles + count):
            sequence = s
            first_tile = tiles
        tiles += count
    if sequence < 0:
        return
    begin, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    row = begin + (pid - first_tile) * ROWS + tl.arange(0, ROWS)
    position = row - end + context  # the rows are the last of the sequence
    d = tl.arange(0, DIM)
    real = (row < end)[:, None] & (d < dim)[None, :]
    at = (row.to(tl.int64) * heads + head)[:, None] * dim + d[None, :]
    query = tl.load(q + at, mask=real, other=0.0)
    query = (query * scale).to(keys.dtype.element_ty)
    first = begin + (pid - first_tile) * ROWS - end + context
    last = tl.minimum(first + ROWS, context)  # keys end where the tile's last row does
    first = tl.maximum(first - window + 1, 0) // TILE * TILE
    table = tables + tl.cast(sequence, tl.int64) * stride_table
    kv_head = (head // group).to(tl.int64) * stride_head
    if HAS_SINKS:
        top = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head) * LOG2
        total = tl.full((ROWS,), 1.0, tl.float32)
    else:
        top = tl.full((ROWS,), -1.0e30, tl.float32)  # finite: a row may see nothing of a tile
        total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for tile in range(first, last, TILE):
        key_at = tile + tl.arange(0, TILE)
        block = tl.load(table + key_at // block_tokens, mask=key_at < last, other=0).to(tl.int64)
        source = block * stride_block + kv_head + (key_at % block_tokens) * dim
        inside = (key_at < last)[:, None] & (d < dim)[None, :]
        key = tl.load(keys + source[:, None] + d[None, :], mask=inside, other=0.0)
        value = tl.load(values + source[:, None] + d[None, :], mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        distance = position[:, None] - key_at[None, :]
        seen = (distance >= 0) & (distance < window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        mixed = tl.dot(
            weight.to(value.dtype), value, mixed * shrink[:, None], input_precision=PRECISION
        )
        top = new_top
    tl.store(out + at, mixed / total[:, None], mask=real)


def attention_prefill(
    q: torch.Tensor,
    cache: LayerKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q K^T * scale) V over each row's own past; see the reference for the terms.

    q: float32 [T, H, hd]; query and probabilities are rounded to the cache's type, sums are float32.
    Returns float32 [T, H, hd].
    """
    q = q.contiguous()
    rows, heads, dim = q.shape
    keys = cache.keys
    num_sequences = batch.context_lens.shape[0]
    exact = keys.dtype == torch.float32
    out = torch.empty_like(q)
    # Each sequence may have one tile that is not full; where they end is known on the GPU only.
    grid = (triton.cdiv(rows, _ROWS) + num_sequences - 1, heads)
    prefill_kernel[grid](
        q, keys, cache.values, batch.block_tables, batch.query_start, batch.context_lens,
        q if sinks is None else sinks, out,
        scale * LOG2_E, window or 2**30, num_sequences, heads, heads // keys.shape[1],
        cache.block_tokens, dim,
        batch.block_tables.stride(0), keys.stride(0), keys.stride(1),
        HAS_SINKS=sinks is not None, LOG2=LOG2_E,
        ROWS=_ROWS, DIM=triton.next_power_of_2(dim), TILE=32 if exact else _TILE,
        PRECISION="ieee" if exact else "tf32", num_warps=4,
        num_stages=1 if exact else 3,  # the table's entries take one of them
    )  # fmt: skip
    return out
