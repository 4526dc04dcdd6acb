"""Small floats in Triton: E4M3 and E2M1 to and from wider ones, bit for bit as the reference has them.

Every function has one meaning and up to two bodies: plain Triton, which runs everywhere (and in the
interpreter), and the instructions that a GPU may have. ``UNPACK`` chooses (``tuning.unpack_of``):

    UNPACK = 0   plain Triton: the interpreter
    UNPACK = 1   sm_89 and later: ``cvt.rn.f16x2.e4m3x2`` reads E4M3, and E2M1 once its bits are put where
                 E4M3 has them
    UNPACK = 2   sm_80 to sm_88: bits are put where float16 has them, two numbers at a time
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_to_f16(code, UNPACK: tl.constexpr):
    """E4M3 bytes -> float16, exactly (not NaN).

    Without instructions: sign, exponent and mantissa of E4M3 moved to float16's places are the value
    times 2^-8, subnormals included, since both biases belong to the exponent's least bit.
    """
    if UNPACK == 1:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b16 x, y;
            mov.b32 {x, y}, $2;
            cvt.rn.f16x2.e4m3x2 $0, x;
            cvt.rn.f16x2.e4m3x2 $1, y;
            }""",
            constraints="=&r,=&r,r", args=[code], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    if UNPACK == 2:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 a, b, c, m;
            mov.b32 m, 0x5C005C00;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 1;
            and.b32 c, c, 0x3F803F80;
            lop3.b32 a, a, 0x80008000, c, 0xEA;
            mul.f16x2 $0, a, m;
            shr.u32 c, b, 1;
            and.b32 c, c, 0x3F803F80;
            lop3.b32 b, b, 0x80008000, c, 0xEA;
            mul.f16x2 $1, b, m;
            }""",
            constraints="=&r,=&r,r", args=[code], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    wide = code.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def scale_to_f16(code):
    """E4M3 bytes without sign -> float16 times 2^7: what ``e2m1_to_f16`` leaves is made up here."""
    return (code.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 32768.0


@triton.jit
def scale_to_f32(code):
    """E4M3 bytes without sign -> float32, exactly."""
    return (code.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _nibble(x):
    """E2M1 in the low bits of an integer -> float16 times 2^-14."""
    bits = ((x & 0x8) << 12) | ((x & 0x7) << 9)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def nvfp4_to_f16(code, scale, UNPACK: tl.constexpr):
    """Two E2M1 a byte and the byte's scale, float16 times 2^7 -> two float16 (low, high), times 2^-7.

    Exact: a product has at most 2 + 4 significant bits and is a multiple of 2^-17. The caller folds
    2^7 into what it multiplies a score with.
    """
    if UNPACK == 1:
        # Byte by byte: E2M1's bits are E4M3's times 2^-6 at sign 7, exponent 4..3, mantissa 2.
        low, high = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 a, b;
            .reg .b16 x, y;
            shl.b32 a, $4, 2;
            shl.b32 b, $4, 4;
            and.b32 a, a, 0x1C1C1C1C;
            lop3.b32 a, b, 0x80808080, a, 0xEA;
            mov.b32 {x, y}, a;
            cvt.rn.f16x2.e4m3x2 $0, x;
            cvt.rn.f16x2.e4m3x2 $1, y;
            shr.u32 a, $4, 2;
            and.b32 a, a, 0x1C1C1C1C;
            lop3.b32 a, $4, 0x80808080, a, 0xEA;
            mov.b32 {x, y}, a;
            cvt.rn.f16x2.e4m3x2 $2, x;
            cvt.rn.f16x2.e4m3x2 $3, y;
            }""",
            constraints="=&r,=&r,=&r,=&r,r", args=[code], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip
        scale = scale * 0.00390625  # 2^-8: 2^-6 is made up, 2^-14 is what the caller expects
        return low * scale, high * scale
    if UNPACK == 2:
        low, high = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 c, a, 9;
            and.b32 c, c, 0x0E000E00;
            shl.b32 d, a, 12;
            lop3.b32 $0, d, 0x80008000, c, 0xEA;
            shl.b32 c, b, 9;
            and.b32 c, c, 0x0E000E00;
            shl.b32 d, b, 12;
            lop3.b32 $1, d, 0x80008000, c, 0xEA;
            shl.b32 c, a, 5;
            and.b32 c, c, 0x0E000E00;
            shl.b32 d, a, 8;
            lop3.b32 $2, d, 0x80008000, c, 0xEA;
            shl.b32 c, b, 5;
            and.b32 c, c, 0x0E000E00;
            shl.b32 d, b, 8;
            lop3.b32 $3, d, 0x80008000, c, 0xEA;
            }""",
            constraints="=&r,=&r,=&r,=&r,r", args=[code], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip
        return low * scale, high * scale
    wide = code.to(tl.uint16)
    return _nibble(wide) * scale, _nibble(wide >> 4) * scale


@triton.jit
def spread(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, GROUPS] -> [ROWS, 8 * GROUPS]: each scale for the 8 bytes that it belongs to."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, 8)), (ROWS, GROUPS * 8))


@triton.jit
def e4m3_codes(x):
    """float32 -> E4M3 codes (uint8), to nearest, ties to even, saturating at 448."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    plain = size.to(tl.uint32, bitcast=True)
    # 20 of 23 mantissa bits go; 120 is the difference of the exponents' biases.
    normal = ((plain + 0x7FFFF + ((plain >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the last bit of a float32 near 2^14.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 31) << 7)).to(tl.uint8)


@triton.jit
def power_of_two(amax, SHIFT: tl.constexpr, FRACTION: tl.constexpr):
    """The least power of two s with amax <= largest * s, within 2^-100 to 2^100; 1 where amax is 0.

    largest = 2^(SHIFT - 1) * (1 + FRACTION / 2^23).
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 - SHIFT + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    return tl.where(amax > 0, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def inverse(power):
    """1 / x of a power of two, exactly: division is approximate in Triton."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_codes(x, scale):
    """Codes of x against scales >= 0, to nearest, ties to even; 0 where the scale is 0.

    Midpoints times an E4M3 scale are exact in float32, so that comparisons decide.
    """
    size = tl.abs(x)
    code = (size > 0.25 * scale).to(tl.int32)
    code += (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32)
    code += (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32)
    code += (size >= 3.5 * scale).to(tl.int32)
    code += (size > 5.0 * scale).to(tl.int32)
    code = tl.where(scale > 0, code, 0)
    negative = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    return code | tl.where(code > 0, negative << 3, 0)


@triton.jit
def e2m1_values(code):
    """Codes (int32) -> float32."""
    bits = ((code & 0x8) << 12) | ((code & 0x7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
