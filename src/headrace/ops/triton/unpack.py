"""Weights in their stored formats to float32 tiles: what a matrix kernel needs of a format.

``weight_tile`` is the interface. A matrix lies as slabs hold it (``experts.slab``): rows of codes,
``code_stride`` bytes apart, and for formats whose scales are apart rows of those, ``scale_stride``
bytes apart. Values equal the formats' references (``headrace.formats``) bit for bit: every product of a
scale, a sub-block's scale and a code has at most 24 significant bits, so it is exact, and where a
minimum is subtracted there is one rounding, whether the compiler contracts it or not.

Factors of a whole matrix (NVFP4) or of 128 x 128 weights (FP8) are not applied here.

Each element names the byte it comes from; a thread's elements are neighbours, so the compiler joins
their loads to 8 or 16 bytes. Blocks whose length is odd in 4-byte words have their scales apart for
that. The formats of superblocks (256 weights) are in ``unpack_super``.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.unpack_super import (
    iq4_xs_tile,
    q2_k_tile,
    q3_k_tile,
    q4_k_tile,
    q5_k_tile,
    q6_k_tile,
)
from headrace.ops.triton.unpack_values import e2m1_twice, e4m3, e8m0, iq4, low_high

# Columns that share a scale, by format: a tile is a whole number of them.
GROUPS = {
    **dict.fromkeys(("bf16", "f16", "f32", "fp8_e4m3"), 1),
    **dict.fromkeys(("nvfp4", "q2_k", "q3_k", "q6_k"), 16),
    **dict.fromkeys(("mxfp4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl"), 32),
    **dict.fromkeys(("iq4_xs", "q4_k", "q5_k"), 32),
}


@triton.jit
def weight_tile(
    codes, scales, row, inside, first, code_stride, scale_stride, FORMAT: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, COLS]: weights of columns ``first`` ... ``first + COLS - 1`` of some rows.

    codes, scales: uint8 pointers to the matrix's parts (``scales`` is not read where a format has none
    apart). row: int32 [ROWS]; inside: bool [ROWS]; other rows are zeros, as are columns from K on.
    first: a multiple of the format's group. FORMAT: as slabs store it, a key of ``GROUPS``.
    """
    if FORMAT == "bf16" or FORMAT == "f16" or FORMAT == "f32" or FORMAT == "fp8_e4m3":
        return _plain_tile(codes, row, inside, first, code_stride, FORMAT, K, COLS)
    else:
        group: tl.constexpr = (
            16
            if FORMAT == "nvfp4" or FORMAT == "q2_k" or FORMAT == "q3_k" or FORMAT == "q6_k"
            else 32
        )
        g = first // group + tl.arange(0, COLS // group)[None, :, None]
        i = tl.arange(0, group)[None, None, :]
        at = (row * code_stride)[:, None, None]
        s = (row * scale_stride)[:, None, None]
        ok = inside[:, None, None] & (g < K // group)
        # Groups of sixteen and of thirty-two alike: each branch is its format's whole story.
        if FORMAT == "q4_k":
            values = q4_k_tile(codes + at, g, i, ok)
        elif FORMAT == "q5_k":
            values = q5_k_tile(codes + at, g, i, ok)
        elif FORMAT == "q6_k":
            values = q6_k_tile(codes + at, scales + s, g, i, ok)
        elif FORMAT == "q2_k":
            values = q2_k_tile(codes + at, g, i, ok)
        elif FORMAT == "q3_k":
            values = q3_k_tile(codes + at, scales + s, g, i, ok)
        elif FORMAT == "iq4_xs":
            values = iq4_xs_tile(codes + at, g, i, ok)
        else:
            values = _small_tile(codes + at, scales + s, g, i, ok, FORMAT)
        return tl.reshape(values, [ROWS, COLS])


@triton.jit
def row_sums(acc, FORMAT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """float32 [ROWS]: sums over the columns of what was added up in tiles of ``weight_tile``.

    Group by group: where a warp's lanes lie along columns, then rows, then columns again, as those of a
    tile may, Triton 3.6 adds up the wrong ones (Q4_0 and IQ4_NL in tiles of 8 rows on an H200).
    """
    if FORMAT == "bf16" or FORMAT == "f16" or FORMAT == "f32" or FORMAT == "fp8_e4m3":
        return tl.sum(acc, 1)
    else:
        group: tl.constexpr = (
            16
            if FORMAT == "nvfp4" or FORMAT == "q2_k" or FORMAT == "q3_k" or FORMAT == "q6_k"
            else 32
        )
        return tl.sum(tl.sum(tl.reshape(acc, [ROWS, COLS // group, group]), 2), 1)


@triton.jit
def _small_tile(codes, scales, g, i, ok, FORMAT: tl.constexpr):
    """Formats without superblocks, one block a group."""
    if FORMAT == "q8_0":
        q = tl.load((codes + g * 32 + i).to(tl.pointer_type(tl.int8)), mask=ok, other=0)
        return q.to(tl.float32) * _half(scales + g * 2, ok)
    elif FORMAT == "q4_0":
        q = low_high(tl.load(codes + g * 16 + i % 16, mask=ok, other=0), i // 16)
        return (q - 8).to(tl.float32) * _half(scales + g * 2, ok)
    elif FORMAT == "iq4_nl":
        q = low_high(tl.load(codes + g * 16 + i % 16, mask=ok, other=0), i // 16)
        return iq4(q) * _half(scales + g * 2, ok)
    elif FORMAT == "q4_1":
        q = low_high(tl.load(codes + g * 20 + 4 + i % 16, mask=ok, other=0), i // 16)
        d, m = _half(codes + g * 20, ok), _half(codes + g * 20 + 2, ok)
        return q.to(tl.float32) * d + m
    elif FORMAT == "q5_0":
        q = low_high(tl.load(codes + g * 20 + 4 + i % 16, mask=ok, other=0), i // 16)
        q |= _fifth(codes + g * 20, i, ok)
        return (q - 16).to(tl.float32) * _half(scales + g * 2, ok)
    elif FORMAT == "q5_1":
        q = low_high(tl.load(codes + g * 24 + 8 + i % 16, mask=ok, other=0), i // 16)
        q |= _fifth(codes + g * 24 + 4, i, ok)
        d, m = _half(codes + g * 24, ok), _half(codes + g * 24 + 2, ok)
        return q.to(tl.float32) * d + m
    elif FORMAT == "mxfp4":
        q = low_high(tl.load(codes + g * 16 + i // 2, mask=ok, other=0), i % 2)
        # Twice the code's value is an integer; the scale may be NaN, so halve the product.
        return e2m1_twice(q) * 0.5 * e8m0(tl.load(scales + g, mask=ok, other=0))
    else:
        tl.static_assert(FORMAT == "nvfp4", "no tile for this format")
        q = low_high(tl.load(codes + g * 8 + i // 2, mask=ok, other=0), i % 2)
        return e2m1_twice(q) * 0.5 * e4m3(tl.load(scales + g, mask=ok, other=0))


@triton.jit
def _half(at, ok):
    """The float16 at these addresses, as float32."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _fifth(at, i, ok):
    """Bit i of the little-endian word at these addresses, as 0 or 16."""
    word = tl.load(at.to(tl.pointer_type(tl.int32)), mask=ok, other=0)
    return ((word >> i) & 1) << 4


@triton.jit
def _plain_tile(
    codes, row, inside, first, code_stride, FORMAT: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    k = first + tl.arange(0, COLS)[None, :]
    ok = inside[:, None] & (k < K)
    if FORMAT == "fp8_e4m3":
        return e4m3(tl.load(codes + (row * code_stride)[:, None] + k, mask=ok, other=0))
    elif FORMAT == "f32":
        data = codes.to(tl.pointer_type(tl.float32))
        return tl.load(data + (row * (code_stride // 4))[:, None] + k, mask=ok, other=0.0)
    elif FORMAT == "f16":
        data = codes.to(tl.pointer_type(tl.float16))
        at = (row * (code_stride // 2))[:, None] + k
        return tl.load(data + at, mask=ok, other=0.0).to(tl.float32)
    else:
        data = codes.to(tl.pointer_type(tl.bfloat16))
        at = (row * (code_stride // 2))[:, None] + k
        return tl.load(data + at, mask=ok, other=0.0).to(tl.float32)
