"""Rows of an expert's matrices times an activation, in the formats of the slabs.

MXFP4 at batch 1 must be bound by memory: 0.53 bytes a weight leave a Hopper SM about 5 thread-
instructions for each, of which integer ones count double (half as many lanes). So the products are
integer: activations become two int8 terms per block of 32 (15 bits of the block's largest value, finer
than bfloat16, and the same arithmetic as the CPU's kernel), weights become bytes 12 + 2 w by two byte
permutes, and ``dp4a`` multiplies four at a time, exactly. About 2 instructions a weight.

Activations in that form (*planes*): int32 [5, K / 8] for each row: first and second four values' high
terms, the same of the low terms, and -12 times the sum of the eight values; float32 [K / 32]: half the
value of one unit, for each block.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Kernels are a language of their own; pyright sees Python.

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

NUM_PLANES = tl.constexpr(5)
BLOCK = tl.constexpr(32)  # MXFP4 weights that share a scale
# 127 * 256: the high term of the largest value stays an int8 after rounding.
LARGEST = tl.constexpr(32512.0)


@triton.jit
def _unpack(w):
    """Eight E2M1 codes of an int32 -> two int32 of four bytes 12 + 2 w."""
    if INTERPRETED:
        return _unpack_plain(w, 0), _unpack_plain(w, 16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, a, b, h;
            xor.b32 x, $2, 0x88888888;
            prmt.b32 a, 0x0F0E0D0C, 0x18141210, $2;
            prmt.b32 b, 0x090A0B0C, 0x00040608, x;
            or.b32 $0, a, b;
            shr.u32 h, $2, 16;
            shr.u32 x, x, 16;
            prmt.b32 a, 0x0F0E0D0C, 0x18141210, h;
            prmt.b32 b, 0x090A0B0C, 0x00040608, x;
            or.b32 $1, a, b;
            }""",
            "=r,=r,r",
            [w],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _unpack_plain(w, shift: tl.constexpr):
    out = tl.zeros_like(w)
    for i in tl.static_range(4):
        code = (w >> (shift + 4 * i)) & 15
        m = code & 7
        twice = tl.where(m < 4, m, tl.where(m < 6, 2 * m - 4, 4 * m - 16))
        out |= tl.where(code > 7, 12 - twice, 12 + twice) << (8 * i)
    return out


@triton.jit
def _dot4(bytes_, terms, acc):
    """acc + four unsigned bytes times four signed bytes."""
    if INTERPRETED:
        for i in tl.static_range(4):
            term = ((terms >> (8 * i)) & 255).to(tl.int8).to(tl.int32)
            acc += ((bytes_ >> (8 * i)) & 255) * term
        return acc
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [bytes_, terms, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _load_planes(planes, at, STRIDE: tl.constexpr, mask):
    """The five planes of one row at these words."""
    h0 = tl.load(planes + at, mask=mask, other=0)
    h1 = tl.load(planes + STRIDE + at, mask=mask, other=0)
    l0 = tl.load(planes + 2 * STRIDE + at, mask=mask, other=0)
    l1 = tl.load(planes + 3 * STRIDE + at, mask=mask, other=0)
    minus = tl.load(planes + 4 * STRIDE + at, mask=mask, other=0)
    return h0, h1, l0, l1, minus


@triton.jit
def mxfp4_rows(
    codes, scales, planes, units, row, num_rows, K: tl.constexpr, ROWS: tl.constexpr,
    NB: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS]: rows ``row`` ... of a matrix times one activation.

    codes: int32 pointer, rows of K / 8; scales: uint8 pointer, rows of K / 32; planes, units: the
    activation's, of LENGTH values in all; NB: blocks of a row taken at once, a power of two.
    """
    r = row + tl.arange(0, ROWS)
    b = tl.arange(0, NB)
    word = tl.arange(0, 4)
    ok = r < num_rows
    acc = tl.zeros([ROWS, NB], tl.float32)
    for start in tl.static_range(0, K // BLOCK, NB):
        block = start + b
        inside = block < K // BLOCK
        at = block[None, :, None] * 4 + word[None, None, :]
        mask = ok[:, None, None] & inside[None, :, None]
        w = tl.load(
            codes + r[:, None, None] * (K // 8) + at, mask=mask, other=0, eviction_policy="evict_first"
        )
        e = tl.load(
            scales + r[:, None] * (K // BLOCK) + block[None, :],
            mask=ok[:, None] & inside[None, :],
            other=0,
        )
        h0, h1, l0, l1, minus = _load_planes(planes, at, LENGTH // 8, inside[None, :, None])
        unit = tl.load(units + block, mask=inside, other=0.0)
        u0, u1 = _unpack(w)
        zero = tl.zeros_like(w)
        high = _dot4(u1, h1 + zero, _dot4(u0, h0 + zero, zero))
        low = _dot4(u1, l1 + zero, _dot4(u0, l0 + zero, minus + zero))
        total = tl.sum(high * 256 + low, 2)
        acc += total.to(tl.float32) * (_power_of_two(e) * unit[None, :])
    return tl.sum(acc, 1)


@triton.jit
def _power_of_two(e):
    """2 ** (e - 127) of an E8M0 byte; 0 for byte 0, whose 2 ** -127 float32 products flush anyway."""
    return (e.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def bf16_rows(
    data, x, row, num_rows, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """float32 [ROWS]: rows of a bfloat16 matrix times the float32 activation ``x`` [K]."""
    r = row + tl.arange(0, ROWS)
    ok = r < num_rows
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.static_range(0, K, COLS):
        k = start + tl.arange(0, COLS)
        w = tl.load(
            data + r[:, None] * K + k[None, :],
            mask=ok[:, None] & (k < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        acc += w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def store_planes(x, planes, units, block, inside, K: tl.constexpr, NB: tl.constexpr):
    """Write blocks of an activation as planes. x: float32 [NB, 32], blocks ``block`` [NB]."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, LARGEST / largest, 0.0)
    value = tl.floor(x * scale[:, None] + 0.5).to(tl.int32)
    tl.store(units + block, largest * (0.5 / LARGEST), mask=inside)
    high = (value + 128) >> 8
    low = value - high * 256
    n = tl.arange(0, BLOCK)
    shift = tl.reshape(8 * (n % 4), [1, 4, 2, 4])
    at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = inside[:, None]
    h0, h1 = tl.split(tl.sum((tl.reshape(high, [NB, 4, 2, 4]) & 255) << shift, 3))
    l0, l1 = tl.split(tl.sum((tl.reshape(low, [NB, 4, 2, 4]) & 255) << shift, 3))
    minus = tl.sum(tl.reshape(value, [NB, 4, 8]), 2) * -12
    tl.store(planes + at, h0, mask=mask)
    tl.store(planes + K // 8 + at, h1, mask=mask)
    tl.store(planes + 2 * (K // 8) + at, l0, mask=mask)
    tl.store(planes + 3 * (K // 8) + at, l1, mask=mask)
    tl.store(planes + 4 * (K // 8) + at, minus, mask=mask)


@triton.jit
def gated(gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The gated activation of ``ops.records.Activation``."""
    if CLAMPED:
        g = tl.minimum(gate, LIMIT)
        u = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return g / (1.0 + tl.exp(-ALPHA * g)) * (u + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
