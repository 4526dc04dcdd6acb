"""Rows of GGUF blocks times an activation in integers: ``dp4a`` of codes and two int8 terms.

Codes of four bits leave a Hopper SM about 3.6 thread-instructions a weight at its memory's rate, of which
integer products count double. To float32, a weight is six or more: mask, shift, convert, multiply, and
its share of a scale. In integers it is about two: one mask for four weights and one ``dp4a`` for four
with each term. Activations are x = unit * (256 high + low) by blocks of 32, 15 bits of the block's largest
value: the same arithmetic as the CPU's kernels.

An activation row in that form (*terms*), int32 words: K / 4 of high terms, four values a word; K / 4 of
low ones; K / 16 sums of sixteen integers, which minima and offsets multiply; K / 32 units, float32 bits.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_rows import LARGEST, dot4

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FORMATS = ("q4_k", "q6_k", "q8_0")
NIBBLES = tl.constexpr(0x0F0F0F0F)
PAIRS = tl.constexpr(0x03030303)


def term_words(columns: int) -> int:
    """int32 words of one row's terms."""
    return columns // 4 * 2 + columns // 16 + columns // 32


@triton.jit
def store_terms(x, terms, block, inside, K: tl.constexpr, NB: tl.constexpr):
    """Write blocks of an activation as terms. x: float32 [NB, 32]; block: int32 [NB]."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, LARGEST / largest, 0.0)
    value = tl.floor(x * scale[:, None] + 0.5).to(tl.int32)
    high = (value + 128) >> 8
    low = value - high * 256
    shift = (8 * tl.arange(0, 4))[None, None, :]
    h = tl.sum((tl.reshape(high, [NB, 8, 4]) & 255) << shift, 2)
    w = tl.sum((tl.reshape(low, [NB, 8, 4]) & 255) << shift, 2)
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(terms + at, h, mask=inside[:, None])
    tl.store(terms + K // 4 + at, w, mask=inside[:, None])
    sums = tl.sum(tl.reshape(value, [NB, 2, 16]), 2)
    at = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(terms + K // 2 + at, sums, mask=inside[:, None])
    unit = largest / LARGEST
    tl.store(terms + K // 2 + K // 16 + block, unit.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def terms_of_rows(x, terms, K: tl.constexpr, NB: tl.constexpr):
    """Terms of rows of x, float32 [n, K]; grid: rows, and groups of NB blocks."""
    row = tl.program_id(0)
    block = tl.program_id(1) * NB + tl.arange(0, NB)
    inside = block < K // 32
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * K + at, mask=inside[:, None], other=0.0)
    words: tl.constexpr = K // 4 * 2 + K // 16 + K // 32
    store_terms(values, terms + row * words, block, inside, K, NB)


@triton.jit
def dot4_signed(bytes_, terms, acc):
    """acc + four signed bytes times four signed bytes."""
    if INTERPRETED:
        for i in tl.static_range(4):  # pyright: ignore
            a = ((bytes_ >> (8 * i)) & 255).to(tl.int8).to(tl.int32)
            b = ((terms >> (8 * i)) & 255).to(tl.int8).to(tl.int32)
            acc += a * b
        return acc
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [bytes_, terms, acc], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _both(codes, high, low):
    """Unsigned codes times 256 high + low, for each word."""
    zero = tl.zeros_like(codes)
    return dot4(codes, high + zero, zero) * 256 + dot4(codes, low + zero, zero)


@triton.jit
def _words(at, ok):
    return tl.load(at, mask=ok, other=0, eviction_policy="evict_first")


@triton.jit
def _half(at, ok):
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _units(terms, block, K: tl.constexpr):
    return tl.load(terms + K // 2 + K // 16 + block).to(tl.float32, bitcast=True)


@triton.jit
def q8_0_terms(codes, scales, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 16]: what 256 columns from ``first`` on add to rows of Q8_0 at [ROWS, 1, 1]."""
    b = tl.arange(0, 8)[None, :, None]
    j = tl.arange(0, 8)[None, None, :]
    at = b * 8 + j
    there = first // 32 + b < K // 32
    ok = ok & there
    w = _words(codes + first // 4 + at, ok)
    h = tl.load(terms + first // 4 + at, mask=there, other=0)
    l = tl.load(terms + K // 4 + first // 4 + at, mask=there, other=0)
    zero = tl.zeros_like(w)
    value = dot4_signed(w, h + zero, zero) * 256 + dot4_signed(w, l + zero, zero)
    total = tl.sum(tl.reshape(value, [ROWS, 8, 2, 4]), 3)
    unit = tl.load(terms + K // 2 + K // 16 + first // 32 + b, mask=there, other=0)
    d = _half(scales + first // 16 + 2 * b, ok) * unit.to(tl.float32, bitcast=True)
    return tl.reshape(total.to(tl.float32) * d, [ROWS, 16])


@triton.jit
def q4_k_terms(codes, scales, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 8]: the same of one superblock of Q4_K."""
    block = codes + (first // 256) * 36
    h = tl.arange(0, 4)[None, :, None]
    j = tl.arange(0, 8)[None, None, :]
    w = _words(block + 4 + h * 8 + j, ok)
    even = terms + first // 4 + 16 * h + j
    low = _both(w & NIBBLES, tl.load(even), tl.load(even + K // 4))
    high = _both((w >> 4) & NIBBLES, tl.load(even + 8), tl.load(even + 8 + K // 4))
    low = tl.sum(tl.reshape(low, [ROWS, 4, 2, 4]), 3).to(tl.float32)
    high = tl.sum(tl.reshape(high, [ROWS, 4, 2, 4]), 3).to(tl.float32)
    halves = block.to(tl.pointer_type(tl.uint8))
    d, least = _half(halves, ok), _half(halves + 2, ok)
    w0, w1, w2 = _words(block + 1, ok), _words(block + 2, ok), _words(block + 3, ok)
    s0, m0 = _six_bits(w0, w1, w2, 2 * h)
    s1, m1 = _six_bits(w0, w1, w2, 2 * h + 1)
    g = first // 32 + 2 * h
    u0, u1 = _units(terms, g, K), _units(terms, g + 1, K)
    sums = terms + K // 2 + 2 * g
    x0 = u0 * (tl.load(sums) + tl.load(sums + 1)).to(tl.float32)
    x1 = u1 * (tl.load(sums + 2) + tl.load(sums + 3)).to(tl.float32)
    part = low * (d * s0 * u0) + high * (d * s1 * u1)
    # Both halves of a group subtract half of its minimum.
    return tl.reshape(part - (0.5 * least) * (m0 * x0 + m1 * x1), [ROWS, 8])


@triton.jit
def _six_bits(w0, w1, w2, j):
    """Scale and minimum of group j out of the twelve bytes' words, as ``unpack_super.k_scale_min``."""
    shift = 8 * (j % 4)
    a, b, c = w0 >> shift, w1 >> shift, w2 >> shift
    s = tl.where(j < 4, a & 63, (c & 15) | ((a >> 2) & 48))
    m = tl.where(j < 4, b & 63, ((c >> 4) & 15) | ((b >> 2) & 48))
    return s.to(tl.float32), m.to(tl.float32)


@triton.jit
def q6_k_terms(codes, scales, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 8]: the same of one superblock of Q6_K, whose scales are apart."""
    block, head = codes + (first // 256) * 48, scales + (first // 256) * 18
    half = tl.arange(0, 2)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    low = _words(block + 16 * half + j, ok)
    bits = _words(block + 32 + 8 * half + j % 8, ok) >> (2 * (j // 8))
    at = terms + first // 4 + 32 * half + j
    u = (low & NIBBLES) | ((bits & PAIRS) << 4)
    v = ((low >> 4) & NIBBLES) | (((bits >> 4) & PAIRS) << 4)
    a = _both(u, tl.load(at), tl.load(at + K // 4))
    b = _both(v, tl.load(at + 16), tl.load(at + 16 + K // 4))
    a = tl.sum(tl.reshape(a, [ROWS, 2, 4, 4]), 3)
    b = tl.sum(tl.reshape(b, [ROWS, 2, 4, 4]), 3)
    t = tl.arange(0, 4)[None, None, :]
    group = 8 * half + t
    sums = terms + K // 2 + first // 16 + group
    a = (a - 32 * tl.load(sums)).to(tl.float32)
    b = (b - 32 * tl.load(sums + 4)).to(tl.float32)
    s = (head + group).to(tl.pointer_type(tl.int8))
    s0 = tl.load(s, mask=ok, other=0).to(tl.float32)
    s1 = tl.load(s + 4, mask=ok, other=0).to(tl.float32)
    units = first // 32 + group // 2
    part = a * (s0 * _units(terms, units, K)) + b * (s1 * _units(terms, units + 2, K))
    return tl.reshape(part * _half(head + 16, ok), [ROWS, 8])


@triton.jit
def terms_rows(
    codes, scales, terms, row, num_rows, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS]: rows of a stored matrix times an activation in terms; K: whole blocks."""
    r = (row + tl.arange(0, ROWS))[:, None, None]
    ok = r < num_rows
    c = codes.to(tl.pointer_type(tl.int32)) + r * (CODE_STRIDE // 4)
    s = scales + r * SCALE_STRIDE
    parts: tl.constexpr = 16 if FORMAT == "q8_0" else 8
    acc = tl.zeros([ROWS, parts], tl.float32)
    for first in tl.static_range(0, K, 256):
        if FORMAT == "q8_0":
            acc += q8_0_terms(c, s, terms, first, ok, K, ROWS)
        elif FORMAT == "q4_k":
            acc += q4_k_terms(c, s, terms, first, ok, K, ROWS)
        else:
            tl.static_assert(FORMAT == "q6_k", "no integer product for this format")
            acc += q6_k_terms(c, s, terms, first, ok, K, ROWS)
    return tl.sum(acc, 1)
