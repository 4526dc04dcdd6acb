"""Causal attention of chunks over a past laid out row by row, for Hopper: bulk copies, three roles.

A block takes 128 query rows of one head. One warp copies tiles of keys and values to shared memory; two
groups of four warps take 64 rows each, and issue the scores of the next tile before the softmax of this
one (FlashAttention-3, Shah et al. 2024): the matrix units work while the exponentials are computed.

Written in Gluon, Triton's lower language, since the order of these steps is what makes it fast.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.core.kv_formats import FIRST_TOKENS
from headrace.ops.records import AttentionBatch, LayerKV, SealedKV
from headrace.ops.triton.control import unpack_instructions
from headrace.ops.triton.prefill_layout import (
    DIM,
    TILE,
    heads_at_once,
    open_layout_kernel,
    own_row,
    plain_layout_kernel,
    room_of,
    sealed_layout_kernel,
)
from headrace.ops.triton.sealed_append import open_of, parts_of
from headrace.ops.triton.softmax import LOG2_E, tile_of

ROWS = 128
STAGES, REGISTERS = 2, 240
LAID_ROWS = 64  # positions that a program lays out


@gluon.jit
def _copy(
    laid, own, tiles, full, free, base, own_base, tile, i,
    SEALED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys or values of step ``i``, once their place is free."""
    stage = i % STAGES
    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), laid.block_type.nbytes)
    at = base + (tile - i) * TILE
    bar, to = full.index(stage), tiles.index(stage)
    if SEALED:
        if i == 0:
            tma.async_copy_global_to_shared(own, [own_base, 0], bar, to)
        else:
            tma.async_copy_global_to_shared(laid, [at + TILE, 0], bar, to)
    else:
        tma.async_copy_global_to_shared(laid, [at, 0], bar, to)


@gluon.jit
def _load(
    keys, values, own_keys, own_values, key_tiles, value_tiles, bars, base, own_base, tile, first,
    SEALED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: the rows' own tile where pages are sealed, then tiles from the last to the first."""
    key_full, key_free, value_full, value_free = bars
    count = tile - first + 1
    if SEALED:
        count += 1
    for i in range(count):
        _copy(
            keys, own_keys, key_tiles, key_full, key_free, base, own_base, tile, i,
            SEALED, TILE, STAGES,
        )  # fmt: skip
        _copy(
            values, own_values, value_tiles, value_full, value_free, base, own_base, tile, i,
            SEALED, TILE, STAGES,
        )  # fmt: skip


@gluon.jit
def _rows(
    begin, start, context, first, head, heads,
    DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """64 positions from ``first`` on: offsets [64, DIM] of their rows of one head, and which there are."""
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    at = first + r
    real = gl.expand_dims((at >= start) & (at < context), 1)
    offset = gl.expand_dims(((begin + at - start).to(gl.int64) * heads + head) * DIM, 1)
    return offset + gl.expand_dims(d, 0), real


@gluon.jit
def _softmax(score, top, total, P: gl.constexpr, OPERAND: gl.constexpr):
    new_top = gl.maximum(top, gl.max(score, 1))
    weight = gl.exp2(score - gl.expand_dims(new_top, 1))
    shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(weight, 1)
    return gl.convert_layout(weight.to(P), OPERAND), shrink, new_top, total


@gluon.jit
def _attend(
    q, sinks, out, key_tiles, value_tiles, query_tiles, bars, begin, start, context, tile, first,
    scale, window, head, heads,
    HALF: gl.constexpr, SEALED: gl.constexpr, PAGE: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_WINDOW: gl.constexpr, LOG2: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
    DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group of four warps: 64 rows."""
    key_full, key_free, value_full, value_free = bars
    query_tile = query_tiles.index(HALF)
    K: gl.constexpr = key_tiles.dtype
    V: gl.constexpr = value_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    # Queries: float32 rows, scaled, to shared memory.
    PLAIN: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    own_first = tile * ROWS + HALF * 64
    at, real = _rows(begin, start, context, own_first, head, heads, DIM, PLAIN)
    query = gl.load(q + at, mask=real, other=0.0) * scale
    query_tile.store(query.to(K))
    fence_async_shared()

    position = own_first + gl.arange(0, 64, ROW)
    t = gl.arange(0, TILE, gl.SliceLayout(0, S))
    top = gl.full([64], -1.0e30, gl.float32, ROW)
    total = gl.zeros([64], gl.float32, ROW)
    if HAS_SINKS:
        top = gl.zeros([64], gl.float32, ROW) + gl.load(sinks + head) * LOG2
        total = gl.full([64], 1.0, gl.float32, ROW)
    mixed = gl.zeros([64, DIM], gl.float32, O)
    nothing = gl.zeros([64, TILE], gl.float32, S)

    # The first tile: the rows' own.
    mbarrier.wait(key_full.index(0), 0)
    score = warpgroup_mma(query_tile, key_tiles.index(0).permute((1, 0)), nothing, use_acc=False)
    mbarrier.arrive(key_free.index(0), count=1)
    key_at = gl.expand_dims(tile * TILE + t, 0)
    row_at = gl.expand_dims(position, 1)
    seen = key_at <= row_at
    if SEALED:
        seen = seen & (key_at // PAGE == row_at // PAGE)
    if HAS_WINDOW:
        seen = seen & (row_at - key_at < window)
    weight, shrink, top, total = _softmax(
        gl.where(seen, score, float("-inf")), top, total, V, OPERAND
    )
    count = tile - first + 1
    masked = 1
    if SEALED:
        count += 1
        masked = 2
    for i in range(1, count):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(key_full.index(stage), (i // STAGES) & 1)
        next_score = warpgroup_mma(
            query_tile,
            key_tiles.index(stage).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(value_full.index(before), ((i - 1) // STAGES) & 1)
        next_mixed = warpgroup_mma(weight, value_tiles.index(before), mixed, is_async=True)
        score = warpgroup_mma_wait(1, deps=[next_score])
        mbarrier.arrive(key_free.index(stage), count=1)
        if SEALED or HAS_WINDOW:  # noqa: SIM102 (known when compiling)
            if HAS_WINDOW or (i < masked):
                key_at = gl.expand_dims((tile + masked - 1 - i) * TILE + t, 0)
                seen = key_at <= row_at
                if SEALED:
                    seen = key_at // PAGE < row_at // PAGE
                if HAS_WINDOW:
                    seen = seen & (row_at - key_at < window)
                score = gl.where(seen, score, float("-inf"))
        next_weight, shrink, top, total = _softmax(score, top, total, V, OPERAND)
        mixed, weight = warpgroup_mma_wait(0, deps=[next_mixed, weight])
        mbarrier.arrive(value_free.index(before), count=1)
        mixed = mixed * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, O)), 1)
        weight = next_weight
    last = (count - 1) % STAGES
    mbarrier.wait(value_full.index(last), ((count - 1) // STAGES) & 1)
    mixed = warpgroup_mma(weight, value_tiles.index(last), mixed)
    mbarrier.arrive(value_free.index(last), count=1)
    mixed = mixed / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, O)), 1)
    at, real = _rows(begin, start, context, own_first, head, heads, DIM, O)
    gl.store(out + at, mixed, mask=real)


@gluon.jit
def flash_kernel(
    q, keys, values, own_keys, own_values, query_start, context_lens, sinks, out,
    scale, window, num_sequences, group, room, own_room, first_head, all_heads,
    SEALED: gl.constexpr, PAGE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
    LOG2: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    head, heads = gl.program_id(0), gl.num_programs(0)
    sequence, tile = tile_of(query_start, context_lens, num_sequences, gl.program_id(1), ROWS)
    if sequence >= 0:
        begin, context = gl.load(query_start + sequence), gl.load(context_lens + sequence)
        start = context - (gl.load(query_start + sequence + 1) - begin)
        first = 0
        if HAS_WINDOW:
            first = gl.maximum(gl.maximum(tile * ROWS, start) - window + 1, 0) // TILE
        # Of the key heads whose past is laid out.
        base = (sequence * (heads // group) + head // group) * room
        own_base = head // group * own_room + own_row(begin, sequence, TILE)
        own_base += (tile - start // TILE) * TILE
        head += first_head
        key_tiles = gl.allocate_shared_memory(keys.dtype, [STAGES, TILE, DIM], keys.layout)
        value_tiles = gl.allocate_shared_memory(values.dtype, [STAGES, TILE, DIM], values.layout)
        query_tiles = gl.allocate_shared_memory(
            keys.dtype, [2, 64, DIM], gl.NVMMASharedLayout(128, 16, 2)
        )
        key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(key_full.index(i), count=1)
            mbarrier.init(value_full.index(i), count=1)
            mbarrier.init(key_free.index(i), count=2)
            mbarrier.init(value_free.index(i), count=2)
        fence_async_shared()
        bars = (key_full, key_free, value_full, value_free)
        gl.warp_specialize(
            [
                (_attend, (q, sinks, out, key_tiles, value_tiles, query_tiles, bars, begin, start,
                           context, tile, first, scale, window, head, all_heads,
                           0, SEALED, PAGE, HAS_SINKS, HAS_WINDOW, LOG2, ROWS, TILE, DIM, STAGES)),
                (_attend, (q, sinks, out, key_tiles, value_tiles, query_tiles, bars, begin, start,
                           context, tile, first, scale, window, head, all_heads,
                           1, SEALED, PAGE, HAS_SINKS, HAS_WINDOW, LOG2, ROWS, TILE, DIM, STAGES)),
                (_load, (keys, values, own_keys, own_values, key_tiles, value_tiles, bars, base,
                         own_base, tile, first, SEALED, TILE, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


def _launch(
    q: torch.Tensor, out: torch.Tensor, laid: list[torch.Tensor], batch: AttentionBatch, scale: float,
    window: int | None, sinks: torch.Tensor | None, kv_heads: tuple[int, int, int], *, sealed: bool,
    page: int,
) -> None:  # fmt: skip
    """Attention of some key heads' queries; kv_heads: the first, how many, and how many there are."""
    rows, heads, _ = q.shape
    sequences = batch.context_lens.shape[0]
    first, count, total = kv_heads
    group = heads // total
    tiles = [
        TensorDescriptor.from_tensor(x.view(-1, DIM), [TILE, DIM], gl.NVMMASharedLayout(128, 16, 2))
        for x in laid
    ]
    # Tiles are aligned to positions: a sequence may have one more at each end than its rows fill.
    # Heads run first, so that the tiles with the longest pasts start before all others.
    flash_kernel[(count * group, rows // ROWS + 2 * sequences)](
        q, *tiles, batch.query_start, batch.context_lens, q if sinks is None else sinks, out,
        scale * LOG2_E, window or 2**30, sequences, group, laid[0].shape[-2], laid[2].shape[-2],
        first * group, heads,
        SEALED=sealed, PAGE=page, HAS_SINKS=sinks is not None, HAS_WINDOW=window is not None,
        LOG2=LOG2_E, ROWS=ROWS, TILE=TILE, DIM=DIM, STAGES=STAGES, REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip


def plain(
    q: torch.Tensor, cache: LayerKV, batch: AttentionBatch, scale: float, window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``attention_prefill`` over bfloat16 pages, of operands that ``prefill_layout.takes`` says yes to."""
    q = q.contiguous()
    keys, kv_heads, page = cache.keys, cache.keys.shape[1], cache.block_tokens
    sequences, room = batch.context_lens.shape[0], room_of(batch, page)
    count = heads_at_once(batch, kv_heads, page)
    size = (sequences, count, room, DIM)
    laid = [torch.empty(size, device=q.device, dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty_like(q)
    for first in range(0, kv_heads, count):
        plain_layout_kernel[(room // LAID_ROWS, count, sequences)](
            keys, cache.values, batch.block_tables, batch.query_start, batch.context_lens, *laid,
            window or 2**30, batch.block_tables.stride(0), keys.stride(0), keys.stride(1), room, first,
            PAGE=page, DIM=DIM, ROWS=LAID_ROWS, TILE=TILE,
        )  # fmt: skip
        _launch(
            q, out, laid * 2, batch, scale, window, sinks, (first, count, kv_heads), sealed=False,
            page=page,
        )  # fmt: skip
    return out


def sealed(
    q: torch.Tensor, cache: SealedKV, batch: AttentionBatch, scale: float, window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """``sealed_attention_prefill`` of operands that ``prefill_layout.takes`` says yes to."""
    q = q.contiguous()
    kv_heads, page = cache.key_codes.shape[1], cache.block_tokens
    sequences, room = batch.context_lens.shape[0], room_of(batch, page)
    where = open_of(batch)
    own_room = q.shape[0] + 2 * TILE * sequences
    count = heads_at_once(batch, kv_heads, page)
    types = (torch.float16, torch.bfloat16)
    laid = [torch.empty(sequences, count, room, DIM, device=q.device, dtype=t) for t in types]
    own = [torch.empty(count, own_room, DIM, device=q.device, dtype=t) for t in types]
    out = torch.empty_like(q)
    for first in range(0, kv_heads, count):
        sealed_layout_kernel[(room // page, count, sequences)](
            *parts_of(cache), batch.block_tables, batch.query_start, batch.context_lens, *laid,
            window or 2**30, batch.block_tables.stride(0), room, first, kv_heads,
            NVFP4=cache.key_scales is not None, RANK=cache.rank,
            FIRST=0 if cache.first_keys is None else FIRST_TOKENS, PAGE=page, DIM=DIM, TILE=TILE,
            UNPACK=unpack_instructions(),
        )  # fmt: skip
        open_layout_kernel[(triton.cdiv(own_room, page), count, sequences)](
            cache.open_keys, cache.open_values, where.pages, batch.query_start, batch.context_lens,
            *own, where.pages.stride(0), cache.num_shared, cache.open_offset, own_room, first, kv_heads,
            PAGE=page, DIM=DIM, TILE=TILE,
        )  # fmt: skip
        _launch(
            q, out, [*laid, *own], batch, scale, window, sinks, (first, count, kv_heads), sealed=True,
            page=page,
        )  # fmt: skip
    return out
