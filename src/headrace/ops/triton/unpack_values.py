"""Code books of the stored formats in Triton: integers that stand for numbers, exactly."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.core.numeric import IQ4_VALUES


def _eight_bytes(values: tuple[int, ...]) -> int:
    """Signed bytes, the first lowest, as one signed 64-bit integer."""
    return int.from_bytes(bytes(v & 0xFF for v in values), "little", signed=True)


IQ4_LOW = tl.constexpr(_eight_bytes(IQ4_VALUES[:8]))
IQ4_HIGH = tl.constexpr(_eight_bytes(IQ4_VALUES[8:]))


@triton.jit
def low_high(byte, high):
    """The low (high = 0) or high (1) nibble of bytes, int32."""
    return (byte.to(tl.int32) >> (4 * high)) & 15


@triton.jit
def iq4(code):
    """float32 of a 4-bit code of IQ4_NL and IQ4_XS (``core.numeric.IQ4_VALUES``)."""
    shift = ((code & 7) * 8).to(tl.int64)
    low = tl.full(code.shape, IQ4_LOW, tl.int64) >> shift
    high = tl.full(code.shape, IQ4_HIGH, tl.int64) >> shift
    return tl.where(code < 8, low, high).to(tl.int8).to(tl.float32)


@triton.jit
def e2m1_twice(code):
    """Twice the E2M1 value of a 4-bit code, float32."""
    m = code & 7
    twice = tl.where(m < 4, m, tl.where(m < 6, 2 * m - 4, 4 * m - 16)).to(tl.float32)
    return tl.where(code > 7, -twice, twice)


@triton.jit
def e8m0(byte):
    """2 ** (e - 127), float32: a subnormal for byte 0, NaN for 255."""
    e = byte.to(tl.int32)
    bits = tl.where(e == 0, 0x00400000, tl.where(e == 255, 0x7FC00000, e << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """FP8 E4M3 as float32; NaN for 0x7F and 0xFF.

    Its exponent and mantissa in float32's places are the value times 2 ** -120, subnormals included.
    """
    code = byte.to(tl.int32)
    m = code & 127
    bits = ((code & 128) << 24) | tl.where(m == 127, 0x7FC00000, m << 20)
    return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
