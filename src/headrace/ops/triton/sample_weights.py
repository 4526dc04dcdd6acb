"""Weights of logits, as every kernel that samples works them out.

They are worked out anew by each kernel: a logit is read from the second-level cache, 25 instructions follow.
Sums of them are of integers (``ops.reference.sampling``), so that they do not depend on who adds what.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

RULE = tl.constexpr(5)  # numbers of a row: temperature, min_p, top_k, top_p, uniform
TOP = tl.constexpr(0x3F800001)  # bits above those of every weight: 1 is the largest
# exp(x) = 2^n exp(r), |r| <= ln 2 / 2, by the polynomial of Cephes' expf (Moshier 1989): maximum relative
# error 1.2e-7 however small the result is. exp2.approx of x * log2(e) errs by |x| * 2^-24.
_LOG2_E, _LN2_HIGH, _LN2_LOW = (
    tl.constexpr(1.44269504),
    tl.constexpr(0.693359375),
    tl.constexpr(-2.12194440e-4),
)
_P0, _P1, _P2 = (
    tl.constexpr(1.9875691500e-4),
    tl.constexpr(1.3981999507e-3),
    tl.constexpr(8.3334519073e-3),
)
_P3, _P4, _P5 = (
    tl.constexpr(4.1665795894e-2),
    tl.constexpr(1.6666665459e-1),
    tl.constexpr(5.0000001201e-1),
)
_LEAST = tl.constexpr(
    -87.0
)  # below, results are near the smallest normal number, and far below a unit


@triton.jit
def order_key(value):
    """int32 that are ordered like float32: both zeros the same, NaN of any sign above all."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def weight_bits(value, top, temperature, inverse, min_p):
    """Bits of the float32 exp((value - top) / temperature), which are ordered like it; -1 below min_p.

    inverse: 1 / temperature, rounded
    """
    # The quotient is corrected by its remainder, which rounds it as a division does, without one's special
    # cases: those are cut off before. Code of a program that runs once is paid for by the instruction.
    difference = tl.maximum(value - top, tl.maximum(temperature * (2 * _LEAST), -3.0e38))
    x = difference * inverse
    x = tl.fma(tl.fma(-x, temperature, difference), inverse, x)
    n = tl.floor(x * _LOG2_E + 0.5)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((r * _P0 + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    p = p * (r * r) + r + 1.0
    bits = p.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)
    bits = tl.where(x < _LEAST, 0, bits)
    return tl.where(bits.to(tl.float32, bitcast=True) >= min_p, bits, -1)


@triton.jit
def weigh(logits, at, inside, top, temperature, inverse, min_p):
    """``weight_bits`` of a row's logits ``at``; -1 for what is not ``inside`` the vocabulary, too."""
    value = tl.load(logits + at, mask=inside, other=float("-inf"))
    return tl.where(inside, weight_bits(value, top, temperature, inverse, min_p), -1)


@triton.jit
def key_value(key):
    """The float32 of an ``order_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(bits, UNITS: tl.constexpr):
    """int64: weights in whole units of 1 / UNITS; nothing of what ``weigh`` has left out."""
    weight = tl.maximum(bits, 0).to(tl.float32, bitcast=True)
    return (weight * UNITS).to(tl.int64)


@triton.jit
def share_of(share, total):
    """``share`` * ``total``, rounded down; ``total`` is int64 and ``share`` float64."""
    return (share * total.to(tl.float64)).to(tl.int64)


@triton.jit
def target_of(top_p, total):
    """The least mass that reaches ``top_p`` of ``total``: at least one unit."""
    wanted = top_p * total.to(tl.float64)
    target = wanted.to(tl.int64)
    target += (target.to(tl.float64) < wanted).to(tl.int64)
    return tl.minimum(tl.maximum(target, 1), total)


@triton.jit
def is_drawn(rules, picked, row, rows):
    """(whether a row is drawn for, its largest logit): its rule has a temperature and that is finite."""
    temperature = tl.load(rules + RULE * row)
    top = tl.load(picked + rows + row).to(tl.float32, bitcast=True)
    return (temperature > 0.0) & (tl.abs(top) < float("inf")), top


@triton.jit
def tell(picked, tokens, row, token):
    """Write down a row's token: int32 for whoever asks, int64 where the next step reads its own."""
    tl.store(picked + row, token)
    tl.store(tokens + row, token.to(tl.int64))
