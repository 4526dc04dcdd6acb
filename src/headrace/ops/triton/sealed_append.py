"""Writing to a cache whose pages are sealed: store this step's rows, quantise pages that become full.

One program takes one page of one key/value head that the step writes to, so that writing and sealing
are one launch with a grid that depends on shapes only: what is full follows from positions on the GPU.
``headrace.ops.reference.sealing`` defines the bytes; these are the same, bit for bit.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.core.errors import InternalError
from headrace.core.kv_formats import FIRST_TOKENS, RESIDUAL_UNIT
from headrace.ops.records import AttentionBatch, OpenBatch, SealedKV
from headrace.ops.triton.lowbit import (
    e2m1_codes,
    e2m1_values,
    e4m3_codes,
    inverse,
    power_of_two,
    scale_to_f32,
)

# E4M3's largest is 448 = 1.75 * 2^8; times E2M1's largest, 6, it is 2688 = 1.3125 * 2^11.
FP8_SHIFT, FP8_FRACTION = tl.constexpr(9), tl.constexpr(0x600000)
FP4_SHIFT, FP4_FRACTION = tl.constexpr(12), tl.constexpr(0x280000)


@triton.jit
def _page_rows(new, opened, at_new, at_open, is_new, is_old):
    """A page's tile in bfloat16: this step's rows from ``new``, the others from the open page."""
    fresh = tl.load(new + at_new, mask=is_new, other=0.0).to(tl.bfloat16)
    tl.store(opened + at_open, fresh, mask=is_new)
    old = tl.load(opened + at_open, mask=is_old, other=0.0)
    return tl.where(is_new, fresh, old)


@triton.jit
def _centre(low, high, live):
    """Halves of a page [P, H] -> reference vectors [H] (bfloat16) and float32 rows less them."""
    weight = live.to(tl.float32)[:, None]
    count = tl.maximum(tl.sum(live.to(tl.int32), 0), 1).to(tl.float64)
    low, high = low.to(tl.float32), high.to(tl.float32)
    # Sums of bfloat16 are exact in float64, whatever their order.
    ref_low = (tl.sum((low * weight).to(tl.float64), 0) / count).to(tl.float32).to(tl.bfloat16)
    ref_high = (tl.sum((high * weight).to(tl.float64), 0) / count).to(tl.float32).to(tl.bfloat16)
    low = (low - ref_low.to(tl.float32)[None, :]) * weight
    high = (high - ref_high.to(tl.float32)[None, :]) * weight
    return ref_low, ref_high, low, high


@triton.jit
def _group_steps(low, high, PAGE: tl.constexpr, HALF: tl.constexpr):
    """E4M3 codes of amax / 6 of each group of 8 + 8 channels: [P, H / 8]."""
    size = tl.maximum(tl.abs(low), tl.abs(high))
    amax = tl.max(tl.reshape(size, (PAGE, HALF // 8, 8)), 2)
    return e4m3_codes(tl.div_rn(amax, tl.full((PAGE, HALF // 8), 6.0, tl.float32)))


@triton.jit
def seal_kernel(
    k, v, open_keys, open_values, query_start, context_lens, tables, open_pages,
    key_codes, key_scales, key_residuals, key_refs, value_codes, page_scales, first_keys, directions,
    width, heads, dim, stride_table, stride_pages, num_shared, open_offset,
    NVFP4: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, UNIT: tl.constexpr,
    PAGE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    sequence, index, head = tl.program_id(0) // width, tl.program_id(0) % width, tl.program_id(1)
    begin, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    start = context - (end - begin)
    page = start // PAGE + index
    if page * PAGE >= context:
        return
    full = (page + 1) * PAGE <= context
    slot = tl.load(open_pages + sequence * stride_pages + index)
    slot += tl.where(slot >= num_shared, open_offset, 0)
    t, i = tl.arange(0, PAGE), tl.arange(0, HALF)
    position = page * PAGE + t
    half = dim // 2
    inside = (i < half)[None, :]
    is_new = ((position >= start) & (position < context))[:, None] & inside
    is_old = (position < start)[:, None] & inside & full
    row = (begin + position - start).to(tl.int64)
    at_new = ((row * heads + head) * dim)[:, None] + i[None, :]
    at_open = ((slot.to(tl.int64) * heads + head) * PAGE + t)[:, None] * dim + i[None, :]
    key_low = _page_rows(k, open_keys, at_new, at_open, is_new, is_old)
    key_high = _page_rows(k, open_keys, at_new + half, at_open + half, is_new, is_old)
    value_low = _page_rows(v, open_values, at_new, at_open, is_new, is_old).to(tl.float32)
    value_high = _page_rows(v, open_values, at_new + half, at_open + half, is_new, is_old)
    value_high = value_high.to(tl.float32)
    if full:
        block = tl.load(tables + sequence.to(tl.int64) * stride_table + page).to(tl.int64)
        at = block * heads + head
        every = inside & (t >= 0)[:, None]
        amax = tl.max(tl.max(tl.maximum(tl.abs(value_low), tl.abs(value_high)), 1), 0)
        value_scale = power_of_two(amax, FP8_SHIFT, FP8_FRACTION)
        shrink = inverse(value_scale)
        at_value = (at * dim + i[None, :]) * PAGE + t[:, None]
        tl.store(value_codes + at_value, e4m3_codes(value_low * shrink), mask=every)
        at_value += half * PAGE
        tl.store(value_codes + at_value, e4m3_codes(value_high * shrink), mask=every)
        tl.store(page_scales + 2 * at + 1, value_scale)
        if NVFP4:
            live = t >= tl.where(page == 0, FIRST, 0)
            if FIRST > 0:  # noqa: SIM102 (known when compiling)
                if page == 0:
                    at_first = (at * FIRST + t)[:, None] * dim + i[None, :]
                    kept = every & (t < FIRST)[:, None]
                    tl.store(first_keys + at_first, key_low, mask=kept)
                    tl.store(first_keys + at_first + half, key_high, mask=kept)
            ref_low, ref_high, low, high = _centre(key_low, key_high, live)
            tl.store(key_refs + at * dim + i, ref_low, mask=i < half)
            tl.store(key_refs + at * dim + half + i, ref_high, mask=i < half)
            amax = tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0)
            unit = power_of_two(amax, FP4_SHIFT, FP4_FRACTION)
            low, high = low * inverse(unit), high * inverse(unit)
            codes = _group_steps(low, high, PAGE, HALF)
            j = tl.arange(0, HALF // 8)
            at_scale = (at * PAGE + t)[:, None] * (dim // 16) + j[None, :]
            tl.store(
                key_scales + at_scale, codes, mask=(j < dim // 16)[None, :] & (t >= 0)[:, None]
            )
            step = tl.broadcast_to(scale_to_f32(codes)[:, :, None], (PAGE, HALF // 8, 8))
            step = tl.reshape(step, (PAGE, HALF))
            code_low, code_high = e2m1_codes(low, step), e2m1_codes(high, step)
            at_code = (at * PAGE + t)[:, None] * half + i[None, :]
            tl.store(key_codes + at_code, (code_low | code_high << 4).to(tl.uint8), mask=every)
            if RANK > 0:
                # In units of g, which is a power of two: nothing is rounded on the way to float64.
                left_low = (low - e2m1_values(code_low) * step).to(tl.float64)
                left_high = (high - e2m1_values(code_high) * step).to(tl.float64)
                for r in tl.static_range(RANK):
                    along = directions + (head * RANK + r) * dim + i
                    u_low = tl.load(along, mask=i < half, other=0.0).to(tl.float64)
                    u_high = tl.load(along + half, mask=i < half, other=0.0).to(tl.float64)
                    e = tl.sum(left_low * u_low[None, :] + left_high * u_high[None, :], 1) / UNIT
                    tl.store(
                        key_residuals + (at * PAGE + t) * RANK + r, e4m3_codes(e.to(tl.float32))
                    )
        else:
            low, high = key_low.to(tl.float32), key_high.to(tl.float32)
            amax = tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0)
            unit = power_of_two(amax, FP8_SHIFT, FP8_FRACTION)
            at_code = (at * PAGE + t)[:, None] * dim + i[None, :]
            tl.store(key_codes + at_code, e4m3_codes(low * inverse(unit)), mask=every)
            tl.store(key_codes + at_code + half, e4m3_codes(high * inverse(unit)), mask=every)
        tl.store(page_scales + 2 * at, unit)


def sealed_append(k: torch.Tensor, v: torch.Tensor, cache: SealedKV, batch: AttentionBatch) -> None:
    """Store this step's keys and values in open pages, and seal those that become full.

    k, v: float32 [T, Hkv, hd], turned by RoPE already. Sequences write to pages of their own.
    """
    where = open_of(batch)
    k, v = k.contiguous(), v.contiguous()
    _, heads, dim = k.shape
    sequences, width = where.pages.shape
    seal_kernel[(sequences * width, heads)](
        k, v, cache.open_keys, cache.open_values, batch.query_start, batch.context_lens,
        batch.block_tables, where.pages, *parts_of(cache),
        width, heads, dim, batch.block_tables.stride(0), where.pages.stride(0),
        cache.num_shared, cache.open_offset,
        NVFP4=cache.key_scales is not None, RANK=cache.rank,
        FIRST=0 if cache.first_keys is None else FIRST_TOKENS, UNIT=RESIDUAL_UNIT,
        PAGE=cache.block_tokens, HALF=triton.next_power_of_2(dim // 2), num_warps=8,
    )  # fmt: skip


def open_of(batch: AttentionBatch) -> OpenBatch:
    """Where the open pages of a batch are.

    Raises:
        InternalError: the batch was not made for sealed pages.
    """
    if batch.open is None:
        raise InternalError("a batch over sealed pages does not say where its open pages are")
    return batch.open


def half_width(dim: int) -> int:
    """Channels of half a head, padded to what a product takes."""
    return max(triton.next_power_of_2(dim // 2), 16)


def parts_of(cache: SealedKV) -> tuple[torch.Tensor, ...]:
    """The cache's pages in the kernels' order; parts that the format has not are stood for by others."""
    nothing = cache.page_scales  # never read
    parts = (
        cache.key_codes, cache.key_scales, cache.key_residuals, cache.key_refs,
        cache.value_codes, cache.page_scales, cache.first_keys, cache.directions,
    )  # fmt: skip
    return tuple(nothing if part is None else part for part in parts)
