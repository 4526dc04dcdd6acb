"""Attention of one new token for each sequence over its paged past (flash decoding, Dao et al. 2023).

The keys that a row sees are cut into parts; a program takes parts of one sequence and one key head,
for all query heads that share it, and leaves (maximum, sum, unnormalised output) of each; a second
kernel merges them by their log-sum-exp, with the sink.

The cut depends on the row's own number of keys only, not on the batch or on the room in the block
table, so a row's bits do not depend on its neighbours, and a captured graph gives those of an eager
step. Grids depend on shapes only. Tiles cannot follow the batch either: other tiles, other bits.

Query heads that share a key head are rows of both products, padded to 16. As columns, S^T = K Q^T and
O^T = V^T P^T, they pad to 8, but values that lie row by row then go through registers instead of being
loaded ahead; float32 takes that way.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.ops.records import AttentionBatch, LayerKV
from headrace.ops.triton.overlap import LINE_NBYTES, can_overlap, prefetch, wait_and_release
from headrace.ops.triton.softmax import LOG2_E, NOTHING, absorb, fetch, merge_parts, part_size
from headrace.ops.triton.tuning import decode_tuning

# A part has at least 128 keys: shorter ones would cost more in merging than they save in time. It grows
# from where that many parts and key heads are 256 programs, two for each multiprocessor of a large GPU,
# in one wave. This counts key heads only: parts must not depend on the batch.
PART_TOKENS = 128
PART_PROGRAMS = 256
LEAST_PARTS, MOST_PARTS = 16, 128
_PROGRAMS = 1024  # of a launch at most, unless there are more (sequence, key head) pairs
# Of a program's first part, asked of the second-level cache while the kernel before still runs. H200,
# 2026-11-30, us: 67.8 for batch 1 at 64K and 126.9 at 128K; with 0 tokens 69.1, 127.1, with 256 69.1, 128.1.
AHEAD_TOKENS = 64


def num_parts(kv_heads: int, programs: int) -> int:
    """Parts that a row's keys are cut into at most, a power of two: about ``programs`` programs a row."""
    parts = LEAST_PARTS
    while parts < MOST_PARTS and parts * kv_heads < programs:
        parts *= 2
    return parts


@triton.jit
def swapped_part(
    query, keys, values, table, start, end, stride_block,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S^T = K Q^T, O^T = V^T P^T of a part: query [D, G]; (maximum, sum [G], output [D, G])."""
    padded: tl.constexpr = WIDE != DIM
    d, t = tl.arange(0, WIDE), tl.arange(0, TILE)
    inside = (d < DIM)[None, :] & (t >= 0)[:, None]
    top = tl.full((query.shape[1],), NOTHING, tl.float32)
    total = tl.zeros(
        (TILE, query.shape[1]), tl.float32
    )  # of each row of the tile, added up in the end
    out = tl.zeros((WIDE, query.shape[1]), tl.float32)
    for tile in range(start, end, TILE):
        # Beyond the end the last key is read again, and its score is not counted.
        position = tl.minimum(tile + t, end - 1)
        block = tl.load(table + position // PAGE).to(tl.int64)
        at = (block * stride_block + (position % PAGE) * DIM)[:, None] + d[None, :]
        score = tl.dot(fetch(keys + at, inside, padded), query, input_precision=PRECISION)
        score = tl.where((t < end - tile)[:, None], score, float("-inf"))
        weight, top, shrink = absorb(score, top)
        total = total * shrink[None, :] + weight
        value = tl.trans(fetch(values + at, inside, padded))
        out = tl.dot(
            value, weight.to(value.dtype), out * shrink[None, :], input_precision=PRECISION
        )
    return top, tl.sum(total, 0), out


@triton.jit
def upright_part(
    query, keys, values, table, start, end, stride_block,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S = Q K^T, O = P V of a part: query [G, D]; (maximum, sum [G], output [G, D])."""
    padded: tl.constexpr = WIDE != DIM
    d, t = tl.arange(0, WIDE), tl.arange(0, TILE)
    inside = (d < DIM)[None, :] & (t >= 0)[:, None]
    top = tl.full((query.shape[0],), NOTHING, tl.float32)
    total = tl.zeros((query.shape[0], TILE), tl.float32)
    out = tl.zeros((query.shape[0], WIDE), tl.float32)
    for tile in range(start, end, TILE):
        position = tl.minimum(tile + t, end - 1)
        block = tl.load(table + position // PAGE).to(tl.int64)
        at = (block * stride_block + (position % PAGE) * DIM)[:, None] + d[None, :]
        key = fetch(keys + at, inside, padded)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        score = tl.where((t < end - tile)[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink[:, None] + weight
        value = fetch(values + at, inside, padded)
        out = tl.dot(
            weight.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION
        )
    return top, tl.sum(total, 1), out


@triton.jit
def ahead(
    keys, values, table, start, context, stride_block,
    PAGE: tl.constexpr, DIM: tl.constexpr, AHEAD: tl.constexpr, LINES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Ask the second-level cache for a part's first keys and values, which memory may then bring while
    the kernel before ends."""
    # Beyond the end the last key is asked for again.
    position = tl.maximum(tl.minimum(start + tl.arange(0, AHEAD), context - 1), 0)
    block = tl.load(table + position // PAGE).to(tl.int64)
    # A row has LINES lines of the cache, padded to a power of two.
    step: tl.constexpr = LINE_NBYTES // (keys.dtype.element_ty.primitive_bitwidth // 8)
    line = tl.minimum(tl.arange(0, LINES) * step, DIM - 1)
    at = (block * stride_block + (position % PAGE) * DIM)[:, None] + line[None, :]
    prefetch(keys + at, OVERLAPS)
    prefetch(values + at, OVERLAPS)


@triton.jit
def part_kernel(
    q, keys, values, tables, context_lens, sums, mixed,
    scale, window, heads, group, stride_table, stride_block, stride_head,
    MIN_PART: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    SWAPPED: tl.constexpr, OVERLAPS: tl.constexpr, AHEAD: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    member, d = tl.arange(0, GROUP), tl.arange(0, WIDE)
    row = sequence.to(tl.int64) * heads + kv_head * group + member
    table = tables + sequence.to(tl.int64) * stride_table
    head = kv_head.to(tl.int64) * stride_head
    keys += head
    values += head
    context = tl.load(context_lens + sequence)
    begin = tl.maximum(context - window, 0)  # the first position that the row sees
    size = part_size(context - begin, MIN_PART, PARTS)
    if AHEAD > 0:
        ahead(
            keys, values, table, begin + tl.program_id(2) * size, context, stride_block,
            PAGE, DIM, AHEAD, LINES, OVERLAPS,
        )  # fmt: skip
    wait_and_release(OVERLAPS)
    if SWAPPED:
        real = (member < group)[None, :] & (d < DIM)[:, None]
        in_row = row[None, :] * DIM + d[:, None]
    else:
        real = (member < group)[:, None] & (d < DIM)[None, :]
        in_row = row[:, None] * DIM + d[None, :]
    query = tl.load(q + in_row, mask=real, other=0.0) * scale
    query = query.to(keys.dtype.element_ty)
    for part in range(tl.program_id(2), tl.cdiv(context - begin, size), tl.num_programs(2)):
        start = begin + part * size
        end = tl.minimum(start + size, context)
        place = row * PARTS + part
        if SWAPPED:
            top, total, out = swapped_part(
                query,
                keys,
                values,
                table,
                start,
                end,
                stride_block,
                PAGE,
                DIM,
                WIDE,
                TILE,
                PRECISION,
            )
            at = place[None, :] * DIM + d[:, None]
        else:
            top, total, out = upright_part(
                query,
                keys,
                values,
                table,
                start,
                end,
                stride_block,
                PAGE,
                DIM,
                WIDE,
                TILE,
                PRECISION,
            )
            at = place[:, None] * DIM + d[None, :]
        tl.store(mixed + at, out, mask=real)
        tl.store(sums + 2 * place, top, mask=member < group)
        tl.store(sums + 2 * place + 1, total, mask=member < group)


@triton.jit
def merge_kernel(
    sums, mixed, sinks, out, context_lens, window, heads, dim,
    MIN_PART: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG2: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + sequence)
    keys = context - tl.maximum(context - window, 0)
    count = tl.cdiv(keys, part_size(keys, MIN_PART, PARTS))
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2
    row = sequence.to(tl.int64) * heads + head
    wait_and_release(OVERLAPS)
    merge_parts(sums, mixed, sink, out, row, count, dim, PARTS, DIM, HAS_SINKS)


def attention_decode(
    q: torch.Tensor,
    cache: LayerKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """softmax(q K^T * scale) V, one row for each sequence; see the reference for the terms.

    q: float32 [S, H, hd]; query and probabilities are rounded to the cache's type, sums are float32.
    Returns [S, H, hd] of ``dtype``.
    """
    q = q.contiguous()
    rows, heads, dim = q.shape
    keys = cache.keys
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    most = num_parts(kv_heads, PART_PROGRAMS)
    sums = torch.empty(rows, heads, most, 2, device=q.device)
    mixed = torch.empty(rows, heads, most, dim, device=q.device)
    room = window or batch.block_tables.shape[1] * cache.block_tokens
    parts = min(triton.cdiv(room, PART_TOKENS), most)
    programs = max(min(parts, _PROGRAMS // (rows * kv_heads)), 1)
    exact = keys.dtype == torch.float32
    seen = window or 2**31 - 1
    tuned = decode_tuning(q.device, dim, sealed=False)
    swapped = exact or tuned.swapped
    overlaps = can_overlap(q.device)
    early = {"launch_pdl": True} if overlaps else {}
    part_kernel[(rows, kv_heads, programs)](
        q, keys, cache.values, batch.block_tables, batch.context_lens, sums, mixed,
        scale * LOG2_E, seen, heads, group,
        batch.block_tables.stride(0), keys.stride(0), keys.stride(1),
        MIN_PART=PART_TOKENS, PARTS=most, PAGE=cache.block_tokens,
        GROUP=max(triton.next_power_of_2(group), 8 if swapped else 16), SWAPPED=swapped, OVERLAPS=overlaps,
        AHEAD=AHEAD_TOKENS if overlaps else 0,
        LINES=triton.next_power_of_2(triton.cdiv(dim * keys.element_size(), LINE_NBYTES.value)),
        DIM=dim, WIDE=triton.next_power_of_2(dim),
        TILE=32 if exact else tuned.tile, PRECISION="ieee" if exact else "tf32",
        num_warps=tuned.num_warps, num_stages=2 if exact else tuned.num_stages,
        maxnreg=tuned.max_registers, **early,
    )  # fmt: skip
    out = torch.empty_like(q, dtype=dtype)
    merge_kernel[(rows, heads)](
        sums, mixed, q if sinks is None else sinks, out, batch.context_lens, seen, heads, dim,
        MIN_PART=PART_TOKENS, PARTS=most, DIM=triton.next_power_of_2(dim),
        HAS_SINKS=sinks is not None, LOG2=LOG2_E, OVERLAPS=overlaps, num_warps=4,
        **early,
    )  # fmt: skip
    return out
