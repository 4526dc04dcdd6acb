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
# 2^f on [0, 1) by a cubic: maximum relative error 8.8e-5 (tests/unit/ops/test_exp2_polynomial.py), below
# half a unit of a bfloat16 probability (2^-9 = 2e-3). Coefficients: FlashAttention-4, table of Cody-Waite
# reduction with degree 3; refitted by minimax over [0, 1).
POLY_0, POLY_1 = tl.constexpr(1.0), tl.constexpr(0.69514614)
POLY_2, POLY_3 = tl.constexpr(0.22756439), tl.constexpr(0.07711909)


@triton.jit
def exp2_polynomial(x):
    """2^x for x <= 0 in float32 with the fused multiply-adds of the ordinary pipes, not exp2's."""
    x = tl.maximum(x, -126.0)
    # Adding 1.5 * 2^23 leaves the nearest integer in the low bits; half is taken off to round down.
    whole = tl.floor(x)
    f = x - whole
    p = ((POLY_3 * f + POLY_2) * f + POLY_1) * f + POLY_0
    return (p.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)).to(tl.float32, bitcast=True)


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
    top = tl.load(sums + 2 * (row * PARTS + part), mask=here, other=float("-inf"))
    total = tl.load(sums + 2 * (row * PARTS + part) + 1, mask=here, other=0.0)
    most = tl.max(top, 0)
    if HAS_SINK:
        most = tl.maximum(most, sink)
    share = tl.exp2(top - most)
    bottom = tl.sum(total * share, 0)
    if HAS_SINK:
        bottom += tl.exp2(sink - most)
    inside = here[:, None] & (d < dim)[None, :]
    pieces = tl.load(
        mixed + (row * PARTS + part)[:, None] * dim + d[None, :], mask=inside, other=0.0
    )
    tl.store(out + row * dim + d, tl.sum(pieces * share[:, None], 0) / bottom, mask=d < dim)
