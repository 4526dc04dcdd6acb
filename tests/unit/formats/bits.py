"""Encoders written from the published layouts with plain integers: they share no code with ours.

Each ``pack_*`` takes the fields of one block and returns its bytes; the expected weights are
computed beside it in NumPy float32, one rounding at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def half_bytes(value: float) -> bytes:
    return struct.pack("<e", value)


def nibbles_split(codes: Sequence[int]) -> bytes:
    """Element j in the low nibble of byte j, element j + n / 2 in the high one."""
    n = len(codes) // 2
    return bytes((codes[j] & 15) | (codes[j + n] & 15) << 4 for j in range(n))


def nibbles_pairs(codes: Sequence[int]) -> bytes:
    """Element 2 i in the low nibble of byte i, element 2 i + 1 in the high one."""
    return bytes(codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2))


def pack_q4_0(d: float, q: Sequence[int]) -> bytes:
    return half_bytes(d) + nibbles_split(q)


def pack_q4_1(d: float, m: float, q: Sequence[int]) -> bytes:
    return half_bytes(d) + half_bytes(m) + nibbles_split(q)


def fifth_bits(q: Sequence[int]) -> bytes:
    return sum((v >> 4) << j for j, v in enumerate(q)).to_bytes(4, "little")


def pack_q5_0(d: float, q: Sequence[int]) -> bytes:
    return half_bytes(d) + fifth_bits(q) + nibbles_split(q)


def pack_q5_1(d: float, m: float, q: Sequence[int]) -> bytes:
    return half_bytes(d) + half_bytes(m) + fifth_bits(q) + nibbles_split(q)


def pack_q8_0(d: float, q: Sequence[int]) -> bytes:
    return half_bytes(d) + struct.pack("<32b", *q)


def two_bit_plane(q: Sequence[int]) -> bytearray:
    """The 64 bytes that Q2_K and Q3_K (and, for bits 4-5, Q6_K) share."""
    out = bytearray(64)
    for index, value in enumerate(q):
        half_, rest = divmod(index, 128)
        plane, column = divmod(rest, 32)
        out[32 * half_ + column] |= (value & 3) << 2 * plane
    return out


def pack_q2_k(d: float, dmin: float, s: Sequence[int], m: Sequence[int], q: Sequence[int]) -> bytes:
    scales = bytes(a | b << 4 for a, b in zip(s, m, strict=True))
    return scales + bytes(two_bit_plane(q)) + half_bytes(d) + half_bytes(dmin)


def pack_q3_k(d: float, s: Sequence[int], q: Sequence[int]) -> bytes:
    """``s`` from -32 to 31, ``q`` from -4 to 3."""
    mask = bytearray(32)
    for index, value in enumerate(q):
        if value >= 0:
            mask[index % 32] |= 1 << index // 32
    scales = bytearray(12)
    for index, value in enumerate(v + 32 for v in s):
        scales[index % 8] |= (value & 15) << 4 * (index // 8)
        scales[8 + index % 4] |= (value >> 4) << 2 * (index // 4)
    return bytes(mask) + bytes(two_bit_plane(q)) + bytes(scales) + half_bytes(d)


def k_scale_bytes(s: Sequence[int], m: Sequence[int]) -> bytes:
    out = bytearray(12)
    for i in range(4):
        out[i] = s[i] | (s[i + 4] >> 4) << 6
        out[4 + i] = m[i] | (m[i + 4] >> 4) << 6
        out[8 + i] = (s[i + 4] & 15) | (m[i + 4] & 15) << 4
    return bytes(out)


def four_bit_plane(q: Sequence[int]) -> bytes:
    out = bytearray(128)
    for index, value in enumerate(q):
        group, rest = divmod(index, 64)
        high, column = divmod(rest, 32)
        out[32 * group + column] |= (value & 15) << 4 * high
    return bytes(out)


def pack_q4_k(d: float, dmin: float, s: Sequence[int], m: Sequence[int], q: Sequence[int]) -> bytes:
    return half_bytes(d) + half_bytes(dmin) + k_scale_bytes(s, m) + four_bit_plane(q)


def pack_q5_k(d: float, dmin: float, s: Sequence[int], m: Sequence[int], q: Sequence[int]) -> bytes:
    high = bytearray(32)
    for index, value in enumerate(q):
        high[index % 32] |= (value >> 4) << index // 32
    head = half_bytes(d) + half_bytes(dmin) + k_scale_bytes(s, m)
    return head + bytes(high) + four_bit_plane(q)


def pack_q6_k(d: float, s: Sequence[int], q: Sequence[int]) -> bytes:
    """``s`` from -128 to 127, ``q`` from -32 to 31."""
    codes = [v + 32 for v in q]
    low = bytearray(128)
    for index, value in enumerate(codes):
        half_, rest = divmod(index, 128)
        high, column = divmod(rest, 64)
        low[64 * half_ + column] |= (value & 15) << 4 * high
    top = bytes(two_bit_plane([v >> 4 for v in codes]))
    return bytes(low) + top + struct.pack("<16b", *s) + half_bytes(d)


def pack_iq4_nl(d: float, q: Sequence[int]) -> bytes:
    return half_bytes(d) + nibbles_split(q)


def pack_iq4_xs(d: float, s: Sequence[int], q: Sequence[int]) -> bytes:
    """``s`` from -32 to 31."""
    codes = [v + 32 for v in s]
    high = sum((v >> 4) << 2 * g for g, v in enumerate(codes)).to_bytes(2, "little")
    low = nibbles_pairs([v & 15 for v in codes])
    groups = b"".join(nibbles_split(q[32 * g : 32 * g + 32]) for g in range(8))
    return half_bytes(d) + high + low + groups


def e2m1(code: int) -> float:
    """Sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def e4m3(byte: int) -> float:
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def e8m0(byte: int) -> float:
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def same_bits(found: Floats, expected: Floats) -> None:
    """Assert equal float32 bit patterns; NaNs are equal whatever their payload."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))
