"""``expert_grouped`` for slices in any slab format: tiles are unpacked, rounded to bfloat16 and multiplied.

Gate/up and down may differ in format, and layers too. A tile of weights is unpacked once for each tile of
tokens, which are as many as an expert has where the tensor cores' time matters.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_blocks import scaled_tile
from headrace.ops.triton.expert_grouped import (
    ENTRY,
    columns_of,
    inner_row,
    store_activations,
    store_outputs,
)


@triton.jit
def _tile_dot(
    acc, base, row, ok, at, x, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr,
    AT_FACTORS: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, PAIRED: tl.constexpr, FACTORS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """acc + rows of a matrix at COLS columns times x, bfloat16 [COLS, tokens]."""
    w = scaled_tile(
        base, row, ok, at, AT_CODES, AT_SCALES, AT_FACTORS, CODE_STRIDE, SCALE_STRIDE, FORMAT,
        PAIRED, FACTORS, K, ROWS, COLS,
    )  # fmt: skip
    # A sum of its own, see ``expert_grouped``.
    return acc + tl.dot(w.to(tl.bfloat16), x)


@triton.jit
def block_grouped_gate_up(
    arena, work, bounds, order, x, h, top_k, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_FACTORS: tl.constexpr, AT_BIAS: tl.constexpr,
    CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr,
    FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    S: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ALONE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """h[pair, slice's columns] = act(gate x, up x); arguments and grid as of ``grouped_gate_up``."""
    num_tiles: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    entry = work + (tl.program_id(0) // num_tiles) * ENTRY
    base = arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES
    key = tl.load(entry + 1)
    expert, piece = key // S, key % S
    begin, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    i = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    ok = i < WIDTH
    for start in range(begin + tl.program_id(1) * TOKENS, last, tl.num_programs(1) * TOKENS):
        pair = start + tl.arange(0, TOKENS)
        there = pair < last
        token = tl.load(order + pair, mask=there, other=0) // top_k
        own = x + token * HIDDEN
        gate = tl.zeros([ROWS, TOKENS], tl.float32)
        up = tl.zeros([ROWS, TOKENS], tl.float32)
        for at in range(0, HIDDEN, COLS):
            value = columns_of(own, at, there, HIDDEN, COLS)
            gate = _tile_dot(
                gate, base, 2 * i, ok, at, value, AT_CODES, AT_SCALES, AT_FACTORS, CODE_STRIDE,
                SCALE_STRIDE, FORMAT, True, FACTORS, HIDDEN, ROWS, COLS,
            )  # fmt: skip
            up = _tile_dot(
                up, base, 2 * i + 1, ok, at, value, AT_CODES, AT_SCALES, AT_FACTORS, CODE_STRIDE,
                SCALE_STRIDE, FORMAT, True, FACTORS, HIDDEN, ROWS, COLS,
            )  # fmt: skip
        inner = h + inner_row(pair, begin, ALONE) * (S * WIDTH) + piece * WIDTH
        store_activations(
            gate, up, base, i, ok, there, inner, i, AT_BIAS, HAS_BIAS, CLAMPED, ALPHA, LIMIT
        )


@triton.jit
def block_grouped_down(
    arena, work, bounds, order, h, y, weights, top_k, SLICE_NBYTES: tl.constexpr,
    AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_FACTORS: tl.constexpr, AT_BIAS: tl.constexpr,
    CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr,
    FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    S: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """y[place] += down h + bias, over the entries of an expert; as ``grouped_down``."""
    num_tiles: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    entry = work + (tl.program_id(0) // num_tiles) * ENTRY
    count = tl.load(entry + 3)
    row = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    ok = row < HIDDEN
    expert = tl.load(entry + 1) // S
    begin, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    last = tl.where(count > 0, last, begin)
    for start in range(begin + tl.program_id(1) * TOKENS, last, tl.num_programs(1) * TOKENS):
        pair = start + tl.arange(0, TOKENS)
        there = pair < last
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for number in range(0, count):
            base = arena + tl.load(entry + number * ENTRY).to(tl.int64) * SLICE_NBYTES
            piece = tl.load(entry + number * ENTRY + 1) % S
            inner = h + inner_row(pair, begin, ALONE) * (S * WIDTH) + piece * WIDTH
            for at in range(0, WIDTH, COLS):
                value = columns_of(inner, at, there, WIDTH, COLS)
                acc = _tile_dot(
                    acc, base, row, ok, at, value, AT_CODES, AT_SCALES, AT_FACTORS, CODE_STRIDE,
                    SCALE_STRIDE, FORMAT, False, FACTORS, WIDTH, ROWS, COLS,
                )  # fmt: skip
            tl.debug_barrier()  # the next slice's loads overwrite what other warps still read
        store_outputs(
            acc, arena, entry, count, order, y, weights, top_k, pair, there, row, ok, SLICE_NBYTES,
            AT_BIAS, HAS_BIAS, HIDDEN, ALONE,
        )  # fmt: skip
