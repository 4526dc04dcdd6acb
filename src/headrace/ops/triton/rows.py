"""Operations on single rows: embedding, normalisation, rotary embedding, cache writes."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.formats.base import PackedTensor
from headrace.ops.records import AttentionBatch, LayerKV, RopeTable
from headrace.ops.reference import dense as reference
from headrace.ops.triton.overlap import can_overlap, wait_and_release
from headrace.ops.triton.packed_few import is_packed
from headrace.ops.triton.packed_many import embed_packed

FLOATS = ("f32", "f16", "bf16")
_COLUMNS = 1024  # of an embedding row that one program copies


@triton.jit
def embed_kernel(table, ids, out, cols, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row) * row_stride
    value = tl.load(table + source + at, mask=at < cols)
    tl.store(out + row.to(tl.int64) * cols + at, value.to(tl.float32), mask=at < cols)


def embed(weight: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """Look up token vectors, which are unpacked if the table is packed.

    weight: [V, D]; ids: int64 [T]. Returns float32 [T, D].
    """
    if is_packed(weight):
        return embed_packed(weight, ids)
    if weight.format not in FLOATS:
        return reference.embed(weight, ids)
    data = weight.parts["data"]
    # The table may be pinned host memory: a step needs a row or two of it.
    out = torch.empty(len(ids), weight.cols, device=ids.device)
    grid = (len(ids), triton.cdiv(weight.cols, _COLUMNS))
    embed_kernel[grid](data, ids, out, weight.cols, data.stride(0), BLOCK=_COLUMNS, num_warps=4)
    return out


@triton.jit
def rmsnorm_kernel(x, weight, out, cols, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * cols
    at = tl.arange(0, BLOCK)
    inside = at < cols
    scale = tl.load(weight + at, mask=inside, other=0.0)
    wait_and_release(PDL)
    value = tl.load(x + row + at, mask=inside, other=0.0)
    mean = tl.sum(value * value, 0) / cols
    value = value * (1.0 / tl.sqrt(mean + eps)) * scale
    tl.store(out + row + at, value.to(out.dtype.element_ty), mask=inside)


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, one program a row.

    x: float32 [T, D]; weight: float32 [D]. Returns [T, D] of ``dtype``.
    """
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    cols = x.shape[1]
    block = triton.next_power_of_2(cols)
    warps = min(max(block // 256, 1), 8)
    overlap = can_overlap(x.device)
    rmsnorm_kernel[(x.shape[0],)](
        x, weight, out, cols, eps, BLOCK=block, PDL=overlap, num_warps=warps, launch_pdl=overlap
    )
    return out


@triton.jit
def rope_kernel(
    x, cos, sin, positions, heads, dim, half,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    angle = tl.load(positions + row) * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    base = x + (row * heads + head) * dim
    if INTERLEAVED:
        first, second = base + 2 * pair, base + 2 * pair + 1
    else:
        first, second = base + pair, base + half + pair
    inside = (head < heads) & (pair < half)
    a = tl.load(first, mask=inside)
    b = tl.load(second, mask=inside)
    tl.store(first, a * c - b * s, mask=inside)
    tl.store(second, b * c + a * s, mask=inside)


_ROPE_HEADS = 8  # heads of one program: 8 x 64 pairs are two passes of four warps


def rope(x: torch.Tensor, table: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """Turn pairs of dimensions by position, in place.

    x: float32 [T, H, hd], contiguous, whose first 2 * table.cos.shape[1] dimensions turn;
    positions: int64 [T]. Returns x.
    """
    rows, heads, dim = x.shape
    half = table.cos.shape[1]
    grid = (rows, triton.cdiv(heads, _ROPE_HEADS))
    rope_kernel[grid](
        x, table.cos, table.sin, positions, heads, dim, half,
        INTERLEAVED=table.interleaved, HEADS=_ROPE_HEADS, HALF=triton.next_power_of_2(half),
        num_warps=4,
    )  # fmt: skip
    return x


@triton.jit
def kv_append_kernel(
    k, v, keys, values, slots, block_tokens, dim,
    stride_block, stride_head, DIM: tl.constexpr,
):  # fmt: skip
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row)
    at = tl.arange(0, DIM)
    source = (row.to(tl.int64) * heads + head) * dim + at
    target = (slot // block_tokens) * stride_block + head * stride_head
    target += (slot % block_tokens) * dim + at
    inside = at < dim
    key = tl.load(k + source, mask=inside)
    value = tl.load(v + source, mask=inside)
    tl.store(keys + target, key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + target, value.to(values.dtype.element_ty), mask=inside)


def kv_append(k: torch.Tensor, v: torch.Tensor, cache: LayerKV, slots: torch.Tensor) -> None:
    """Store this step's keys and values, rounded to the cache's type.

    k, v: float32 [T, Hkv, hd], contiguous; slots: int64 [T], block * block_tokens + row in the block.
    """
    rows, heads, dim = k.shape
    keys = cache.keys
    kv_append_kernel[(rows, heads)](
        k, v, keys, cache.values, slots, cache.block_tokens, dim, keys.stride(0), keys.stride(1),
        DIM=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


@triton.jit
def _turn(cos, sin, position, at, half, INTERLEAVED: tl.constexpr):
    """Of the dimensions ``at``: which one each turns with, and its cosine and signed sine."""
    turning = at < 2 * half
    if INTERLEAVED:
        pair, first = at // 2, at % 2 == 0
        partner = tl.where(first, at + 1, at - 1)
    else:
        pair, first = at % half, at < half
        partner = tl.where(first, at + half, at - half)
    angle = position * half + pair
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    return tl.where(turning, partner, at), c, tl.where(first, -s, s)


@triton.jit
def _turn_in_place(base, at, partner, c, s, dim):
    inside = at < dim
    mine = tl.load(base + at, mask=inside)
    other = tl.load(base + partner, mask=inside)
    tl.debug_barrier()  # all are read before one is written
    tl.store(base + at, mine * c + other * s, mask=inside)


@triton.jit
def rope_pair_kernel(
    q, k, cos, sin, positions, heads, kv_heads, dim, half,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row of q or of k."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    partner, c, s = _turn(cos, sin, tl.load(positions + row), at, half, INTERLEAVED)
    wait_and_release(PDL)
    if head < heads:
        _turn_in_place(q + (row * heads + head) * dim, at, partner, c, s, dim)
    else:
        _turn_in_place(k + (row * kv_heads + head - heads) * dim, at, partner, c, s, dim)


def rope_pair(q: torch.Tensor, k: torch.Tensor, table: RopeTable, positions: torch.Tensor) -> None:
    """``rope`` of q and k in place, in one kernel.

    q: float32 [T, H, hd], k: float32 [T, Hkv, hd], contiguous; positions: int64 [T].
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    overlap = can_overlap(q.device)
    rope_pair_kernel[(rows, heads + kv_heads)](
        q, k, table.cos, table.sin, positions, heads, kv_heads, dim, table.cos.shape[1],
        INTERLEAVED=table.interleaved, DIM=triton.next_power_of_2(dim), PDL=overlap, num_warps=1,
        launch_pdl=overlap,
    )  # fmt: skip


@triton.jit
def rope_append_kernel(
    q, k, v, cos, sin, positions, keys, values, slots, heads, kv_heads, dim, half,
    block_tokens, stride_block, stride_head,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query's turns in place, a key's and its value go to the cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    partner, c, s = _turn(cos, sin, tl.load(positions + row), at, half, INTERLEAVED)
    wait_and_release(PDL)
    if head < heads:
        _turn_in_place(q + (row * heads + head) * dim, at, partner, c, s, dim)
    else:
        inside = at < dim
        source = (row * kv_heads + head - heads) * dim
        slot = tl.load(slots + row)
        target = (slot // block_tokens) * stride_block + (head - heads) * stride_head
        target += (slot % block_tokens) * dim + at
        mine = tl.load(k + source + at, mask=inside)
        other = tl.load(k + source + partner, mask=inside)
        key, value = mine * c + other * s, tl.load(v + source + at, mask=inside)
        tl.store(keys + target, key.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + target, value.to(values.dtype.element_ty), mask=inside)


def rope_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: RopeTable,
    batch: AttentionBatch,
    cache: LayerKV,
) -> None:
    """``rope`` of q in place and of k, then ``kv_append`` of k and v, in one kernel.

    q: float32 [T, H, hd], k, v: float32 [T, Hkv, hd], contiguous; k itself is left as it is.
    """
    rows, heads, dim = q.shape
    kv_heads, keys = k.shape[1], cache.keys
    overlap = can_overlap(q.device)
    rope_append_kernel[(rows, heads + kv_heads)](
        q, k, v, table.cos, table.sin, batch.positions, keys, cache.values, batch.slots,
        heads, kv_heads, dim, table.cos.shape[1],
        cache.block_tokens, keys.stride(0), keys.stride(1),
        INTERLEAVED=table.interleaved, DIM=triton.next_power_of_2(dim), PDL=overlap, num_warps=1,
        launch_pdl=overlap,
    )  # fmt: skip
