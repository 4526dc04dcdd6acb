"""Causal attention of chunks over sealed pages (flash attention).

A row sees every page before its own as it is sealed, and its own in bfloat16. A program takes ROWS
consecutive positions of one query head: first the pages that lie before all of them, without a causal
mask, then the pages of the rows themselves, each as it is sealed for later rows and as it is open for
its own.

Sealed keys are put together in float16, r + g s c: rounding to 11 bits is finer than bfloat16's 8.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.core.kv_formats import FIRST_TOKENS
from headrace.ops.records import AttentionBatch, SealedKV
from headrace.ops.triton import prefill_layout
from headrace.ops.triton.control import unpack_instructions
from headrace.ops.triton.lowbit import e4m3_to_f16, nvfp4_to_f16, scale_to_f16, spread
from headrace.ops.triton.sealed_append import half_width, open_of, parts_of
from headrace.ops.triton.softmax import LOG2_E, absorb_rows, fetch, first_sums, tile_of
from headrace.ops.triton.tuning import prefill_tuning

RESIDUALS = tl.constexpr(16)  # columns of residuals: what a product takes at least

# With 64 rows, eight warps and residuals Triton 3.6 makes a program for Hopper whose results are wrong (heads
# of 192 and 256 on an H200, 2026-11-30). With four warps they are right, and without residuals.
_FEW_ROWS, _ONE_GROUP = 64, 4


@triton.jit
def sealed_scores(
    key_codes, key_scales, key_residuals, key_refs, g, low, high, turned,
    NVFP4: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Scores [R, PAGE] of one page, whose parts the pointers point to."""
    half: tl.constexpr = DIM // 2
    padded: tl.constexpr = HALF * 2 != DIM
    t, i = tl.arange(0, PAGE), tl.arange(0, HALF)
    real = (i < half)[None, :] & (t >= 0)[:, None]
    if NVFP4:
        j, e = tl.arange(0, HALF // 8), tl.arange(0, RESIDUALS)
        code = fetch(key_codes + t[:, None] * half + i[None, :], real, padded)
        step = fetch(
            key_scales + t[:, None] * (DIM // 16) + j[None, :],
            (j < DIM // 16)[None, :] & (t >= 0)[:, None], padded,
        )  # fmt: skip
        ref_low = fetch(key_refs + i, i < half, padded).to(tl.float16)
        ref_high = fetch(key_refs + half + i, i < half, padded).to(tl.float16)
        key_low, key_high = nvfp4_to_f16(code, spread(scale_to_f16(step), PAGE, HALF // 8), UNPACK)
        unit = (g * 128.0).to(tl.float16)
        key_low = key_low * unit + ref_low[None, :]
        key_high = key_high * unit + ref_high[None, :]
        score = tl.dot(low, tl.trans(key_low))
        score = tl.dot(high, tl.trans(key_high), score)
        if RANK > 0:
            at = key_residuals + t[:, None] * RANK + e[None, :]
            left = tl.load(at, mask=(e < RANK)[None, :] & (t >= 0)[:, None], other=0)
            left = e4m3_to_f16(left, UNPACK) * (g * 16.0).to(tl.float16)
            score = tl.dot(turned, tl.trans(left), score)
    else:
        at = key_codes + t[:, None] * DIM + i[None, :]
        score = tl.dot(low, tl.trans(e4m3_to_f16(fetch(at, real, padded), UNPACK)))
        code = fetch(at + half, real, padded)
        score = tl.dot(high, tl.trans(e4m3_to_f16(code, UNPACK)), score) * g
    return score


@triton.jit
def sealed_values(
    value_codes, PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """The first TOKENS values of a page, float16 [TOKENS, D], in units of its value scale."""
    d, t = tl.arange(0, 2 * HALF), tl.arange(0, TOKENS)
    at = value_codes + d[:, None] * PAGE + t[None, :]
    code = fetch(at, (d < DIM)[:, None] & (t >= 0)[None, :], HALF * 2 != DIM)
    return tl.trans(e4m3_to_f16(code, UNPACK))


@triton.jit
def sealed_prefill_kernel(
    q, key_codes, key_scales, key_residuals, key_refs, value_codes, page_scales, first_keys,
    directions, open_keys, open_values, tables, open_pages, query_start, context_lens, sinks, out,
    scale, window, num_sequences, group, stride_table, stride_pages, num_shared, open_offset,
    NVFP4: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, LOG2: tl.constexpr, TAU: tl.constexpr, POLYNOMIAL: tl.constexpr,
    UNPACK: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(0), tl.num_programs(0)
    sequence, tile = tile_of(query_start, context_lens, num_sequences, tl.program_id(1), ROWS)
    if sequence < 0:
        return
    half: tl.constexpr = DIM // 2
    row_begin, context = tl.load(query_start + sequence), tl.load(context_lens + sequence)
    start = context - (tl.load(query_start + sequence + 1) - row_begin)
    r, t, i, d = tl.arange(0, ROWS), tl.arange(0, PAGE), tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    position = tile * ROWS + r
    valid = (position >= start) & (position < context)
    at_row = ((row_begin + position - start).to(tl.int64) * heads + head) * DIM
    real = valid[:, None] & (i < half)[None, :]
    low = tl.load(q + at_row[:, None] + i[None, :], mask=real, other=0.0) * scale
    high = tl.load(q + at_row[:, None] + half + i[None, :], mask=real, other=0.0) * scale
    low, high = low.to(tl.float16), high.to(tl.float16)
    kv_head, kv_heads = head // group, heads // group
    turned = low
    if RANK > 0:
        e = tl.arange(0, RESIDUALS)
        along = directions + (kv_head * RANK + e)[None, :] * DIM + i[:, None]
        known = (e < RANK)[None, :] & (i < half)[:, None]
        one = tl.dot(low, tl.load(along, mask=known, other=0.0).to(tl.float16))
        two = tl.load(along + half, mask=known, other=0.0).to(tl.float16)
        turned = tl.dot(high, two, one).to(tl.float16)
    top, total = first_sums(sinks + head, ROWS, HAS_SINKS, LOG2)
    mixed = tl.zeros((ROWS, 2 * HALF), tl.float32)
    unit = 1.0
    table = tables + sequence.to(tl.int64) * stride_table
    own_first = tile * ROWS // PAGE  # the page of the tile's first row
    own_last = (tl.minimum((tile + 1) * ROWS, context) - 1) // PAGE
    page_begin = 0
    if HAS_WINDOW:
        page_begin = tl.maximum(tl.maximum(tile * ROWS, start) - window + 1, 0) // PAGE
    if FIRST > 0:  # noqa: SIM102 (known when compiling)
        if (page_begin == 0) & (own_last > 0):
            block = tl.load(table).to(tl.int64) * kv_heads + kv_head
            f = tl.arange(0, FIRST)
            at = first_keys + (block * FIRST + f)[:, None] * DIM + i[None, :]
            inside = (f >= 0)[:, None] & (i < half)[None, :]
            key = tl.load(at, mask=inside, other=0.0).to(tl.float16)
            score = tl.dot(low, tl.trans(key))
            key = tl.load(at + half, mask=inside, other=0.0).to(tl.float16)
            score = tl.dot(high, tl.trans(key), score)
            seen = (position // PAGE > 0)[:, None] & (position[:, None] - f[None, :] < window)
            value = sealed_values(
                value_codes + block * (DIM * PAGE), PAGE, DIM, HALF, FIRST, UNPACK
            )
            top, total, mixed = absorb_rows(
                tl.where(seen, score, float("-inf")), value, top, total, mixed, 1.0, 0, 0, "ieee"
            )
            unit = tl.load(page_scales + 2 * block + 1)
    # Pages before the rows' own, and then those that later rows of the tile see sealed.
    for page in range(page_begin, own_last):
        block = tl.load(table + page).to(tl.int64) * kv_heads + kv_head
        score = sealed_scores(
            key_codes + block * (PAGE * (half if NVFP4 else DIM)),
            key_scales + block * (PAGE * (DIM // 16)), key_residuals + block * (PAGE * RANK),
            key_refs + block * DIM, tl.load(page_scales + 2 * block), low, high, turned,
            NVFP4, RANK, PAGE, DIM, HALF, UNPACK,
        )  # fmt: skip
        # One comparison does for "not in the first rows", "in an earlier page than the row's".
        shown = tl.where(t >= FIRST - page * PAGE, 0, 2**30) + page
        seen = (position // PAGE)[:, None] > shown[None, :]
        if HAS_WINDOW:
            seen = seen & (position[:, None] - (page * PAGE + t)[None, :] < window)
        new_unit = tl.load(page_scales + 2 * block + 1)
        value = sealed_values(value_codes + block * (DIM * PAGE), PAGE, DIM, HALF, PAGE, UNPACK)
        top, total, mixed = absorb_rows(
            tl.where(seen, score, float("-inf")), value, top, total, mixed, unit / new_unit,
            TAU, POLYNOMIAL, "ieee",
        )  # fmt: skip
        unit = new_unit
    mixed = mixed * unit
    TILE: tl.constexpr = 32 if PAGE > 32 else PAGE
    k = tl.arange(0, TILE)
    first_slot = start // PAGE
    begin = tl.maximum(tl.maximum(own_first, first_slot) * PAGE, page_begin * PAGE)
    for key_tile in range(begin, tl.minimum((tile + 1) * ROWS, context), TILE):
        page = key_tile // PAGE
        slot = tl.load(open_pages + sequence * stride_pages + page - first_slot)
        slot += tl.where(slot >= num_shared, open_offset, 0)
        at = (slot.to(tl.int64) * kv_heads + kv_head) * (PAGE * DIM)
        key_at = key_tile + k
        at_key = (key_at % PAGE)[:, None] * DIM
        written = key_at < context
        inside = written[:, None] & (i < half)[None, :]
        key = tl.load(open_keys + at + at_key + i[None, :], mask=inside, other=0.0)
        score = tl.dot(low, tl.trans(key.to(tl.float16)))
        key = tl.load(open_keys + at + at_key + half + i[None, :], mask=inside, other=0.0)
        score = tl.dot(high, tl.trans(key.to(tl.float16)), score)
        inside = written[:, None] & (d < DIM)[None, :]
        value = tl.load(open_values + at + at_key + d[None, :], mask=inside, other=0.0)
        distance = position[:, None] - key_at[None, :]
        seen = (distance >= 0) & (distance < window) & (position // PAGE == page)[:, None]
        top, total, mixed = absorb_rows(
            tl.where(seen, score, float("-inf")), value, top, total, mixed, 1.0, 0, 0, "ieee"
        )
    at = out + at_row[:, None] + d[None, :]
    tl.store(at, mixed / total[:, None], mask=valid[:, None] & (d < DIM)[None, :])


def sealed_attention_prefill(
    q: torch.Tensor,
    cache: SealedKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q K^T * scale) V over each row's own past; see the reference for the terms.

    q: float32 [T, H, hd]; queries and keys are multiplied in float16 (keys are below 65,504), values of
    open pages in bfloat16, for its range; sums are float32. Returns float32 [T, H, hd].
    """
    q = q.contiguous()
    rows, heads, dim = q.shape
    if prefill_layout.takes(q, batch, cache.key_codes.shape[1], cache.block_tokens):
        from headrace.ops.triton import prefill_tma  # Gluon: only where it is used

        return prefill_tma.sealed(q, cache, batch, scale, window, sinks)
    where = open_of(batch)
    num_sequences = batch.context_lens.shape[0]
    out = torch.empty_like(q)
    tuned = prefill_tuning(q.device, dim, sealed=True)
    # Tiles are aligned to positions: a sequence may have one more at each end than its rows fill.
    grid = (heads, rows // tuned.rows + 2 * num_sequences)
    sealed_prefill_kernel[grid](
        q, *parts_of(cache),
        cache.open_keys, cache.open_values, batch.block_tables, where.pages,
        batch.query_start, batch.context_lens, q if sinks is None else sinks, out,
        scale * LOG2_E, window or 2**30, num_sequences, heads // cache.key_codes.shape[1],
        batch.block_tables.stride(0), where.pages.stride(0), cache.num_shared, cache.open_offset,
        NVFP4=cache.key_scales is not None, RANK=cache.rank,
        FIRST=0 if cache.first_keys is None else FIRST_TOKENS, PAGE=cache.block_tokens, DIM=dim,
        HALF=half_width(dim), ROWS=tuned.rows, HAS_SINKS=sinks is not None,
        HAS_WINDOW=window is not None, LOG2=LOG2_E, TAU=tuned.tau, POLYNOMIAL=tuned.polynomial,
        UNPACK=unpack_instructions(), num_stages=tuned.num_stages,
        num_warps=_ONE_GROUP if cache.rank and tuned.rows == _FEW_ROWS else tuned.num_warps,
    )  # fmt: skip
    return out
