"""The running softmax of flash attention, and the merge of its parts by their log-sum-exp.

Scores are in units of log 2: the caller multiplies queries by scale * LOG2_E once, and every
exponential is one ``exp2``.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# The running maximum before anything was seen. Finite, so that a tile of which a row sees nothing adds
# exp2(-inf + 1e30) = 0, not NaN.
NOTHING = tl.constexpr(-1.0e30)
# 2^f on [0, 1) by a cubic, the coefficients of FlashAttention-4 (2025): maximum relative error 8.8e-5
# (tests/unit/ops/test_exp2_polynomial.py), far below half a unit of a bfloat16 probability, 2^-9.
POLY_0, POLY_1 = tl.constexpr(1.0), tl.constexpr(0.69514614)
POLY_2, POLY_3 = tl.constexpr(0.22756439), tl.constexpr(0.07711909)


@triton.jit
def exp2_polynomial(x):
    """2^x for x <= 0 in float32 with the fused multiply-adds of the ordinary pipes, not exp2's."""
    x = tl.maximum(x, -126.0)
    # A float32 near 1.5 * 2^23 has no fraction: adding it rounds, and leaves the integer in the low bits.
    # Half is taken off before, so that it rounds down; neither step uses the units of exp2.
    shifted = (x - 0.5) + 12582912.0
    f = x - (shifted - 12582912.0)
    p = ((POLY_3 * f + POLY_2) * f + POLY_1) * f + POLY_0
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def fetch(at, mask, MASKED: tl.constexpr):
    """A load that is masked only where sizes are padded: masks cost instructions."""
    if MASKED:
        return tl.load(at, mask=mask, other=0)
    return tl.load(at)


@triton.jit
def absorb(score, top):
    """One tile of scores [T, N], -inf where unseen: probabilities, new maximum, old parts' shrink."""
    new_top = tl.maximum(top, tl.max(score, 0))
    return tl.exp2(score - new_top[None, :]), new_top, tl.exp2(top - new_top)


@triton.jit
def probabilities(x, POLYNOMIAL: tl.constexpr):
    """2^x of scores [R, T] less their maximum. POLYNOMIAL 1: every second column by the polynomial."""
    if POLYNOMIAL == 0:
        return tl.exp2(x)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    both = tl.join(tl.exp2(even), exp2_polynomial(odd))
    return tl.reshape(both, (x.shape[0], x.shape[1]))


@triton.jit
def absorb_rows(
    score, value, top, total, out, change, TAU: tl.constexpr, POLYNOMIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys of the softmax over rows, the probabilities in the values' type.

    score: float32 [R, T], -inf where unseen; value: [T, D]; change: what ``out`` is multiplied by anyway.
    TAU > 0: the maximum, and with it ``out``, stays until a score exceeds it by TAU: probabilities reach
    2^TAU, which 16 bits hold (8-bit ones would saturate).
    """
    new_top = tl.maximum(top, tl.max(score, 1))
    if TAU > 0:
        new_top = tl.where(new_top - top > TAU, new_top, top)
    weight = probabilities(score - new_top[:, None], POLYNOMIAL)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    if TAU > 0:
        if (tl.max((new_top > top).to(tl.int32), 0) > 0) | (change != 1.0):
            out = out * (shrink * change)[:, None]
        out = tl.dot(weight.to(value.dtype), value, out, input_precision=PRECISION)
    else:
        out = out * (shrink * change)[:, None]
        out = tl.dot(weight.to(value.dtype), value, out, input_precision=PRECISION)
    return new_top, total, out


@triton.jit
def first_sums(sink, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr, LOG2: tl.constexpr):
    """(maximum, sum) of each row before any key: nothing, or the sink alone."""
    if HAS_SINKS:
        return tl.zeros((ROWS,), tl.float32) + tl.load(sink) * LOG2, tl.full(
            (ROWS,), 1.0, tl.float32
        )
    return tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)


@triton.jit
def tile_of(query_start, context_lens, num_sequences, pid, ROWS: tl.constexpr):
    """Which rows program ``pid`` takes: (sequence or -1, number of the tile).

    Tiles are ROWS consecutive positions, aligned to multiples of ROWS, so that a tile's pages do not
    depend on how a prompt was cut. Later tiles, which see more keys, come first.
    """
    # Values of their own: Triton 3.6 takes two names of one value for one variable of the loop.
    tiles, tile, sequence = pid * 0, pid * 0, pid * 0 - 1
    for s in range(0, num_sequences):
        rows = tl.load(query_start + s + 1) - tl.load(query_start + s)
        context = tl.load(context_lens + s)
        first = (context - rows) // ROWS
        count = tl.where(rows > 0, (context - 1) // ROWS - first + 1, 0)
        if (pid >= tiles) & (pid < tiles + count):
            sequence = s
            tile = first + count - 1 - (pid - tiles)
        tiles += count
    return sequence, tile


@triton.jit
def part_size(units, MIN_PART: tl.constexpr, PARTS: tl.constexpr):
    """Units of a part: MIN_PART times a power of two, so that there are at most PARTS parts."""
    size = units * 0 + MIN_PART
    while size * PARTS < units:
        size = size * 2
    return size


@triton.jit
def merge_parts(
    sums, mixed, sink, out, row, count, dim,
    PARTS: tl.constexpr, DIM: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Merge ``count`` parts' (maximum, sum, unnormalised output) of one row, and store the row.

    sums: [rows, PARTS, 2]; mixed: [rows, PARTS, dim]; sink: one more logit, in units of log 2
    """
    part, d = tl.arange(0, PARTS), tl.arange(0, DIM)
    here = part < count
    # All loads before what waits for any of them.
    top = tl.load(sums + 2 * (row * PARTS + part), mask=here, other=float("-inf"))
    total = tl.load(sums + 2 * (row * PARTS + part) + 1, mask=here, other=0.0)
    inside = here[:, None] & (d < dim)[None, :]
    pieces = tl.load(
        mixed + (row * PARTS + part)[:, None] * dim + d[None, :], mask=inside, other=0.0
    )
    most = tl.max(top, 0)
    if HAS_SINK:
        most = tl.maximum(most, sink)
    share = tl.exp2(top - most)
    bottom = tl.sum(total * share, 0)
    if HAS_SINK:
        bottom += tl.exp2(sink - most)
    value = tl.sum(pieces * share[:, None], 0) / bottom
    tl.store(out + row * dim + d, value.to(out.dtype.element_ty), mask=d < dim)
