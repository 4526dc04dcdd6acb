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
def _plane(planes, at, copies, INDEX: tl.constexpr, STRIDE: tl.constexpr, mask):
    """One plane at these words, [1, WARPS, words]: a copy for every warp, so that each holds its own
    in registers (a tensor smaller than the program would be spread over it and exchanged)."""
    value = tl.load(planes + INDEX * STRIDE + at[None, :] + copies, mask=mask, other=0)
    return value[None, :, :]


@triton.jit
def mxfp4_rows(
    codes, scales, planes, units, row, num_rows, scale_stride, K: tl.constexpr, ROWS: tl.constexpr,
    NB: tl.constexpr, LENGTH: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS]: rows ``row`` ... of a matrix times one activation.

    codes: int32 pointer, rows of K / 8; scales: uint8 pointer, rows of K / 32 = ``scale_stride`` (an
    argument whose divisors the compiler does not know: it would load scales in pairs and exchange
    them); planes, units: the activation's, of LENGTH values in all; NB: blocks of a row taken at once,
    one for each lane; WARPS: of the program. A warp takes whole rows, so loads are 512 bytes of one.
    UNROLL: have all of a row in flight, at the price of registers.
    """
    acc = tl.zeros([ROWS // WARPS, WARPS, NB], tl.float32)
    if UNROLL:
        for start in tl.static_range(0, K // BLOCK, NB):
            acc += _blocks(
                codes, scales, planes, units, row, num_rows, scale_stride, start,
                K, ROWS, NB, LENGTH, WARPS,
            )  # fmt: skip
    else:
        for start in range(0, K // BLOCK, NB):
            acc += _blocks(
                codes, scales, planes, units, row, num_rows, scale_stride, start,
                K, ROWS, NB, LENGTH, WARPS,
            )  # fmt: skip
    return tl.reshape(tl.sum(acc, 2), [ROWS])


@triton.jit
def _blocks(
    codes, scales, planes, units, row, num_rows, scale_stride, start, K: tl.constexpr,
    ROWS: tl.constexpr, NB: tl.constexpr, LENGTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The part of ``mxfp4_rows`` that NB blocks from ``start`` make: float32 [reps, WARPS, NB]."""
    reps: tl.constexpr = ROWS // WARPS
    r = row + tl.arange(0, ROWS)
    ok = (r < num_rows)[:, None]
    b = start + tl.arange(0, NB)
    at = start * 4 + tl.arange(0, 4 * NB)
    copies = tl.zeros([WARPS, 1], tl.int32)
    inside = (at < K // 8)[None, :]
    w = tl.load(
        codes + r[:, None] * (K // 8) + at[None, :], mask=ok & inside, other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    inside_b = (b < K // BLOCK)[None, :]
    e = tl.load(scales + r[:, None] * scale_stride + b[None, :], mask=ok & inside_b, other=0)
    unit = tl.load(units + b[None, :] + copies, mask=inside_b & (copies == 0), other=0.0)
    own = inside & (copies == 0)
    h0 = _plane(planes, at, copies, 0, LENGTH // 8, own)
    h1 = _plane(planes, at, copies, 1, LENGTH // 8, own)
    l0 = _plane(planes, at, copies, 2, LENGTH // 8, own)
    l1 = _plane(planes, at, copies, 3, LENGTH // 8, own)
    minus = _plane(planes, at, copies, 4, LENGTH // 8, own)
    u0, u1 = _unpack(tl.reshape(w, [reps, WARPS, 4 * NB]))
    zero = tl.zeros_like(u0)
    high = _dot4(u1, h1 + zero, _dot4(u0, h0 + zero, zero))
    low = _dot4(u1, l1 + zero, _dot4(u0, l0 + zero, minus + zero))
    total = tl.sum(tl.reshape(high * 256 + low, [reps, WARPS, NB, 4]), 3)
    scale = _power_of_two(tl.reshape(e, [reps, WARPS, NB])) * unit[None, :, :]
    return total.to(tl.float32) * scale


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
