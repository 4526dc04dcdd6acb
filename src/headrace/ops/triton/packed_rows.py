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
from headrace.ops.triton.unpack import row_sums, weight_tile


@triton.jit
def packed_rows(
    codes, scales, x, row, num_rows, token, num_tokens, FORMAT: tl.constexpr, BY_TERMS: tl.constexpr,
    K: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
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
            num_rows, CODE_STRIDE, SCALE_STRIDE, FORMAT, K, TOKENS, ROWS, SPLIT, AHEAD,
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
        acc0 = _plus(acc0, w, x0, k, K)
        if TOKENS > 1:
            acc1 = _plus(acc1, w, x1, k, K)
        if TOKENS > 2:
            acc2 = _plus(acc2, w, x2, k, K)
            acc3 = _plus(acc3, w, x3, k, K)
    return (
        row_sums(acc0, FORMAT, ROWS, COLS), row_sums(acc1, FORMAT, ROWS, COLS),
        row_sums(acc2, FORMAT, ROWS, COLS), row_sums(acc3, FORMAT, ROWS, COLS),
    )  # fmt: skip


@triton.jit
def _plus(acc, w, x, k, K: tl.constexpr):
    value = tl.load(x + k, mask=k < K, other=0.0)[None, :]
    return tl.fma(w, tl.broadcast_to(value, w.shape), acc)


@triton.jit
def _code_words(columns, FORMAT: tl.constexpr):
    """int32 words of codes of so many columns."""
    if FORMAT == "q8_0":
        return columns // 4
    elif FORMAT == "q4_0":
        return columns // 8
    elif FORMAT == "q4_k":
        return columns // 256 * 36
    elif FORMAT == "q5_k":
        return columns // 256 * 44
    else:
        return columns // 256 * 48


@triton.jit
def _by_terms(
    codes, scales, x0, x1, x2, x3, row, num_rows, CODE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, FORMAT: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The loop of ``expert_term_rows.terms_rows``, but rolled: dense matrices have long rows.

    SPLIT: each row is that many rows of parts of its columns, which are whole trips, added up at the end.
    A matrix of 2,048 rows has too few programs otherwise, each of them waiting for memory in many trips.
    """
    parts: tl.constexpr = ROWS * SPLIT
    columns: tl.constexpr = K // SPLIT
    place = tl.arange(0, parts)
    r = row + place // SPLIT
    begin = place % SPLIT * columns
    ok = r < num_rows
    c = codes.to(tl.pointer_type(tl.int32)) + r.to(tl.int64) * (CODE_STRIDE // 4)
    c += _code_words(begin, FORMAT)
    if FORMAT == "q6_k":
        s = scales.to(tl.pointer_type(tl.int16)) + r.to(tl.int64) * (SCALE_STRIDE // 2)
        s += begin // 256 * 9
    else:
        s = scales.to(tl.pointer_type(tl.int32)) + r.to(tl.int64) * (SCALE_STRIDE // 4)
        s += begin // 64
    # Each a value of its own: one value under several names is one variable to Triton 3.6's loops.
    acc0 = tl.zeros([parts, 8], tl.float32)
    acc1 = tl.zeros([parts, 8], tl.float32)
    acc2 = tl.zeros([parts, 8], tl.float32)
    acc3 = tl.zeros([parts, 8], tl.float32)
    step: tl.constexpr = 128 if FORMAT == "q8_0" else 256
    trip: tl.constexpr = AHEAD * step
    a0 = load_step(c, s, 0, ok, FORMAT, K)
    a1 = load_step(c, s, step, ok & (step < columns), FORMAT, K)
    if AHEAD > 2:
        a2 = load_step(c, s, 2 * step, ok & (2 * step < columns), FORMAT, K)
        a3 = load_step(c, s, 3 * step, ok & (3 * step < columns), FORMAT, K)
    for first in range(0, columns, trip):
        f = first + trip
        b0 = load_step(c, s, f, ok & (f < columns), FORMAT, K)
        b1 = load_step(c, s, f + step, ok & (f + step < columns), FORMAT, K)
        if AHEAD > 2:
            b2 = load_step(c, s, f + 2 * step, ok & (f + 2 * step < columns), FORMAT, K)
            b3 = load_step(c, s, f + 3 * step, ok & (f + 3 * step < columns), FORMAT, K)
        tl.debug_barrier()
        f0 = first
        # Steps past the row's end have loaded zeros, which times any terms add nothing.
        f1 = tl.minimum(first + step, columns - 1) // step * step
        if SPLIT > 1:
            f0 = begin[:, None] + f0
            f1 = begin[:, None] + f1
        acc0 = add_step(acc0, a0, x0, f0, FORMAT, K, parts)
        acc0 = add_step(acc0, a1, x0, f1, FORMAT, K, parts)
        if TOKENS > 1:
            acc1 = add_step(acc1, a0, x1, f0, FORMAT, K, parts)
            acc1 = add_step(acc1, a1, x1, f1, FORMAT, K, parts)
        if TOKENS > 2:
            acc2 = add_step(acc2, a0, x2, f0, FORMAT, K, parts)
            acc2 = add_step(acc2, a1, x2, f1, FORMAT, K, parts)
            acc3 = add_step(acc3, a0, x3, f0, FORMAT, K, parts)
            acc3 = add_step(acc3, a1, x3, f1, FORMAT, K, parts)
        if AHEAD > 2:
            f2 = tl.minimum(first + 2 * step, columns - 1) // step * step
            f3 = tl.minimum(first + 3 * step, columns - 1) // step * step
            if SPLIT > 1:
                f2 = begin[:, None] + f2
                f3 = begin[:, None] + f3
            acc0 = add_step(acc0, a2, x0, f2, FORMAT, K, parts)
            acc0 = add_step(acc0, a3, x0, f3, FORMAT, K, parts)
            if TOKENS > 1:
                acc1 = add_step(acc1, a2, x1, f2, FORMAT, K, parts)
                acc1 = add_step(acc1, a3, x1, f3, FORMAT, K, parts)
            if TOKENS > 2:
                acc2 = add_step(acc2, a2, x2, f2, FORMAT, K, parts)
                acc2 = add_step(acc2, a3, x2, f3, FORMAT, K, parts)
                acc3 = add_step(acc3, a2, x3, f2, FORMAT, K, parts)
                acc3 = add_step(acc3, a3, x3, f3, FORMAT, K, parts)
            a2, a3 = b2, b3
        a0, a1 = b0, b1
    return (
        _joined(acc0, ROWS, SPLIT), _joined(acc1, ROWS, SPLIT), _joined(acc2, ROWS, SPLIT),
        _joined(acc3, ROWS, SPLIT),
    )  # fmt: skip


@triton.jit
def _joined(acc, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """float32 [ROWS] of [ROWS * SPLIT, 8]."""
    return tl.sum(tl.reshape(tl.sum(acc, 1), [ROWS, SPLIT]), 1)
