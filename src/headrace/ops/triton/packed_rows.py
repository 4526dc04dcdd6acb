"""Rows of a packed matrix times up to four activations: what products of few rows are made of.

By integers where a format has them (``expert_terms``), else by floats. A program reads and unpacks its rows
once for all its activations; what is added for one of them, and in which order, is the same whatever their
number, so that a row's result does not depend on the rows beside it.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_term_rows import add_step, load_step
from headrace.ops.triton.unpack import weight_tile


@triton.jit
def packed_rows(
    codes, scales, x, row, num_rows, token, num_tokens, FORMAT: tl.constexpr, BY_TERMS: tl.constexpr,
    K: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Four float32 [ROWS], of which the first TOKENS count: rows from ``row`` on times activations.

    codes, scales: uint8 pointers to a matrix [num_rows, K]; x: activations from ``token`` on, float32
    [num_tokens, K] or their terms. TOKENS: 1, 2 or 4; those past the last are the last once more.
    """
    last = num_tokens - 1
    t0 = tl.minimum(token, last).to(tl.int64)
    t1 = tl.minimum(token + 1, last).to(tl.int64)
    t2 = tl.minimum(token + 2, last).to(tl.int64)
    t3 = tl.minimum(token + 3, last).to(tl.int64)
    if BY_TERMS:
        words: tl.constexpr = K // 2 + K // 8
        return _by_terms(
            codes, scales, x + t0 * words, x + t1 * words, x + t2 * words, x + t3 * words, row,
            num_rows, CODE_STRIDE, SCALE_STRIDE, FORMAT, K, TOKENS, ROWS, AHEAD,
        )  # fmt: skip
    else:
        return _by_floats(
            codes, scales, x + t0 * K, x + t1 * K, x + t2 * K, x + t3 * K, row, num_rows,
            CODE_STRIDE, SCALE_STRIDE, FORMAT, K, TOKENS, ROWS, COLS,
        )  # fmt: skip


@triton.jit
def _by_floats(
    codes, scales, x0, x1, x2, x3, row, num_rows, CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    r = row + tl.arange(0, ROWS)
    inside = r < num_rows
    at = r.to(tl.int64)
    # Each a value of its own: one value under several names is one variable to Triton 3.6's loops.
    acc0 = tl.zeros([ROWS, COLS], tl.float32)
    acc1 = tl.zeros([ROWS, COLS], tl.float32)
    acc2 = tl.zeros([ROWS, COLS], tl.float32)
    acc3 = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, K, COLS):
        w = weight_tile(
            codes, scales, at, inside, first, CODE_STRIDE, SCALE_STRIDE, FORMAT, K, ROWS, COLS
        )
        k = first + tl.arange(0, COLS)
        acc0 += w * tl.load(x0 + k, mask=k < K, other=0.0)[None, :]
        if TOKENS > 1:
            acc1 += w * tl.load(x1 + k, mask=k < K, other=0.0)[None, :]
        if TOKENS > 2:
            acc2 += w * tl.load(x2 + k, mask=k < K, other=0.0)[None, :]
            acc3 += w * tl.load(x3 + k, mask=k < K, other=0.0)[None, :]
    return tl.sum(acc0, 1), tl.sum(acc1, 1), tl.sum(acc2, 1), tl.sum(acc3, 1)


@triton.jit
def _by_terms(
    codes, scales, x0, x1, x2, x3, row, num_rows, CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The loop of ``expert_term_rows.terms_rows``, but rolled: dense matrices have long rows."""
    r = row + tl.arange(0, ROWS)
    ok = r < num_rows
    c = codes.to(tl.pointer_type(tl.int32)) + r.to(tl.int64) * (CODE_STRIDE // 4)
    if FORMAT == "q6_k":
        s = scales.to(tl.pointer_type(tl.int16)) + r.to(tl.int64) * (SCALE_STRIDE // 2)
    else:
        s = scales.to(tl.pointer_type(tl.int32)) + r.to(tl.int64) * (SCALE_STRIDE // 4)
    # Each a value of its own: one value under several names is one variable to Triton 3.6's loops.
    acc0 = tl.zeros([ROWS, 8], tl.float32)
    acc1 = tl.zeros([ROWS, 8], tl.float32)
    acc2 = tl.zeros([ROWS, 8], tl.float32)
    acc3 = tl.zeros([ROWS, 8], tl.float32)
    step: tl.constexpr = 128 if FORMAT == "q8_0" else 256
    trip: tl.constexpr = AHEAD * step
    a0 = load_step(c, s, 0, ok, FORMAT, K)
    a1 = load_step(c, s, step, ok & (step < K), FORMAT, K)
    if AHEAD > 2:
        a2 = load_step(c, s, 2 * step, ok & (2 * step < K), FORMAT, K)
        a3 = load_step(c, s, 3 * step, ok & (3 * step < K), FORMAT, K)
    for first in range(0, K, trip):
        f = first + trip
        b0 = load_step(c, s, f, ok & (f < K), FORMAT, K)
        b1 = load_step(c, s, f + step, ok & (f + step < K), FORMAT, K)
        if AHEAD > 2:
            b2 = load_step(c, s, f + 2 * step, ok & (f + 2 * step < K), FORMAT, K)
            b3 = load_step(c, s, f + 3 * step, ok & (f + 3 * step < K), FORMAT, K)
        tl.debug_barrier()
        # Steps past the row's end have loaded zeros, which times any terms add nothing.
        f1 = tl.minimum(first + step, K - 1) // step * step
        acc0 = add_step(add_step(acc0, a0, x0, first, FORMAT, K, ROWS), a1, x0, f1, FORMAT, K, ROWS)
        if TOKENS > 1:
            acc1 = add_step(acc1, a0, x1, first, FORMAT, K, ROWS)
            acc1 = add_step(acc1, a1, x1, f1, FORMAT, K, ROWS)
        if TOKENS > 2:
            acc2 = add_step(acc2, a0, x2, first, FORMAT, K, ROWS)
            acc2 = add_step(acc2, a1, x2, f1, FORMAT, K, ROWS)
            acc3 = add_step(acc3, a0, x3, first, FORMAT, K, ROWS)
            acc3 = add_step(acc3, a1, x3, f1, FORMAT, K, ROWS)
        if AHEAD > 2:
            f2 = tl.minimum(first + 2 * step, K - 1) // step * step
            f3 = tl.minimum(first + 3 * step, K - 1) // step * step
            acc0 = add_step(acc0, a2, x0, f2, FORMAT, K, ROWS)
            acc0 = add_step(acc0, a3, x0, f3, FORMAT, K, ROWS)
            if TOKENS > 1:
                acc1 = add_step(acc1, a2, x1, f2, FORMAT, K, ROWS)
                acc1 = add_step(acc1, a3, x1, f3, FORMAT, K, ROWS)
            if TOKENS > 2:
                acc2 = add_step(acc2, a2, x2, f2, FORMAT, K, ROWS)
                acc2 = add_step(acc2, a3, x2, f3, FORMAT, K, ROWS)
                acc3 = add_step(acc3, a2, x3, f2, FORMAT, K, ROWS)
                acc3 = add_step(acc3, a3, x3, f3, FORMAT, K, ROWS)
            a2, a3 = b2, b3
        a0, a1 = b0, b1
    return tl.sum(acc0, 1), tl.sum(acc1, 1), tl.sum(acc2, 1), tl.sum(acc3, 1)
