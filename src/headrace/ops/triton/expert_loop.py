"""Rows of MXFP4 experts times one activation by single warps that stream their rows through a loop.

The products are ``expert_halves``'; a program is one warp, so that all programs of a batch of one are
resident at once and none waits for another. A short loop, whose loads are some tiles ahead in shared
memory, keeps to the instruction cache.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_halves import (
    RESULT,
    TILE_BLOCKS,
    TILE_WORDS,
    plain_products,
    products,
    store_halves,
)
from headrace.ops.triton.expert_rows import BLOCK, INTERPRETED, gated, power_of_two, store_partial
from headrace.ops.triton.overlap import prefetch, wait, wait_and_release

GROUPS = tl.constexpr(8)  # pairs of rows of a warp: 16 rows


@triton.jit
def _chunk(
    codes, scales, row, num_rows, scale_stride, index, K: tl.constexpr, CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Codes int32 [16, 16] and scales uint8 [16, 4] of the TILES tiles of chunk ``index``, CHUNKS for each
    16 rows, on their way.

    Codes past a row's end are the next row's, or of what follows the matrix in the slice; their scales
    are 0, and so are their activations.
    """
    i = tl.arange(0, 2 * GROUPS)
    r = row + index // CHUNKS * (2 * GROUPS) + (i % GROUPS) * 2 + i // GROUPS
    r = tl.minimum(r, num_rows - 1)[:, None]
    tile = index % CHUNKS * TILES
    at = tile * TILE_WORDS + tl.arange(0, TILE_WORDS)[None, :]
    b = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)[None, :]
    code = codes + (r * (K // 8) + at)
    scale = scales + (r * scale_stride + b)
    ws = ()
    es = ()
    for j in tl.static_range(TILES):  # pyright: ignore
        ws = ws + (tl.load(code + j * TILE_WORDS, eviction_policy="evict_first"),)  # noqa: RUF005
        inside = b < K // BLOCK - j * TILE_BLOCKS
        es = es + (tl.load(scale + j * TILE_BLOCKS, mask=inside, other=0),)  # noqa: RUF005
    return ws, es


@triton.jit
def _chunk_products(
    acc, ws, es, halves, index, K: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """acc + the chunk's blocks times their activations, float32 [2, 8, 4]."""
    tile = index % CHUNKS * TILES
    i = tl.arange(0, 2 * GROUPS)
    word = tl.arange(0, TILE_WORDS)
    column = i % 8
    mine = (column // 2)[:, None] == (word // 4)[None, :]
    part = (column % 2) * (STRIDE // 2) + (i // GROUPS) * 4
    block = (tile * TILE_BLOCKS + word // 4)[None, :]
    own = halves.to(tl.pointer_type(tl.int32)) + (part[:, None] + block * 16 + (word % 4)[None, :])
    for j in tl.static_range(TILES):  # pyright: ignore
        if INTERPRETED:
            lane = (tile + j) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)[None, :]
            lane += tl.zeros([GROUPS, 1], tl.int32)
            total = plain_products(ws[j], halves, lane, K, STRIDE, GROUPS)
        else:
            inside = mine & (block < K // BLOCK - j * TILE_BLOCKS)
            x = tl.load(own + j * 64, mask=inside, other=0)
            y = tl.load(own + (j * 64 + 8), mask=inside, other=0)
            total = products(ws[j], x, y, GROUPS)
        acc += total * power_of_two(tl.reshape(es[j], [2, GROUPS, 4]))
    return acc


@triton.jit(do_not_specialize=["scale_stride"])
def loop_gate_up(
    arena, entries, counts, pair_token, x_halves, h_halves, scale_stride,
    WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As ``expert_halves.halves_gate_up``."""
    wait_and_release(PDL)
    rows: tl.constexpr = 2 * GROUPS
    num_tiles = (2 * WIDTH + rows - 1) // rows
    item = tl.program_id(0)
    entry = entries + (item // num_tiles) * 4
    slot = tl.load(entry)
    first = tl.load(entry + 2)
    total = tl.load(counts + WHICH) * num_tiles
    while item < total:
        row = (item % num_tiles) * rows
        base = arena + slot.to(tl.int64) * SLICE_NBYTES
        piece = tl.load(entry + 1) % S
        last = first + tl.load(entry + 3)
        column = row // 2 + tl.arange(0, GROUPS)
        side = tl.arange(0, 2)[:, None]
        codes = (base + AT_CODES).to(tl.pointer_type(tl.int32))
        scales = base + AT_SCALES
        bias = tl.zeros([2, GROUPS], tl.float32)
        if HAS_BIAS:
            r = 2 * column[None, :] + side
            bias = tl.load(
                (base + AT_BIAS).to(tl.pointer_type(tl.float32)) + r, mask=r < 2 * WIDTH, other=0.0
            )
        for pair in range(first, last):
            token = tl.load(pair_token + pair)
            halves = x_halves + token * (2 * HIDDEN)
            acc = tl.zeros([2, GROUPS, 4], tl.float32)
            ws, es = _chunk(codes, scales, row, 2 * WIDTH, scale_stride, 0, HIDDEN, CHUNKS, TILES)
            for index in tl.range(0, CHUNKS - 1):
                vs, fs = _chunk(
                    codes, scales, row, 2 * WIDTH, scale_stride, index + 1, HIDDEN, CHUNKS, TILES
                )
                acc = _chunk_products(acc, ws, es, halves, index, HIDDEN, CHUNKS, TILES, HIDDEN)
                ws = vs
                es = fs
            acc = _chunk_products(acc, ws, es, halves, CHUNKS - 1, HIDDEN, CHUNKS, TILES, HIDDEN)
            y = bias + tl.sum(acc, 2) * RESULT
            gate = tl.sum(tl.where(side == 0, y, 0.0), 0)
            up = tl.sum(tl.where(side == 0, 0.0, y), 0)
            store_halves(
                gated(gate, up, CLAMPED, ALPHA, LIMIT), h_halves + pair * (2 * S * WIDTH),
                piece * WIDTH + column, column < WIDTH, S * WIDTH,
            )  # fmt: skip
        item += tl.num_programs(0)
        entry = entries + (item // num_tiles) * 4
        slot = tl.load(entry, mask=item < total, other=0)
        first = tl.load(entry + 2, mask=item < total, other=0)


@triton.jit(do_not_specialize=["scale_stride"])
def loop_down(
    arena, entries, counts, pair_weight, h_halves, partial, scale_stride,
    WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, REPS: tl.constexpr,
    CHUNKS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``expert_halves.halves_down``; a program takes 16 * REPS rows."""
    rows: tl.constexpr = 2 * GROUPS
    num_tiles = (HIDDEN + REPS * rows - 1) // (REPS * rows)
    item = tl.program_id(0)
    entry = entries + (item // num_tiles) * 4
    slot = tl.load(entry)
    first = tl.load(entry + 2)
    total = tl.load(counts + WHICH) * num_tiles
    while item < total:
        row = (item % num_tiles) * (REPS * rows)
        base = arena + slot.to(tl.int64) * SLICE_NBYTES
        codes = (base + AT_CODES).to(tl.pointer_type(tl.int32))
        scales = base + AT_SCALES
        if PDL:
            lines = tl.arange(0, 128)
            start = base + AT_CODES + row * (WIDTH // 2)
            nbytes: tl.constexpr = REPS * rows * (WIDTH // 2)
            prefetch(start + tl.minimum(lines * 128, nbytes - 1), PDL)
        piece = tl.load(entry + 1) % S
        last = first + tl.load(entry + 3)
        ws, es = _chunk(codes, scales, row, HIDDEN, scale_stride, 0, WIDTH, CHUNKS, TILES)
        wait_and_release(PDL)
        for pair in range(first, last):
            own = h_halves + pair * (2 * S * WIDTH) + piece * WIDTH
            acc = tl.zeros([2, GROUPS, 4], tl.float32)
            for index in tl.range(0, REPS * CHUNKS):
                # The last one loads the first again, for the next pair.
                vs, fs = _chunk(
                    codes, scales, row, HIDDEN, scale_stride, (index + 1) % (REPS * CHUNKS), WIDTH,
                    CHUNKS, TILES,
                )  # fmt: skip
                acc = _chunk_products(acc, ws, es, own, index, WIDTH, CHUNKS, TILES, S * WIDTH)
                if index % CHUNKS == CHUNKS - 1:
                    r = row + index // CHUNKS * rows
                    r += tl.arange(0, GROUPS)[None, :] * 2 + tl.arange(0, 2)[:, None]
                    store_partial(
                        tl.sum(acc, 2) * RESULT, base + AT_BIAS, pair_weight + pair,
                        partial + (pair * S + piece) * HIDDEN, r, HAS_BIAS, HIDDEN,
                    )  # fmt: skip
                    acc = tl.zeros([2, GROUPS, 4], tl.float32)
                ws = vs
                es = fs
        item += tl.num_programs(0)
        entry = entries + (item // num_tiles) * 4
        slot = tl.load(entry, mask=item < total, other=0)
        first = tl.load(entry + 2, mask=item < total, other=0)
    wait(PDL)
