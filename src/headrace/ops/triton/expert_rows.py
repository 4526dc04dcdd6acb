"""Rows of an expert's matrices times an activation, in the formats of the slabs.

MXFP4 at batch 1 must be bound by memory: 0.53 bytes a weight leave a Hopper SM about 5 thread-
instructions for each, of which integer ones count double (half as many lanes). So the products are
integer: activations become two int8 terms per block of 32 (15 bits of the block's largest value, finer
than bfloat16, and the same arithmetic as the CPU's kernel), weights become bytes 12 + 2 w by two byte
permutes, and ``dp4a`` multiplies four at a time, exactly. About 2 instructions a weight.

Activations in that form (*planes*): int32 [6, K / 8] for each row: the high terms of four values and of
the next four, the same of the low terms, -12 times the sum of the eight, and (K / 32 of them) -12 times
the sum of a block's values. Their units, float32: half the value of one unit, for each block (x) or for
each eight values (what lies between gate/up and down, where a program makes few values at a time).
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

NUM_PLANES = tl.constexpr(6)
BLOCK = tl.constexpr(32)  # MXFP4 weights that share a scale
# 127 * 256: the high term of the largest value stays an int8 after rounding.
LARGEST = tl.constexpr(32512.0)


@triton.jit
def unpack(w):
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
    for i in tl.static_range(4):  # pyright: ignore
        code = (w >> (shift + 4 * i)) & 15
        m = code & 7
        twice = tl.where(m < 4, m, tl.where(m < 6, 2 * m - 4, 4 * m - 16))
        out |= tl.where(code > 7, 12 - twice, 12 + twice) << (8 * i)
    return out


@triton.jit
def dot4(bytes_, terms, acc):
    """acc + four unsigned bytes times four signed bytes."""
    if INTERPRETED:
        for i in tl.static_range(4):  # pyright: ignore
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
def mxfp4_load(
    codes, scales, row, num_rows, scale_stride, TILE: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, NB: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Codes int32 [ROWS, 4 * NB] and scales uint8 [ROWS, NB] of the TILE-th NB blocks of each row.

    codes: int32 pointer, rows of K / 8; scales: uint8 pointer, rows of K / 32 = ``scale_stride`` (an
    argument whose divisors the compiler does not know: it would load scales in pairs and exchange
    them). Where a row has no such blocks the tensors are single zeros.

    A warp takes whole rows, so a load is 512 bytes of one; warp v has rows v * reps ... (v + 1) * reps
    - 1, so that gate and up of one column meet in one thread.
    """
    if TILE * NB >= K // BLOCK:
        return tl.zeros([1, 1], tl.int32), tl.zeros([1, 1], tl.uint8)
    else:
        i = tl.arange(0, ROWS)
        r = row + (i % WARPS) * (ROWS // WARPS) + i // WARPS
        ok = (r < num_rows)[:, None]
        at = TILE * NB * 4 + tl.arange(0, 4 * NB)
        b = TILE * NB + tl.arange(0, NB)
        w = tl.load(
            codes + r[:, None] * (K // 8) + at[None, :], mask=ok & (at < K // 8)[None, :], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        e = tl.load(
            scales + r[:, None] * scale_stride + b[None, :],
            mask=ok & (b < K // BLOCK)[None, :], other=0,
        )  # fmt: skip
        return w, e


@triton.jit
def _plane(planes, at, copies, INDEX: tl.constexpr, STRIDE: tl.constexpr, mask):
    """One plane at these words, [1, WARPS, words]: a copy for every warp, so that each holds its own
    in registers (a tensor smaller than the program would be spread over it and exchanged)."""
    value = tl.load(planes + INDEX * STRIDE + at[None, :] + copies, mask=mask, other=0)
    return value[None, :, :]


@triton.jit
def mxfp4_dot(
    acc, w, e, planes, units, TILE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    NB: tl.constexpr, LENGTH: tl.constexpr, WARPS: tl.constexpr, WORD_UNITS: tl.constexpr,
):  # fmt: skip
    """acc + what these blocks of the rows contribute, float32 [reps, WARPS, NB].

    planes, units: the activation's at the row's first column, of LENGTH values in all; WORD_UNITS: it
    has one unit for every eight values instead of 32.
    """
    if TILE * NB >= K // BLOCK:
        return acc
    else:
        reps: tl.constexpr = ROWS // WARPS
        at = TILE * NB * 4 + tl.arange(0, 4 * NB)
        b = TILE * NB + tl.arange(0, NB)
        copies = tl.zeros([WARPS, 1], tl.int32)
        own = (at < K // 8)[None, :] & (copies == 0)
        h0 = _plane(planes, at, copies, 0, LENGTH // 8, own)
        h1 = _plane(planes, at, copies, 1, LENGTH // 8, own)
        l0 = _plane(planes, at, copies, 2, LENGTH // 8, own)
        l1 = _plane(planes, at, copies, 3, LENGTH // 8, own)
        minus = _plane(planes, at, copies, 4, LENGTH // 8, own)
        u0, u1 = unpack(tl.reshape(w, [reps, WARPS, 4 * NB]))
        zero = tl.zeros_like(u0)
        high = dot4(u1, h1 + zero, dot4(u0, h0 + zero, zero))
        low = dot4(u1, l1 + zero, dot4(u0, l0 + zero, minus + zero))
        value = high * 256 + low
        scale = power_of_two(tl.reshape(e, [reps, WARPS, NB]))
        if WORD_UNITS:
            unit = tl.load(units + at[None, :] + copies, mask=own, other=0.0)
            product = value.to(tl.float32) * unit[None, :, :]
            return acc + tl.sum(tl.reshape(product, [reps, WARPS, NB, 4]), 3) * scale
        else:
            inside = (b < K // BLOCK)[None, :] & (copies == 0)
            unit = tl.load(units + b[None, :] + copies, mask=inside, other=0.0)
            total = tl.sum(tl.reshape(value, [reps, WARPS, NB, 4]), 3)
            return acc + total.to(tl.float32) * (scale * unit[None, :, :])


@triton.jit
def power_of_two(e):
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
    tl.store(planes + 5 * (K // 8) + block, tl.sum(minus, 1), mask=inside)


@triton.jit
def store_words(x, planes, units, word, inside, LENGTH: tl.constexpr, WORDS: tl.constexpr):
    """Write words of an activation, each with a unit of its own. x: float32 [WORDS * 8]."""
    x = tl.reshape(x, [WORDS, 8])
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, LARGEST / largest, 0.0)
    value = tl.floor(x * scale[:, None] + 0.5).to(tl.int32)
    high = (value + 128) >> 8
    low = value - high * 256
    # Sums under a mask rather than splits: a warp can do them alone.
    i = tl.arange(0, 8)[None, :]
    high = (high & 255) << (8 * (i % 4))
    low = (low & 255) << (8 * (i % 4))
    h0, h1 = tl.sum(tl.where(i < 4, high, 0), 1), tl.sum(tl.where(i < 4, 0, high), 1)
    l0, l1 = tl.sum(tl.where(i < 4, low, 0), 1), tl.sum(tl.where(i < 4, 0, low), 1)
    tl.store(units + word, largest * (0.5 / LARGEST), mask=inside)
    tl.store(planes + word, h0, mask=inside)
    tl.store(planes + LENGTH // 8 + word, h1, mask=inside)
    tl.store(planes + 2 * (LENGTH // 8) + word, l0, mask=inside)
    tl.store(planes + 3 * (LENGTH // 8) + word, l1, mask=inside)
    tl.store(planes + 4 * (LENGTH // 8) + word, tl.sum(value, 1) * -12, mask=inside)


@triton.jit
def gated(gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The gated activation of ``ops.records.Activation``."""
    if CLAMPED:
        g = tl.minimum(gate, LIMIT)
        u = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return g / (1.0 + tl.exp(-ALPHA * g)) * (u + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def store_partial(y, bias, weight, out, r, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr):
    if HAS_BIAS:
        y += tl.load(bias.to(tl.pointer_type(tl.float32)) + r, mask=r < HIDDEN, other=0.0)
    tl.store(out + r, y * tl.load(weight), mask=r < HIDDEN)
