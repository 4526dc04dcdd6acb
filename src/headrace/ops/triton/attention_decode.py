"""Attention of one new token for each sequence over its paged past (flash decoding, Dao et al. 2023).

The keys that a row sees are cut into parts; a program takes parts of one sequence and one key head,
for all query heads that share it, and leaves (maximum, sum, unnormalised output) of each; a second
kernel merges them by their log-sum-exp, with the sink.

The cut depends on the row's own number of keys only, not on the batch or on the room in the block
table, so a row's bits do not depend on its neighbours, and a captured graph gives those of an eager
step. Grids depend on shapes only.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.ops.records import AttentionBatch, LayerKV

LOG2_E = 1.4426950408889634

# A part has at least 128 keys, two tiles: shorter ones would cost more in merging than they save in time.
# It grows from where that many parts and key heads are 256 programs, two for each multiprocessor of a
# large GPU, in one wave. This counts key heads only: parts must not depend on the batch.
PART_TOKENS = 128
_PART_PROGRAMS = 256
LEAST_PARTS, MOST_PARTS = 16, 128
_PROGRAMS = 1024  # of a launch at most, unless there are more (sequence, key head) pairs
_TILE = 64  # keys that are multiplied at a time


def num_parts(kv_heads: int) -> int:
    """Parts that a row's keys are cut into at most, a power of two."""
    parts = LEAST_PARTS
    while parts < MOST_PARTS and parts * kv_heads < _PART_PROGRAMS:
        parts *= 2
    return parts


@triton.jit
def part_tokens(keys, MIN_PART: tl.constexpr, PARTS: tl.constexpr):
    """Keys of a part: MIN_PART times a power of two, so that there are at most PARTS parts."""
    size = keys * 0 + MIN_PART
    while size * PARTS < keys:
        size = size * 2
    return size


@triton.jit
def first_key(context, window):
    """The first position that a row at position context - 1 sees."""
    return tl.maximum(context - window, 0)


@triton.jit
def part_kernel(
    q, keys, values, tables, context_lens, sums, mixed,
    scale, window, heads, group, block_tokens, dim,
    stride_table, stride_block, stride_head,
    MIN_PART: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + sequence)
    begin = first_key(context, window)
    size = part_tokens(context - begin, MIN_PART, PARTS)
    member, d = tl.arange(0, GROUP), tl.arange(0, DIM)
    row = sequence.to(tl.int64) * heads + kv_head * group + member
    real = (member < group)[:, None] & (d < dim)[None, :]
    query = tl.load(q + row[:, None] * dim + d[None, :], mask=real, other=0.0)
    query = (query * scale).to(keys.dtype.element_ty)
    table = tables + sequence.to(tl.int64) * stride_table
    head = kv_head.to(tl.int64) * stride_head
    for part in range(tl.program_id(2), tl.cdiv(context - begin, size), tl.num_programs(2)):
        start = begin + part * size
        end = tl.minimum(start + size, context)
        top = tl.full((GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        out = tl.zeros((GROUP, DIM), tl.float32)
        for tile in range(start, end, TILE):
            position = tile + tl.arange(0, TILE)
            seen = position < end
            block = tl.load(table + position // block_tokens, mask=seen, other=0).to(tl.int64)
            at = block * stride_block + head + (position % block_tokens) * dim
            inside = seen[:, None] & (d < dim)[None, :]
            key = tl.load(keys + at[:, None] + d[None, :], mask=inside, other=0.0)
            value = tl.load(values + at[:, None] + d[None, :], mask=inside, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            score = tl.where(seen[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weight, 1)
            out = tl.dot(
                weight.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION
            )
            top = new_top
        place = row * PARTS + part
        tl.store(sums + 2 * place, top, mask=member < group)
        tl.store(sums + 2 * place + 1, total, mask=member < group)
        tl.store(mixed + place[:, None] * dim + d[None, :], out, mask=real)


@triton.jit
def merge_kernel(
    sums, mixed, sinks, out, context_lens, window, heads, dim,
    MIN_PART: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + sequence)
    keys = context - first_key(context, window)
    count = tl.cdiv(keys, part_tokens(keys, MIN_PART, PARTS))
    row = sequence.to(tl.int64) * heads + head
    part, d = tl.arange(0, PARTS), tl.arange(0, DIM)
    here = part < count
    top = tl.load(sums + 2 * (row * PARTS + part), mask=here, other=float("-inf"))
    total = tl.load(sums + 2 * (row * PARTS + part) + 1, mask=here, other=0.0)
    most = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2
        most = tl.maximum(most, sink)
    share = tl.exp2(top - most)
    bottom = tl.sum(total * share, 0)
    if HAS_SINKS:
        bottom += tl.exp2(sink - most)
    inside = here[:, None] & (d < dim)[None, :]
    pieces = tl.load(
        mixed + (row * PARTS + part)[:, None] * dim + d[None, :], mask=inside, other=0.0
    )
    value = tl.sum(pieces * share[:, None], 0) / bottom
    tl.store(out + row * dim + d, value.to(out.dtype.element_ty), mask=d < dim)


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
    most = num_parts(kv_heads)
    sums = torch.empty(rows, heads, most, 2, device=q.device)
    mixed = torch.empty(rows, heads, most, dim, device=q.device)
    room = window or batch.block_tables.shape[1] * cache.block_tokens
    parts = min(triton.cdiv(room, PART_TOKENS), most)
    programs = max(min(parts, _PROGRAMS // (rows * kv_heads)), 1)
    exact = keys.dtype == torch.float32
    seen = window or 2**31 - 1
    part_kernel[(rows, kv_heads, programs)](
        q, keys, cache.values, batch.block_tables, batch.context_lens, sums, mixed,
        scale * LOG2_E, seen, heads, group, cache.block_tokens, dim,
        batch.block_tables.stride(0), keys.stride(0), keys.stride(1),
        MIN_PART=PART_TOKENS, PARTS=most,
        GROUP=max(triton.next_power_of_2(group), 16), DIM=triton.next_power_of_2(dim),
        TILE=32 if exact else _TILE, PRECISION="ieee" if exact else "tf32",
        num_warps=4, num_stages=2 if exact else 4,  # the table's entries take one of them
    )  # fmt: skip
    out = torch.empty_like(q, dtype=dtype)
    merge_kernel[(rows, heads)](
        sums, mixed, q if sinks is None else sinks, out, batch.context_lens, seen, heads, dim,
        MIN_PART=PART_TOKENS, PARTS=most, DIM=triton.next_power_of_2(dim),
        HAS_SINKS=sinks is not None, LOG2=LOG2_E, num_warps=4,
    )  # fmt: skip
    return out
