"""Grouped matrix-vector products of experts in any slab format: float32 sums of unpacked tiles.

The same work lists, grids and partial results as ``expert_matvec``, whose MXFP4 has kernels of its own.
Gate/up and down may have different formats, and layers too: formats, strides and offsets are constants
of a compiled kernel, so there is one for each kind of layer.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_rows import gated, store_partial
from headrace.ops.triton.expert_term_rows import terms_rows
from headrace.ops.triton.expert_terms import store_terms
from headrace.ops.triton.unpack import row_sums, weight_tile

FACTOR_BLOCK = tl.constexpr(128)  # weights each way that share a factor of FP8


@triton.jit
def factor_tile(
    factors, row, first, PAIRED: tl.constexpr, BLOCKED: tl.constexpr, ACROSS: tl.constexpr,
    K: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, COLS] or [ROWS, 1]: the factors of NVFP4 and FP8, as ``experts.slab`` places them.

    PAIRED: rows are gate and up in turn, each with its own; ACROSS: factors in a row of blocks.
    """
    place = row % 2 if PAIRED else row * 0
    if BLOCKED:
        band = (row // 2 // FACTOR_BLOCK) * 2 + place if PAIRED else row // FACTOR_BLOCK
        k = first + tl.arange(0, COLS)
        column = tl.minimum(k, K - 1) // FACTOR_BLOCK
        return tl.load(factors + band[:, None] * ACROSS + column[None, :])
    else:
        return tl.load(factors + place)[:, None]


@triton.jit
def scaled_tile(
    base, row, inside, first, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr,
    AT_FACTORS: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, PAIRED: tl.constexpr, FACTORS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``weight_tile`` of a matrix in a slice at ``base``, its factors applied.

    FACTORS: 0 none, 1 one a matrix, 2 one for each 128 x 128 weights.
    """
    w = weight_tile(
        base + AT_CODES, base + AT_SCALES, row, inside, first, CODE_STRIDE, SCALE_STRIDE, FORMAT, K,
        ROWS, COLS,
    )  # fmt: skip
    if FACTORS:
        across: tl.constexpr = (K + FACTOR_BLOCK - 1) // FACTOR_BLOCK
        factors = (base + AT_FACTORS).to(tl.pointer_type(tl.float32))
        own = tl.where(inside, row, 0)
        w *= factor_tile(factors, own, first, PAIRED, FACTORS == 2, across, K, COLS)
    return w


@triton.jit
def block_rows(
    base, x, row, num_rows, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr,
    AT_FACTORS: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, PAIRED: tl.constexpr, FACTORS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS]: rows of a stored matrix times the float32 activation ``x`` [K]."""
    r = row + tl.arange(0, ROWS)
    inside = r < num_rows
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, K, COLS):
        w = scaled_tile(
            base, r, inside, first, AT_CODES, AT_SCALES, AT_FACTORS, CODE_STRIDE, SCALE_STRIDE,
            FORMAT, PAIRED, FACTORS, K, ROWS, COLS,
        )  # fmt: skip
        k = first + tl.arange(0, COLS)
        acc += w * tl.load(x + k, mask=k < K, other=0.0)[None, :]
    return row_sums(acc, FORMAT, ROWS, COLS)


@triton.jit
def block_gate_up(
    arena, entries, counts, pair_token, x, terms, h, h_terms, WHICH: tl.constexpr, SLOT_NBYTES: tl.constexpr,
    AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr, AT_FACTORS: tl.constexpr,
    AT_BIAS: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, S: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, TERMS: tl.constexpr,
    OUT_TERMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """h[pair, slice columns] = act(gate x, up x), float32 [pairs, S * WIDTH].

    TERMS: by integers, from ``terms`` [T, words] (``expert_terms``); else by floats, from ``x``.
    OUT_TERMS: the result in terms, to ``h_terms`` [pairs, S, words]; a tile is then 64 rows, whose
    activations are one block.
    """
    num_tiles = (2 * WIDTH + TILE - 1) // TILE
    total = tl.load(counts + WHICH) * num_tiles
    half: tl.constexpr = TILE // 2
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * TILE
        base = arena + tl.load(entry).to(tl.int64) * SLOT_NBYTES
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        for pair in range(first, last):
            token = tl.load(pair_token + pair)
            if TERMS:
                words: tl.constexpr = HIDDEN // 2 + HIDDEN // 8
                y = terms_rows(
                    base + AT_CODES, base + AT_SCALES, terms + token * words, row, 2 * WIDTH,
                    CODE_STRIDE, SCALE_STRIDE, FORMAT, HIDDEN, TILE, AHEAD,
                )  # fmt: skip
            else:
                y = block_rows(
                    base, x + token * HIDDEN, row, 2 * WIDTH, AT_CODES, AT_SCALES, AT_FACTORS,
                    CODE_STRIDE, SCALE_STRIDE, FORMAT, True, FACTORS, HIDDEN, TILE, COLS,
                )  # fmt: skip
            if HAS_BIAS:
                r = row + tl.arange(0, TILE)
                bias = (base + AT_BIAS).to(tl.pointer_type(tl.float32))
                y += tl.load(bias + r, mask=r < 2 * WIDTH, other=0.0)
            gate, up = tl.split(tl.reshape(y, [half, 2]))
            act = gated(gate, up, CLAMPED, ALPHA, LIMIT)
            column = row // 2 + tl.arange(0, half)
            if OUT_TERMS:
                tl.static_assert(half == 32, "activations of a tile are one block of terms")
                block = row // 64 + tl.arange(0, 1)
                out_words: tl.constexpr = WIDTH // 2 + WIDTH // 8
                store_terms(
                    act[None, :], h_terms + (pair * S + piece) * out_words, block, block >= 0,
                    WIDTH, 1,
                )  # fmt: skip
            else:
                at = h + pair * (S * WIDTH) + piece * WIDTH + column
                tl.store(at, act, mask=column < WIDTH)


@triton.jit
def block_down(
    arena, entries, counts, pair_weight, h, h_terms, partial, WHICH: tl.constexpr,
    SLOT_NBYTES: tl.constexpr, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr,
    AT_FACTORS: tl.constexpr, AT_BIAS: tl.constexpr, CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
    COLS: tl.constexpr, TILE: tl.constexpr, TERMS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """partial[pair, slice] = weight * (down h + bias), float32 [pairs, S, HIDDEN].

    TERMS: from ``h_terms`` [pairs, S, words].
    """
    num_tiles = (HIDDEN + TILE - 1) // TILE
    total = tl.load(counts + WHICH) * num_tiles
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * TILE
        base = arena + tl.load(entry).to(tl.int64) * SLOT_NBYTES
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        r = row + tl.arange(0, TILE)
        for pair in range(first, last):
            if TERMS:
                words: tl.constexpr = WIDTH // 2 + WIDTH // 8
                y = terms_rows(
                    base + AT_CODES, base + AT_SCALES, h_terms + (pair * S + piece) * words, row,
                    HIDDEN, CODE_STRIDE, SCALE_STRIDE, FORMAT, WIDTH, TILE, AHEAD,
                )  # fmt: skip
            else:
                y = block_rows(
                    base, h + pair * (S * WIDTH) + piece * WIDTH, row, HIDDEN, AT_CODES, AT_SCALES,
                    AT_FACTORS, CODE_STRIDE, SCALE_STRIDE, FORMAT, False, FACTORS, WIDTH, TILE,
                    COLS,
                )  # fmt: skip
            store_partial(
                y, base + AT_BIAS, pair_weight + pair, partial + (pair * S + piece) * HIDDEN, r,
                HAS_BIAS, HIDDEN,
            )  # fmt: skip
