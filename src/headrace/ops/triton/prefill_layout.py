"""Lays a chunk's past out row by row, so that whole tiles are copied to shared memory at once.

Costs one read and one write of the past: at 16,384 tokens under one percent of a whole prompt's attention.
Pages that are sealed are put together once here, r + g s c + U (16 g e), not once for each query tile.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.ops.records import AttentionBatch
from headrace.ops.triton.control import interpreted
from headrace.ops.triton.lowbit import e4m3_to_f16, nvfp4_to_f16, scale_to_f16, spread

TILE, DIM = 128, 128  # keys of a tile, and the only head size that the kernel over tiles has
# Below this many rows of a sequence, laying the past out costs more than it saves.
MIN_ROWS = 512
# Of a laid out past at most; beyond it the pages are read as they lie.
MAX_NBYTES = 256 << 20


def takes(q: torch.Tensor, batch: AttentionBatch, kv_heads: int, page: int) -> bool:
    """Whether the past of a chunk [T, H, hd] is worth laying out, and can be, on its device."""
    if interpreted() or q.device.type != "cuda":
        return False
    sequences = batch.block_tables.shape[0]
    return (
        q.shape[2] == DIM
        and q.shape[0] >= MIN_ROWS * sequences
        and TILE % page == 0
        and 4 * sequences * kv_heads * room_of(batch, page) * DIM <= MAX_NBYTES
        and torch.cuda.get_device_capability(q.device) == (9, 0)
    )


def room_of(batch: AttentionBatch, page: int) -> int:
    """Rows that a sequence's past is laid out in: whole tiles."""
    return triton.cdiv(batch.block_tables.shape[1] * page, TILE) * TILE


@triton.jit
def plain_layout_kernel(
    keys, values, tables, query_start, context_lens, out_keys, out_values,
    window, stride_table, stride_block, stride_head, room,
    PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """ROWS positions of a sequence and head: to [S, Hkv, room, D], zeros up to the end of a tile."""
    sequence, kv_head, kv_heads = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    context = tl.load(context_lens + sequence)
    rows = tl.load(query_start + sequence + 1) - tl.load(query_start + sequence)
    begin = tl.program_id(0) * ROWS
    if (begin >= tl.cdiv(context, TILE) * TILE) | (rows == 0):
        return
    if begin + ROWS + window <= context - rows:
        return  # before what the first row sees
    t, d = begin + tl.arange(0, ROWS), tl.arange(0, DIM)
    there = t < context
    table = tables + sequence.to(tl.int64) * stride_table
    block = tl.load(table + t // PAGE, mask=there, other=0).to(tl.int64)
    at = (block * stride_block + kv_head * stride_head + (t % PAGE) * DIM)[:, None] + d[None, :]
    to = ((sequence * kv_heads + kv_head).to(tl.int64) * room + t)[:, None] * DIM + d[None, :]
    tl.store(out_keys + to, tl.load(keys + at, mask=there[:, None], other=0.0))
    tl.store(out_values + to, tl.load(values + at, mask=there[:, None], other=0.0))


@triton.jit
def sealed_layout_kernel(
    key_codes, key_scales, key_residuals, key_refs, value_codes, page_scales, first_keys, directions,
    tables, query_start, context_lens, out_keys, out_values, window, stride_table, room,
    NVFP4: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """One page of a sequence and head: keys float16 and values bfloat16; zeros where it is not full."""
    page, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence = tl.program_id(2)
    context = tl.load(context_lens + sequence)
    rows = tl.load(query_start + sequence + 1) - tl.load(query_start + sequence)
    if (page * PAGE >= tl.cdiv(context, TILE) * TILE) | (rows == 0):
        return
    if page * PAGE + PAGE + window <= context - rows:
        return
    half: tl.constexpr = DIM // 2
    t, i, d = tl.arange(0, PAGE), tl.arange(0, DIM // 2), tl.arange(0, DIM)
    to = ((sequence * kv_heads + kv_head).to(tl.int64) * room + page * PAGE + t)[:, None] * DIM
    if page * PAGE + PAGE > context:
        tl.store(out_keys + to + d[None, :], tl.zeros((PAGE, DIM), tl.float16))
        tl.store(out_values + to + d[None, :], tl.zeros((PAGE, DIM), tl.bfloat16))
        return
    block = tl.load(tables + sequence.to(tl.int64) * stride_table + page).to(tl.int64)
    block = block * kv_heads + kv_head
    g = tl.load(page_scales + 2 * block)
    if NVFP4:
        j = tl.arange(0, DIM // 16)
        code = tl.load(key_codes + block * (PAGE * half) + t[:, None] * half + i[None, :])
        step = tl.load(
            key_scales + block * (PAGE * DIM // 16) + t[:, None] * (DIM // 16) + j[None, :]
        )
        low, high = nvfp4_to_f16(code, spread(scale_to_f16(step), PAGE, DIM // 16), UNPACK)
        low = low.to(tl.float32) * (g * 128.0) + tl.load(key_refs + block * DIM + i)[None, :].to(
            tl.float32
        )
        ref = tl.load(key_refs + block * DIM + half + i)[None, :].to(tl.float32)
        high = high.to(tl.float32) * (g * 128.0) + ref
        for r in tl.static_range(RANK):
            left = tl.load(key_residuals + block * (PAGE * RANK) + t * RANK + r)
            left = e4m3_to_f16(left, UNPACK).to(tl.float32) * (g * 16.0)
            along = directions + (kv_head * RANK + r) * DIM + i
            low += left[:, None] * tl.load(along)[None, :]
            high += left[:, None] * tl.load(along + half)[None, :]
        low, high = low.to(tl.float16), high.to(tl.float16)
        if FIRST > 0:  # noqa: SIM102 (known when compiling)
            if page == 0:
                at = first_keys + (block * FIRST + t)[:, None] * DIM + i[None, :]
                kept = (t < FIRST)[:, None] & (i >= 0)[None, :]
                low = tl.where(kept, tl.load(at, mask=kept, other=0.0).to(tl.float16), low)
                high = tl.where(kept, tl.load(at + half, mask=kept, other=0.0).to(tl.float16), high)
    else:
        at = key_codes + block * (PAGE * DIM) + t[:, None] * DIM + i[None, :]
        low = (e4m3_to_f16(tl.load(at), UNPACK).to(tl.float32) * g).to(tl.float16)
        high = (e4m3_to_f16(tl.load(at + half), UNPACK).to(tl.float32) * g).to(tl.float16)
    tl.store(out_keys + to + i[None, :], low)
    tl.store(out_keys + to + half + i[None, :], high)
    code = tl.load(value_codes + block * (DIM * PAGE) + d[:, None] * PAGE + t[None, :])
    value = e4m3_to_f16(code, UNPACK).to(tl.float32) * tl.load(page_scales + 2 * block + 1)
    tl.store(out_values + to + d[None, :], tl.trans(value.to(tl.bfloat16)))


@triton.jit
def open_layout_kernel(
    open_keys, open_values, open_pages, query_start, context_lens, out_keys, out_values,
    stride_pages, num_shared, open_offset, room,
    PAGE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One page that rows of the step lie in, as it is open: to [Hkv, room, D], from ``own_row`` on."""
    kv_head, kv_heads, sequence = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    context = tl.load(context_lens + sequence)
    begin = tl.load(query_start + sequence)
    rows = tl.load(query_start + sequence + 1) - begin
    start = context - rows
    offset = tl.program_id(0) * PAGE
    position = start // TILE * TILE + offset
    if (position >= tl.cdiv(context, TILE) * TILE) | (rows == 0):
        return
    t, d = tl.arange(0, PAGE), tl.arange(0, DIM)
    page, first = position // PAGE, start // PAGE
    used = (page >= first) & (position < context)
    slot = tl.load(open_pages + sequence * stride_pages + page - first, mask=used, other=0)
    slot += tl.where(slot >= num_shared, open_offset, 0)
    at = ((slot.to(tl.int64) * kv_heads + kv_head) * PAGE + t)[:, None] * DIM + d[None, :]
    there = (used & (position + t < context))[:, None] & (d >= 0)[None, :]
    to = kv_head.to(tl.int64) * room + own_row(begin, sequence, TILE) + offset
    to = (to + t)[:, None] * DIM + d[None, :]
    tl.store(out_keys + to, tl.load(open_keys + at, mask=there, other=0.0).to(tl.float16))
    tl.store(out_values + to, tl.load(open_values + at, mask=there, other=0.0))


@triton.jit
def own_row(begin, sequence, TILE: tl.constexpr):
    """Where a sequence's own tiles start: it has at most two more tiles' rows than the step's."""
    return begin + sequence * (2 * TILE)
