"""Causal attention of chunks over their paged past (flash attention, Dao 2022)."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.ops.records import AttentionBatch, LayerKV
from headrace.ops.triton import prefill_layout
from headrace.ops.triton.softmax import LOG2_E, absorb_rows, fetch, first_sums, tile_of
from headrace.ops.triton.tuning import prefill_tuning


@triton.jit
def attend_keys(
    query, keys, values, table, first, last, context, position, window, top, total, mixed, stride_block,
    CHECKED: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, TAU: tl.constexpr, POLYNOMIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from first (a multiple of TILE) to last; CHECKED: some rows do not see some keys."""
    d, t = tl.arange(0, WIDE), tl.arange(0, TILE)
    inside = (d < DIM)[None, :] & (t >= 0)[:, None]
    for tile in range(first, last, TILE):
        key_at = tile + t
        # Beyond the end the last key is read again; nobody sees it there.
        there = tl.minimum(key_at, context - 1) if CHECKED else key_at
        block = tl.load(table + there // PAGE).to(tl.int64)
        at = (block * stride_block + (there % PAGE) * DIM)[:, None] + d[None, :]
        key = fetch(keys + at, inside, WIDE != DIM)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if CHECKED:
            distance = position[:, None] - key_at[None, :]
            score = tl.where((distance >= 0) & (distance < window), score, float("-inf"))
        value = fetch(values + at, inside, WIDE != DIM)
        top, total, mixed = absorb_rows(
            score, value, top, total, mixed, 1.0, TAU, POLYNOMIAL, PRECISION
        )
    return top, total, mixed


@triton.jit
def prefill_kernel(
    q, keys, values, tables, query_start, context_lens, sinks, out,
    scale, window, num_sequences, group, stride_table, stride_block, stride_head,
    HAS_SINKS: tl.constexpr, LOG2: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TAU: tl.constexpr,
    POLYNOMIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(0), tl.num_programs(0)
    sequence, tile = tile_of(query_start, context_lens, num_sequences, tl.program_id(1), ROWS)
    if sequence < 0:
        return
    begin, context = tl.load(query_start + sequence), tl.load(context_lens + sequence)
    start = context - (tl.load(query_start + sequence + 1) - begin)
    position = tile * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    valid = (position >= start) & (position < context)
    real = valid[:, None] & (d < DIM)[None, :]
    at = ((begin + position - start).to(tl.int64) * heads + head)[:, None] * DIM + d[None, :]
    query = (tl.load(q + at, mask=real, other=0.0) * scale).to(keys.dtype.element_ty)
    table = tables + tl.cast(sequence, tl.int64) * stride_table
    keys += (head // group).to(tl.int64) * stride_head
    values += (head // group).to(tl.int64) * stride_head
    top, total = first_sums(sinks + head, ROWS, HAS_SINKS, LOG2)
    mixed = tl.zeros((ROWS, WIDE), tl.float32)
    # Keys that every row sees lie between the window of the last row and the first row.
    last = tl.minimum((tile + 1) * ROWS, context)
    first = tl.maximum(tile * ROWS - window + 1, 0) // TILE * TILE
    seen_from = tl.maximum(tl.cdiv(tl.maximum(last - window, 0), TILE) * TILE, first)
    seen_to = tl.maximum(tile * ROWS // TILE * TILE, seen_from)
    top, total, mixed = attend_keys(
        query, keys, values, table, first, tl.minimum(seen_from, last), context, position, window,
        top, total, mixed, stride_block,
        True, PAGE, DIM, WIDE, TILE, 0, 0, PRECISION,
    )  # fmt: skip
    top, total, mixed = attend_keys(
        query, keys, values, table, seen_from, seen_to, context, position, window,
        top, total, mixed, stride_block,
        False, PAGE, DIM, WIDE, TILE, TAU, POLYNOMIAL, PRECISION,
    )  # fmt: skip
    top, total, mixed = attend_keys(
        query, keys, values, table, seen_to, last, context, position, window,
        top, total, mixed, stride_block,
        True, PAGE, DIM, WIDE, TILE, 0, 0, PRECISION,
    )  # fmt: skip
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
    if keys.dtype == torch.bfloat16 and prefill_layout.takes(
        q, batch, keys.shape[1], cache.block_tokens
    ):
        from headrace.ops.triton import prefill_tma  # Gluon: only where it is used

        return prefill_tma.plain(q, cache, batch, scale, window, sinks)
    num_sequences = batch.context_lens.shape[0]
    exact = keys.dtype == torch.float32
    tuned = prefill_tuning(q.device, dim, sealed=False)
    size = min(tuned.rows, 64) if exact else tuned.rows
    out = torch.empty_like(q)
    # Tiles are aligned to positions: a sequence may have one more at each end than its rows fill.
    # Heads run first, so that the tiles with the longest pasts start before all others.
    grid = (heads, rows // size + 2 * num_sequences)
    prefill_kernel[grid](
        q, keys, cache.values, batch.block_tables, batch.query_start, batch.context_lens,
        q if sinks is None else sinks, out,
        scale * LOG2_E, window or 2**30, num_sequences, heads // keys.shape[1],
        batch.block_tables.stride(0), keys.stride(0), keys.stride(1),
        HAS_SINKS=sinks is not None, LOG2=LOG2_E, PAGE=cache.block_tokens, DIM=dim,
        WIDE=triton.next_power_of_2(dim), ROWS=size, TILE=32 if exact else tuned.tile,
        TAU=0 if exact else tuned.tau, POLYNOMIAL=0 if exact else tuned.polynomial,
        PRECISION="ieee" if exact else "tf32", num_warps=tuned.num_warps,
        num_stages=1 if exact else tuned.num_stages,  # the table's entries take one of them
    )  # fmt: skip
    return out
