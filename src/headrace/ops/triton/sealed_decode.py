"""Attention of one new token for each sequence over sealed pages (flash decoding).

Operands are swapped, S^T = K Q^T and O^T = V^T P^T, so that the query heads of a key head pad to 8
columns instead of 16 rows; values lie transposed in their pages, as the second product takes them.

Keys stay codes times E4M3 scales in float16; what is left of the key, per page, goes into the scores:

    s = g 2^7 (codes . q + residuals . (U q) / 8) + r . q        q in units of scale * log2 e

and the accumulator is kept in units of the current page's value scale: both are powers of two, so that
the factor joins the one that rescales it anyway.

A row sees the sealed pages before its own, and its own in bfloat16. Parts are whole pages, cut by the
row's own number of pages only: a row's bits do not depend on its neighbours.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.core.kv_formats import FIRST_TOKENS
from headrace.ops.records import AttentionBatch, SealedKV
from headrace.ops.triton import sealed_decode_cuda
from headrace.ops.triton.attention_decode import num_parts
from headrace.ops.triton.control import unpack_instructions
from headrace.ops.triton.lowbit import e4m3_to_f16, nvfp4_to_f16, scale_to_f16, spread
from headrace.ops.triton.overlap import LINE_NBYTES, can_overlap, prefetch, wait_and_release
from headrace.ops.triton.sealed_append import half_width, open_of, parts_of
from headrace.ops.triton.softmax import LOG2_E, NOTHING, absorb, fetch, merge_parts, part_size
from headrace.ops.triton.tuning import decode_tuning

# Programs of a row: what 132 multiprocessors run at a time, four each.
PART_PROGRAMS = 512
_PROGRAMS = 1024  # of a launch at most, unless there are more (sequence, key head) pairs
_MIN_TOKENS = 256  # of a part: its output, 4 bytes a channel for each query head, does not count
# Of a program, asked of the second-level cache while the kernel before still runs.
AHEAD_PAGES = tl.constexpr(2)
RESIDUALS = tl.constexpr(16)  # columns of residuals: what a product takes at least


@triton.jit
def open_page(
    keys, values, low, high, top, total, out, begin, end,
    TILE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rows begin to end of a page in bfloat16: the new (top, total, out)."""
    half: tl.constexpr = DIM // 2
    i, d = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    for tile in range(begin // TILE * TILE, end, TILE):
        t = tile + tl.arange(0, TILE)
        seen = (t >= begin) & (t < end)
        inside = seen[:, None] & (i < half)[None, :]
        at = keys + t[:, None] * DIM + i[None, :]
        score = tl.dot(tl.load(at, mask=inside, other=0.0).to(tl.float16), low)
        key = tl.load(at + half, mask=inside, other=0.0).to(tl.float16)
        score = tl.dot(key, high, score)
        weight, top, shrink = absorb(tl.where(seen[:, None], score, float("-inf")), top)
        total = total * shrink + tl.sum(weight, 0)
        inside = seen[None, :] & (d < DIM)[:, None]
        value = tl.load(values + t[None, :] * DIM + d[:, None], mask=inside, other=0.0)
        out = tl.dot(value, weight.to(tl.bfloat16), out * shrink[None, :])
    return top, total, out


@triton.jit
def first_rows(
    first_keys, value_codes, low, high, begin,
    FIRST: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    UNPACK: tl.constexpr,
):  # fmt: skip
    """A sequence's first rows, whose keys are in bfloat16: (top, total, out in the page's units)."""
    half: tl.constexpr = DIM // 2
    i, d, f = tl.arange(0, HALF), tl.arange(0, 2 * HALF), tl.arange(0, FIRST)
    inside = (i < half)[None, :] & (f >= 0)[:, None]
    at = first_keys + f[:, None] * DIM + i[None, :]
    score = tl.dot(tl.load(at, mask=inside, other=0.0).to(tl.float16), low)
    score = tl.dot(tl.load(at + half, mask=inside, other=0.0).to(tl.float16), high, score)
    score = tl.where((f >= begin)[:, None], score, float("-inf"))
    weight, top, _ = absorb(score, tl.zeros_like(tl.max(score, 0)) + NOTHING)
    at = value_codes + d[:, None] * PAGE + f[None, :]
    code = tl.load(at, mask=(d < DIM)[:, None] & (f >= 0)[None, :], other=0)
    return top, tl.sum(weight, 0), tl.dot(e4m3_to_f16(code, UNPACK), weight.to(tl.float16))


@triton.jit
def reference_scores(
    key_refs, table, shifts, low16, high16, start, end, kv_head, kv_heads,
    DIM: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """r . q of the pages start to end, 16 at a time, to ``shifts`` [page, GROUP]."""
    half: tl.constexpr = DIM // 2
    i, n = tl.arange(0, HALF), tl.arange(0, GROUP)
    for tile in range(start, end, 16):
        page = tile + tl.arange(0, 16)
        block = tl.load(table + page, mask=page < end, other=0).to(tl.int64) * kv_heads + kv_head
        at = key_refs + (block * DIM)[:, None] + i[None, :]
        inside = (page < end)[:, None] & (i < half)[None, :]
        shift = tl.dot(tl.load(at, mask=inside, other=0.0).to(tl.float16), low16)
        high = tl.load(at + half, mask=inside, other=0.0).to(tl.float16)
        shift = tl.dot(high, high16, shift)
        tl.store(shifts + page[:, None] * GROUP + n[None, :], shift, mask=(page < end)[:, None])
    tl.debug_barrier()  # other threads of the program read them


@triton.jit
def page_ahead(codes, block, NBYTES: tl.constexpr, OVERLAPS: tl.constexpr):
    """Ask the second-level cache for a page's codes."""
    lines: tl.constexpr = triton.next_power_of_2(triton.cdiv(NBYTES, LINE_NBYTES))
    line = tl.minimum(tl.arange(0, lines) * LINE_NBYTES, NBYTES - 1)
    prefetch(codes + block * NBYTES + line, OVERLAPS)


@triton.jit
def sealed_part_kernel(
    q, key_codes, key_scales, key_residuals, key_refs, value_codes, page_scales, first_keys,
    directions, open_keys, open_values, tables, open_pages, context_lens, shifts, sums, mixed,
    scale, window, heads, group, max_pages, stride_table, stride_pages, num_shared, open_offset,
    NVFP4: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, MIN_PART: tl.constexpr,
    PARTS: tl.constexpr, UNPACK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    context = tl.load(context_lens + sequence)
    begin = tl.maximum(context - window, 0)  # the first position that the row sees
    first_page, own_page = begin // PAGE, (context - 1) // PAGE
    pages = own_page - first_page + 1
    size = part_size(pages, MIN_PART, PARTS)
    table = tables + sequence.to(tl.int64) * stride_table
    half: tl.constexpr = DIM // 2
    if OVERLAPS:
        for i in tl.static_range(AHEAD_PAGES):
            page = tl.minimum(first_page + tl.program_id(2) * size + i, own_page)
            block = tl.load(table + page).to(tl.int64) * kv_heads + kv_head
            page_ahead(key_codes, block, PAGE * (half if NVFP4 else DIM), OVERLAPS)
            page_ahead(value_codes, block, PAGE * DIM, OVERLAPS)
    wait_and_release(OVERLAPS)
    padded: tl.constexpr = HALF * 2 != DIM
    member, t = tl.arange(0, GROUP), tl.arange(0, PAGE)
    i, d, j = tl.arange(0, HALF), tl.arange(0, 2 * HALF), tl.arange(0, HALF // 8)
    row = sequence.to(tl.int64) * heads + kv_head * group + member
    real = (member < group)[None, :] & (i < half)[:, None]
    at_query = row[None, :] * DIM + i[:, None]
    low16 = (tl.load(q + at_query, mask=real, other=0.0) * scale).to(tl.float16)
    high16 = (tl.load(q + at_query + half, mask=real, other=0.0) * scale).to(tl.float16)
    e = tl.arange(0, RESIDUALS)
    if RANK > 0:
        known = (e < RANK)[:, None] & (i < half)[None, :]
        along = directions + (kv_head * RANK + e)[:, None] * DIM + i[None, :]
        turned = tl.dot(tl.load(along, mask=known, other=0.0).to(tl.float16), low16)
        turned = tl.dot(tl.load(along + half, mask=known, other=0.0).to(tl.float16), high16, turned)
        turned16 = (turned * 0.125).to(
            tl.float16
        )  # residuals are in units of 16 g, scores of 128 g
    # Places within a page; pages lie at 64-bit offsets, which are added once for all threads.
    in_key = t[:, None] * (half if NVFP4 else DIM) + i[None, :]
    in_step = t[:, None] * (DIM // 16) + j[None, :]
    in_left = t[:, None] * RANK + e[None, :]
    in_value = d[:, None] * PAGE + t[None, :]
    real_key = (i < half)[None, :] & (t >= 0)[:, None]
    real_step = (j < DIM // 16)[None, :] & (t >= 0)[:, None]
    real_left = (e < RANK)[None, :] & (t >= 0)[:, None]
    real_value = (d < DIM)[:, None] & (t >= 0)[None, :]
    shifts += (sequence.to(tl.int64) * kv_heads + kv_head) * max_pages * GROUP
    for part in range(tl.program_id(2), tl.cdiv(pages, size), tl.num_programs(2)):
        start = first_page + part * size
        end = tl.minimum(start + size, own_page)  # sealed pages of the part
        if NVFP4:
            reference_scores(
                key_refs, table, shifts, low16, high16, start, end, kv_head, kv_heads,
                DIM, HALF, GROUP,
            )  # fmt: skip
        top = tl.full((GROUP,), NOTHING, tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        out = tl.zeros((2 * HALF, GROUP), tl.float32)
        unit = 1.0  # the value scale that ``out`` is in units of
        if FIRST > 0:  # noqa: SIM102 (known when compiling)
            if (start == 0) & (end > 0):
                block = tl.load(table).to(tl.int64) * kv_heads + kv_head
                top, total, out = first_rows(
                    first_keys + block * (FIRST * DIM), value_codes + block * (DIM * PAGE),
                    low16, high16, begin, FIRST, PAGE, DIM, HALF, UNPACK,
                )  # fmt: skip
                unit = tl.load(page_scales + 2 * block + 1)
        hidden = tl.maximum(begin, FIRST)
        # Sums are kept for each row of the tile and added up after the loop.
        sums_of = tl.zeros((PAGE, GROUP), tl.float32)
        for page in range(start, end):
            block = tl.load(table + page).to(tl.int64) * kv_heads + kv_head
            g = tl.load(page_scales + 2 * block)
            new_unit = tl.load(page_scales + 2 * block + 1)
            if NVFP4:
                code = fetch(key_codes + block * (PAGE * half) + in_key, real_key, padded)
                step = fetch(key_scales + block * (PAGE * (DIM // 16)) + in_step, real_step, padded)
                key_low, key_high = nvfp4_to_f16(
                    code, spread(scale_to_f16(step), PAGE, HALF // 8), UNPACK
                )
                score = tl.dot(key_low, low16)
                score = tl.dot(key_high, high16, score)
                if RANK > 0:
                    left = fetch(key_residuals + block * (PAGE * RANK) + in_left, real_left, True)
                    score = tl.dot(e4m3_to_f16(left, UNPACK), turned16, score)
                score = score * (g * 128.0) + tl.load(shifts + page * GROUP + member)[None, :]
            else:
                code = fetch(key_codes + block * (PAGE * DIM) + in_key, real_key, padded)
                score = tl.dot(e4m3_to_f16(code, UNPACK), low16)
                code = fetch(key_codes + block * (PAGE * DIM) + half + in_key, real_key, padded)
                score = tl.dot(e4m3_to_f16(code, UNPACK), high16, score) * g
            score = tl.where((t >= hidden - page * PAGE)[:, None], score, float("-inf"))
            weight, top, shrink = absorb(score, top)
            sums_of = sums_of * shrink[None, :] + weight
            total = total * shrink
            code = fetch(value_codes + block * (DIM * PAGE) + in_value, real_value, padded)
            out = out * (shrink * (unit / new_unit))[None, :]
            out = tl.dot(e4m3_to_f16(code, UNPACK), weight.to(tl.float16), out)
            unit = new_unit
        total += tl.sum(sums_of, 0)
        out = out * unit
        if start + size > own_page:
            slot = tl.load(open_pages + sequence * stride_pages)
            slot += tl.where(slot >= num_shared, open_offset, 0)
            at = (slot.to(tl.int64) * kv_heads + kv_head) * (PAGE * DIM)
            top, total, out = open_page(
                open_keys + at, open_values + at, low16, high16, top, total, out,
                tl.maximum(begin - own_page * PAGE, 0), context - own_page * PAGE,
                16, DIM, HALF,
            )  # fmt: skip
        place = row * PARTS + part
        tl.store(sums + 2 * place, top, mask=member < group)
        tl.store(sums + 2 * place + 1, total, mask=member < group)
        tl.store(
            mixed + place[None, :] * DIM + d[:, None], out,
            mask=(member < group)[None, :] & (d < DIM)[:, None],
        )  # fmt: skip


@triton.jit
def sealed_merge_kernel(
    sums, mixed, sinks, out, context_lens, window, heads, dim,
    PAGE: tl.constexpr, MIN_PART: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG2: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + sequence)
    pages = (context - 1) // PAGE - tl.maximum(context - window, 0) // PAGE + 1
    count = tl.cdiv(pages, part_size(pages, MIN_PART, PARTS))
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2
    row = sequence.to(tl.int64) * heads + head
    wait_and_release(OVERLAPS)
    merge_parts(sums, mixed, sink, out, row, count, dim, PARTS, DIM, HAS_SINKS)


def sealed_attention_decode(
    q: torch.Tensor,
    cache: SealedKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q K^T * scale) V, one row for each sequence; see the reference for the terms.

    q: float32 [S, H, hd]; queries and keys are multiplied in float16 (keys are below 65,504), values of
    the row's own page in bfloat16, for its range; sums are float32. Returns float32 [S, H, hd].
    """
    if sealed_decode_cuda.takes(q, cache):
        return sealed_decode_cuda.decode(q, cache, batch, scale, window, sinks)
    q = q.contiguous()
    rows, heads, dim = q.shape
    page, kv_heads = cache.block_tokens, cache.key_codes.shape[1]
    group = heads // kv_heads
    where = open_of(batch)
    most = num_parts(kv_heads, PART_PROGRAMS)
    sums = torch.empty(rows, heads, most, 2, device=q.device)
    mixed = torch.empty(rows, heads, most, dim, device=q.device)
    min_part = max(_MIN_TOKENS // page, 1)
    room = batch.block_tables.shape[1]
    if window is not None:
        room = min(room, triton.cdiv(window, page) + 1)
    parts = min(triton.cdiv(room, min_part), most)
    programs = max(min(parts, _PROGRAMS // (rows * kv_heads)), 1)
    seen = window or 2**30
    max_pages = batch.block_tables.shape[1]
    width = max(triton.next_power_of_2(group), 8)
    nvfp4 = cache.key_scales is not None
    shifts = torch.empty(rows * kv_heads * max_pages * width if nvfp4 else 1, device=q.device)
    tuned = decode_tuning(q.device, dim, sealed=True)
    overlapping = can_overlap(q.device)
    early = {"launch_pdl": True} if overlapping else {}
    sealed_part_kernel[(rows, kv_heads, programs)](
        q, *parts_of(cache),
        cache.open_keys, cache.open_values, batch.block_tables, where.pages, batch.context_lens,
        shifts, sums, mixed, scale * LOG2_E, seen, heads, group, max_pages,
        batch.block_tables.stride(0), where.pages.stride(0), cache.num_shared, cache.open_offset,
        NVFP4=nvfp4, RANK=cache.rank,
        FIRST=0 if cache.first_keys is None else FIRST_TOKENS, PAGE=page,
        DIM=dim, HALF=half_width(dim), GROUP=width,
        MIN_PART=min_part, PARTS=most, UNPACK=unpack_instructions(),
        OVERLAPS=overlapping,
        num_warps=tuned.num_warps, num_stages=tuned.num_stages, maxnreg=tuned.max_registers,
        **early,
    )  # fmt: skip
    out = torch.empty_like(q)
    sealed_merge_kernel[(rows, heads)](
        sums, mixed, q if sinks is None else sinks, out, batch.context_lens, seen, heads, dim,
        PAGE=page, MIN_PART=min_part, PARTS=most, DIM=triton.next_power_of_2(dim),
        HAS_SINKS=sinks is not None, LOG2=LOG2_E, OVERLAPS=overlapping, num_warps=4,
        **early,
    )  # fmt: skip
    return out
