"""Rows of GGUF blocks times an activation in integers: ``dp4a`` of codes and two int8 terms.

Codes of four bits leave a Hopper SM about 3.6 thread-instructions a weight at its memory's rate, of which
integer products count double. To float32, a weight is six or more: mask, shift, convert, multiply, and
its share of a scale. In integers it is about two: one mask for four weights and one ``dp4a`` for four
with each term. Activations are x = unit * (256 high + low) by blocks of 32, 15 bits of the block's largest
value: the same arithmetic as the CPU's kernels.

An activation row in that form (*terms*), int32 words: K / 4 of high terms, four values a word; K / 4 of
low ones; K / 16 sums of sixteen integers, which offsets multiply; float32 bits of K / 32 units, and of
K / 32 sums of thirty-two values, which minima multiply.

How a tile is held decides its speed. A thread has four neighbouring words of a row (one 16-byte load), eight
threads a superblock of Q4_K's codes, and products of the four words are chained in one register. Scales come
in tensors smaller than the program, which every thread may load for itself; larger ones would be loaded
once and exchanged through shared memory.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_rows import LARGEST, dot4

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Columns that a step takes of each format; a matrix's rows are whole steps, except that Q8_0 may end early.
STEPS = {"q4_k": 256, "q5_k": 256, "q6_k": 256, "q8_0": 128, "q4_0": 256}
NIBBLES = tl.constexpr(0x0F0F0F0F)
UPPER_BIT = tl.constexpr(0x10101010)  # bit 4 of four bytes
UPPER_BITS = tl.constexpr(0x30303030)
SIX_BITS = tl.constexpr(0x3F3F)  # of two bytes


def term_words(columns: int) -> int:
    """int32 words of one row's terms."""
    return columns // 2 + columns // 16 + columns // 16


def has_terms(fmt: str, columns: int) -> bool:
    """Whether matrices of this format and width have integer products here."""
    return fmt in STEPS and columns % (64 if fmt == "q8_0" else STEPS[fmt]) == 0


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
    units = terms + K // 2 + K // 16 + block
    tl.store(units, unit.to(tl.int32, bitcast=True), mask=inside)
    total = unit * tl.sum(sums, 1).to(tl.float32)
    tl.store(units + K // 32, total.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def terms_of_rows(x, terms, K: tl.constexpr, NB: tl.constexpr):
    """Terms of rows of x, float32 [n, K]; grid: rows, and groups of NB blocks."""
    row = tl.program_id(0)
    block = tl.program_id(1) * NB + tl.arange(0, NB)
    inside = block < K // 32
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * K + at, mask=inside[:, None], other=0.0)
    words: tl.constexpr = K // 2 + K // 8
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
def _words(at, ok):
    return tl.load(at, mask=ok, other=0, eviction_policy="evict_first")


@triton.jit
def _quads(words, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS, 4 * COUNT] -> four [ROWS, COUNT]: the words of each thread, one by one."""
    even, odd = tl.split(tl.reshape(words, [ROWS, COUNT, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _times(u0, u1, u2, u3, at, there, K: tl.constexpr, SIGNED: tl.constexpr):
    """Four words of codes each times 256 high + low of the terms at [1, 4 * COUNT], summed.

    there: which terms to load, or None for all
    """
    count: tl.constexpr = u0.shape[1]
    h0, h1, h2, h3 = _quads(_terms(at, there), 1, count)
    l0, l1, l2, l3 = _quads(_terms(at + K // 4, there), 1, count)
    zero = tl.zeros_like(u0)
    if SIGNED:
        high = dot4_signed(u1, h1 + zero, dot4_signed(u0, h0 + zero, zero))
        high = dot4_signed(u3, h3 + zero, dot4_signed(u2, h2 + zero, high))
        low = dot4_signed(u1, l1 + zero, dot4_signed(u0, l0 + zero, zero))
        low = dot4_signed(u3, l3 + zero, dot4_signed(u2, l2 + zero, low))
    else:
        high = dot4(u1, h1 + zero, dot4(u0, h0 + zero, zero))
        high = dot4(u3, h3 + zero, dot4(u2, h2 + zero, high))
        low = dot4(u1, l1 + zero, dot4(u0, l0 + zero, zero))
        low = dot4(u3, l3 + zero, dot4(u2, l2 + zero, low))
    return high * 256 + low


@triton.jit
def _terms(at, there):
    if there is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=there, other=0)


@triton.jit
def _half(at, ok):
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _halves(words, place):
    """The lower (place 0) or upper (1) float16 of words, as float32."""
    bits = ((words >> (16 * place)) & 0xFFFF).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _floats(at):
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def q8_0_terms(codes, scales, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 8]: what 128 columns from ``first`` on add to rows of Q8_0 at [ROWS].

    Columns past the row's end read what follows it, and count nothing: their scales are zeros.
    """
    k = first // 4 + tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(_words(codes[:, None] + k, ok[:, None] & (k < K // 4)), ROWS, 8)
    value = _times(w0, w1, w2, w3, terms + k, k < K // 4, K, True)
    pair = tl.arange(0, 2)[None, :, None]
    there = first // 64 + pair < K // 64
    d = _words(scales[:, None, None] + first // 64 + pair, ok[:, None, None] & there)
    b = tl.arange(0, 4)[None, :, None]
    d = tl.reshape(_halves(d, tl.arange(0, 2)[None, None, :]), [ROWS, 4, 1])
    unit = _floats(terms + K // 2 + K // 16 + tl.minimum(first // 32 + b, K // 32 - 1))
    total = tl.reshape(value.to(tl.float32), [ROWS, 4, 2])
    return tl.reshape(total * (d * unit), [ROWS, 8])


@triton.jit
def q4_0_terms(codes, scales, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 8]: the same of 256 columns of Q4_0, a block in each place."""
    k = tl.arange(0, 32)[None, :]
    w = _words(codes[:, None] + first // 8 + k, ok[:, None])
    w0, w1, w2, w3 = _quads(w, ROWS, 8)
    at = terms + first // 4 + 8 * (k // 4) + k % 4
    value = _times(w0 & NIBBLES, w1 & NIBBLES, w2 & NIBBLES, w3 & NIBBLES, at, None, K, False)
    value += _times(
        (w0 >> 4) & NIBBLES, (w1 >> 4) & NIBBLES, (w2 >> 4) & NIBBLES, (w3 >> 4) & NIBBLES, at + 4,
        None, K, False,
    )  # fmt: skip
    b = first // 32 + tl.arange(0, 8)[None, :]
    sums = terms + K // 2 + 2 * b
    value -= 8 * (tl.load(sums) + tl.load(sums + 1))
    total = value.to(tl.float32) * _floats(terms + K // 2 + K // 16 + b)
    pair = tl.arange(0, 4)[None, :, None]
    d = _words(scales[:, None, None] + first // 64 + pair, ok[:, None, None])
    d = _halves(d, tl.arange(0, 2)[None, None, :])
    return tl.reshape(tl.reshape(total, [ROWS, 4, 2]) * d, [ROWS, 8])


@triton.jit
def _k_scaled(low, high, block, ok, terms, first, K: tl.constexpr):
    """Products of the even and odd groups of Q4_K and Q5_K, [ROWS, 8], with their scales and minima.

    Places 2h and 2h + 1 are halves of groups 2h (``low``) and 2h + 1 (``high``).
    """
    h = tl.arange(0, 8)[None, :] // 2
    at = block[:, None]
    own = ok[:, None]
    shift = 16 * (h % 2)
    a = _words(at + 1, own) >> shift
    b = _words(at + 2, own) >> shift
    c = _words(at + 3, own) >> shift
    # Two groups' six bits, a byte each.
    s = tl.where(h < 2, a & SIX_BITS, (c & 0x0F0F) | ((a >> 2) & 0x3030))
    m = tl.where(h < 2, b & SIX_BITS, ((c >> 4) & 0x0F0F) | ((b >> 2) & 0x3030))
    d = _words(at, own)
    scale, least = _halves(d, 0), _halves(d, 1)
    units = terms + K // 2 + K // 16 + first // 32 + 2 * h
    value = low.to(tl.float32) * ((s & 255).to(tl.float32) * _floats(units))
    value += high.to(tl.float32) * ((s >> 8).to(tl.float32) * _floats(units + 1))
    # Both halves of a group subtract half of its minimum.
    x0, x1 = 0.5 * _floats(units + K // 32), 0.5 * _floats(units + K // 32 + 1)
    minimum = (m & 255).to(tl.float32) * x0 + (m >> 8).to(tl.float32) * x1
    return value * scale - minimum * least


@triton.jit
def q4_k_terms(codes, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 8]: the same of one superblock of Q4_K."""
    block = codes + (first // 256) * 36
    k = tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(_words(block[:, None] + 4 + k, ok[:, None]), ROWS, 8)
    at = terms + first // 4 + 16 * (k // 8) + k % 8
    low = _times(w0 & NIBBLES, w1 & NIBBLES, w2 & NIBBLES, w3 & NIBBLES, at, None, K, False)
    high = _times(
        (w0 >> 4) & NIBBLES, (w1 >> 4) & NIBBLES, (w2 >> 4) & NIBBLES, (w3 >> 4) & NIBBLES, at + 8,
        None, K, False,
    )  # fmt: skip
    return _k_scaled(low, high, block, ok, terms, first, K)


@triton.jit
def _fifth(w, bits, place):
    """Lower nibbles with a fifth bit: bit ``place`` of each byte of ``bits``."""
    return (w & NIBBLES) | (((bits >> place) << 4) & UPPER_BIT)


@triton.jit
def q5_k_terms(codes, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 8]: the same of one superblock of Q5_K."""
    block = codes + (first // 256) * 44
    k = tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(_words(block[:, None] + 12 + k, ok[:, None]), ROWS, 8)
    # Every group reads the same eight words of upper bits.
    b0, b1, b2, b3 = _quads(_words(block[:, None] + 4 + k % 8, ok[:, None]), ROWS, 8)
    at = terms + first // 4 + 16 * (k // 8) + k % 8
    bit = 2 * (tl.arange(0, 8)[None, :] // 2)
    low = _times(
        _fifth(w0, b0, bit), _fifth(w1, b1, bit), _fifth(w2, b2, bit), _fifth(w3, b3, bit), at,
        None, K, False,
    )  # fmt: skip
    bit += 1
    high = _times(
        _fifth(w0 >> 4, b0, bit), _fifth(w1 >> 4, b1, bit), _fifth(w2 >> 4, b2, bit),
        _fifth(w3 >> 4, b3, bit), at + 8, None, K, False,
    )  # fmt: skip
    return _k_scaled(low, high, block, ok, terms, first, K)


@triton.jit
def q6_k_terms(codes, scales, terms, first, ok, K: tl.constexpr, ROWS: tl.constexpr):
    """float32 [ROWS, 8]: the same of one superblock of Q6_K, whose scales are apart."""
    block, head = codes + (first // 256) * 48, scales + (first // 256) * 9
    k = tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(_words(block[:, None] + k, ok[:, None]), ROWS, 8)
    # Each word of upper bits twice, so that it lies beside the lower ones that it belongs to.
    at = block[:, None] + 32 + 8 * (k // 16) + k % 8
    b0, b1, b2, b3 = _quads(_words(at, ok[:, None]), ROWS, 8)
    place = tl.arange(0, 8)[None, :]
    up = 4 - 2 * (place % 4 // 2)
    at = terms + first // 4 + 32 * (k // 16) + k % 16
    a = _times(
        (w0 & NIBBLES) | ((b0 << up) & UPPER_BITS), (w1 & NIBBLES) | ((b1 << up) & UPPER_BITS),
        (w2 & NIBBLES) | ((b2 << up) & UPPER_BITS), (w3 & NIBBLES) | ((b3 << up) & UPPER_BITS), at,
        None, K, False,
    )  # fmt: skip
    down = 4 - up
    b = _times(
        ((w0 >> 4) & NIBBLES) | ((b0 >> down) & UPPER_BITS),
        ((w1 >> 4) & NIBBLES) | ((b1 >> down) & UPPER_BITS),
        ((w2 >> 4) & NIBBLES) | ((b2 >> down) & UPPER_BITS),
        ((w3 >> 4) & NIBBLES) | ((b3 >> down) & UPPER_BITS), at + 16, None, K, False,
    )  # fmt: skip
    group = 8 * (place // 4) + place % 4  # of a; b's is four on
    sums = terms + K // 2 + first // 16 + group
    units = terms + K // 2 + K // 16 + first // 32 + group // 2
    a = (a - 32 * tl.load(sums)).to(tl.float32) * _floats(units)
    b = (b - 32 * tl.load(sums + 4)).to(tl.float32) * _floats(units + 2)
    # Scales of neighbouring groups, two bytes: the head is not aligned to more.
    pair = tl.arange(0, 4)[None, :, None]
    own = ok[:, None, None]
    at = head[:, None, None] + 4 * (pair // 2) + pair % 2
    up = 24 - 8 * tl.arange(0, 2)[None, None, :]
    s0 = (tl.load(at, mask=own, other=0).to(tl.int32) << up) >> 24
    s1 = (tl.load(at + 2, mask=own, other=0).to(tl.int32) << up) >> 24
    part = tl.reshape(a, [ROWS, 4, 2]) * s0.to(tl.float32)
    part += tl.reshape(b, [ROWS, 4, 2]) * s1.to(tl.float32)
    d = _half((head + 8)[:, None, None], own)
    return tl.reshape(part * d, [ROWS, 8])


@triton.jit
def terms_rows(
    codes, scales, terms, row, num_rows, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS]: rows of a stored matrix times an activation in terms; see ``has_terms``."""
    r = row + tl.arange(0, ROWS)
    ok = r < num_rows
    c = codes.to(tl.pointer_type(tl.int32)) + r * (CODE_STRIDE // 4)
    acc = tl.zeros([ROWS, 8], tl.float32)
    if FORMAT == "q6_k":
        s = scales.to(tl.pointer_type(tl.int16)) + r * (SCALE_STRIDE // 2)
    else:
        s = scales.to(tl.pointer_type(tl.int32)) + r * (SCALE_STRIDE // 4)
    step: tl.constexpr = 128 if FORMAT == "q8_0" else 256
    for first in tl.static_range(0, K, step):
        if FORMAT == "q8_0":
            acc += q8_0_terms(c, s, terms, first, ok, K, ROWS)
        elif FORMAT == "q4_0":
            acc += q4_0_terms(c, s, terms, first, ok, K, ROWS)
        elif FORMAT == "q4_k":
            acc += q4_k_terms(c, terms, first, ok, K, ROWS)
        elif FORMAT == "q5_k":
            acc += q5_k_terms(c, terms, first, ok, K, ROWS)
        else:
            tl.static_assert(FORMAT == "q6_k", "no integer product for this format")
            acc += q6_k_terms(c, s, terms, first, ok, K, ROWS)
    return tl.sum(acc, 1)
