"""Superblocks of 256 weights to float32, for ``unpack``: each function is one format.

Arguments: pointers to rows of bytes [ROWS, 1, 1], the numbers of groups [1, GROUPS, 1] counted along
the row (of 32 weights, 16 in Q2_K, Q3_K and Q6_K), the place in the group [1, 1, 32 or 16], and which
groups there are. Bit layouts are drawn in ``headrace.formats``; Q3_K and Q6_K have the codes (96 and 192
bytes a superblock) apart from the scales (14 and 18 bytes).
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.unpack_values import iq4, low_high


@triton.jit
def byte_at(at, ok):
    """Bytes as int32."""
    return tl.load(at, mask=ok, other=0).to(tl.int32)


@triton.jit
def half_at(at, ok):
    """float16 as float32."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def k_scale_min(block, j, ok):
    """Scale and minimum of group j (0 to 7) of Q4_K and Q5_K, of six bits each, as float32."""
    a = byte_at(block + 4 + j % 4, ok)
    b = byte_at(block + 8 + j % 4, ok)
    c = byte_at(block + 12 + j % 4, ok)
    scale = tl.where(j < 4, a & 63, (c & 15) | ((a >> 6) << 4))
    minimum = tl.where(j < 4, b & 63, (c >> 4) | ((b >> 6) << 4))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def q4_k_tile(codes, g, i, ok):
    j = g % 8
    block = codes + (g // 8) * 144
    s, m = k_scale_min(block, j, ok)
    q = low_high(tl.load(block + 16 + 32 * (j // 2) + i, mask=ok, other=0), j % 2)
    return q.to(tl.float32) * (half_at(block, ok) * s) - half_at(block + 2, ok) * m


@triton.jit
def q5_k_tile(codes, g, i, ok):
    j = g % 8
    block = codes + (g // 8) * 176
    s, m = k_scale_min(block, j, ok)
    q = low_high(tl.load(block + 48 + 32 * (j // 2) + i, mask=ok, other=0), j % 2)
    q |= ((byte_at(block + 16 + i, ok) >> j) & 1) << 4
    return q.to(tl.float32) * (half_at(block, ok) * s) - half_at(block + 2, ok) * m


@triton.jit
def q6_k_tile(codes, scales, g, i, ok):
    t = g % 16
    block, head = codes + (g // 16) * 192, scales + (g // 16) * 18
    low = byte_at(block + 64 * (t // 8) + 16 * (t % 4) + i, ok)
    high = byte_at(block + 128 + 32 * (t // 8) + 16 * (t % 2) + i, ok)
    q = ((low >> (4 * ((t % 8) // 4))) & 15) | (((high >> (2 * ((t % 8) // 2))) & 3) << 4)
    s = tl.load((head + t).to(tl.pointer_type(tl.int8)), mask=ok, other=0).to(tl.float32)
    return (q - 32).to(tl.float32) * (half_at(head + 16, ok) * s)


@triton.jit
def q2_k_tile(codes, g, i, ok):
    t = g % 16
    block = codes + (g // 16) * 84
    s = byte_at(block + t, ok)
    byte = byte_at(block + 16 + 32 * (t // 8) + 16 * (t % 2) + i, ok)
    q = (byte >> (2 * ((t % 8) // 2))) & 3
    d, least = half_at(block + 80, ok), half_at(block + 82, ok)
    return q.to(tl.float32) * (d * (s & 15).to(tl.float32)) - least * (s >> 4).to(tl.float32)


@triton.jit
def q3_k_scale(head, t, ok):
    """The scale of group t (0 to 15) of Q3_K, without its 32, from the 12 bytes at ``head``."""
    low = (byte_at(head + t % 8, ok) >> (4 * (t // 8))) & 15
    high = (byte_at(head + 8 + t % 4, ok) >> (2 * (t // 4))) & 3
    return (low | (high << 4)) - 32


@triton.jit
def q3_k_tile(codes, scales, g, i, ok):
    t = g % 16
    block, head = codes + (g // 16) * 96, scales + (g // 16) * 14
    byte = byte_at(block + 32 + 32 * (t // 8) + 16 * (t % 2) + i, ok)
    set_bit = (byte_at(block + 16 * (t % 2) + i, ok) >> (t // 2)) & 1
    q = ((byte >> (2 * ((t % 8) // 2))) & 3) + 4 * set_bit - 4
    s = q3_k_scale(head, t, ok).to(tl.float32)
    return q.to(tl.float32) * (half_at(head + 12, ok) * s)


@triton.jit
def iq4_xs_tile(codes, g, i, ok):
    j = g % 8
    block = codes + (g // 8) * 136
    high = byte_at(block + 2 + j // 4, ok) >> (2 * (j % 4))
    low = byte_at(block + 4 + j // 2, ok) >> (4 * (j % 2))
    s = ((low & 15) | ((high & 3) << 4)) - 32
    q = low_high(tl.load(block + 8 + 16 * j + i % 16, mask=ok, other=0), i // 16)
    return iq4(q) * (half_at(block, ok) * s.to(tl.float32))
