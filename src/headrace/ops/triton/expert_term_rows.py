"""Rows of GGUF blocks times an activation in terms (``expert_terms``), by ``dp4a``.

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

from headrace.ops.triton.expert_rows import dot4

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
NIBBLES = tl.constexpr(0x0F0F0F0F)
UPPER_BIT = tl.constexpr(0x10101010)  # bit 4 of four bytes
UPPER_BITS = tl.constexpr(0x30303030)
SIX_BITS = tl.constexpr(0x3F3F)  # of two bytes


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
    """Four words of codes each times 256 high + low of the terms at [1 or ROWS, 4 * COUNT], summed.

    there: which terms to load, or None for all
    """
    count: tl.constexpr = u0.shape[1]
    own: tl.constexpr = at.shape[0]
    h0, h1, h2, h3 = _quads(_terms(at, there), own, count)
    l0, l1, l2, l3 = _quads(_terms(at + K // 4, there), own, count)
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


# ``first``, the step's first column, is a number, or for what adds one for each row: int32 [ROWS, 1].
# A step of a format is in two halves: what it loads of the matrix (codes, then scales), and what it adds to
# the rows, float32 [ROWS, 8], from that and the terms. ``terms_rows`` loads ahead of what it computes.


@triton.jit
def q8_0_load(codes, scales, first, ok, K: tl.constexpr):
    """128 columns of Q8_0; past the row's end there are zeros."""
    k = first // 4 + tl.arange(0, 32)[None, :]
    pair = first // 64 + tl.arange(0, 2)[None, :, None]
    w = _words(codes[:, None] + k, ok[:, None] & (k < K // 4))
    d = _words(scales[:, None, None] + pair, ok[:, None, None] & (pair < K // 64))
    return w, d


@triton.jit
def q8_0_terms(w, d, terms, first, K: tl.constexpr, ROWS: tl.constexpr):
    k = first // 4 + tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(w, ROWS, 8)
    value = _times(w0, w1, w2, w3, terms + k, k < K // 4, K, True)
    d = tl.reshape(_halves(d, tl.arange(0, 2)[None, None, :]), [ROWS, 4, 1])
    b = tl.minimum(first // 32 + tl.arange(0, 4)[None, :], K // 32 - 1)
    unit = tl.expand_dims(_floats(terms + K // 2 + K // 16 + b), 2)
    total = tl.reshape(value.to(tl.float32), [ROWS, 4, 2])
    return tl.reshape(total * (d * unit), [ROWS, 8])


@triton.jit
def q4_0_load(codes, scales, first, ok, K: tl.constexpr):
    """256 columns of Q4_0, a block in each place."""
    w = _words(codes[:, None] + first // 8 + tl.arange(0, 32)[None, :], ok[:, None])
    pair = tl.arange(0, 4)[None, :, None]
    d = _words(scales[:, None, None] + first // 64 + pair, ok[:, None, None])
    return w, d


@triton.jit
def q4_0_terms(w, d, terms, first, K: tl.constexpr, ROWS: tl.constexpr):
    k = tl.arange(0, 32)[None, :]
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
    d = _halves(d, tl.arange(0, 2)[None, None, :])
    return tl.reshape(tl.reshape(total, [ROWS, 4, 2]) * d, [ROWS, 8])


@triton.jit
def _k_scaled(low, high, d, a, b, c, terms, first, K: tl.constexpr):
    """Products of the even and odd groups of Q4_K and Q5_K, [ROWS, 8], with their scales and minima.

    Places 2h and 2h + 1 are halves of groups 2h (``low``) and 2h + 1 (``high``). d, a, b, c: the block's
    first four words.
    """
    h = tl.arange(0, 8)[None, :] // 2
    shift = 16 * (h % 2)
    a, b, c = a >> shift, b >> shift, c >> shift
    # Two groups' six bits, a byte each.
    s = tl.where(h < 2, a & SIX_BITS, (c & 0x0F0F) | ((a >> 2) & 0x3030))
    m = tl.where(h < 2, b & SIX_BITS, ((c >> 4) & 0x0F0F) | ((b >> 2) & 0x3030))
    scale, least = _halves(d, 0), _halves(d, 1)
    units = terms + K // 2 + K // 16 + first // 32 + 2 * h
    # Which products are fused with an addition is said here, not left to the compiler: programs of one
    # activation and of four must give the same bits.
    value = low.to(tl.float32) * ((s & 255).to(tl.float32) * _floats(units))
    factor = (s >> 8).to(tl.float32) * _floats(units + 1)
    value = tl.fma(high.to(tl.float32), factor, value)
    # Both halves of a group subtract half of its minimum.
    x0, x1 = 0.5 * _floats(units + K // 32), 0.5 * _floats(units + K // 32 + 1)
    second = tl.broadcast_to(x1, (m >> 8).shape)
    minimum = tl.fma((m >> 8).to(tl.float32), second, (m & 255).to(tl.float32) * x0)
    return value * scale - minimum * least


@triton.jit
def _k_head(block, ok):
    """The four words of a block of Q4_K or Q5_K before its codes: d and dmin, scales, minima, both."""
    at, own = block[:, None], ok[:, None]
    return _words(at, own), _words(at + 1, own), _words(at + 2, own), _words(at + 3, own)


@triton.jit
def q4_k_load(codes, first, ok):
    """A superblock of Q4_K."""
    block = codes + (first // 256) * 36
    w = _words(block[:, None] + 4 + tl.arange(0, 32)[None, :], ok[:, None])
    d, a, b, c = _k_head(block, ok)
    return w, d, a, b, c


@triton.jit
def q4_k_terms(w, d, a, b, c, terms, first, K: tl.constexpr, ROWS: tl.constexpr):
    k = tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(w, ROWS, 8)
    at = terms + first // 4 + 16 * (k // 8) + k % 8
    low = _times(w0 & NIBBLES, w1 & NIBBLES, w2 & NIBBLES, w3 & NIBBLES, at, None, K, False)
    high = _times(
        (w0 >> 4) & NIBBLES, (w1 >> 4) & NIBBLES, (w2 >> 4) & NIBBLES, (w3 >> 4) & NIBBLES, at + 8,
        None, K, False,
    )  # fmt: skip
    return _k_scaled(low, high, d, a, b, c, terms, first, K)


@triton.jit
def _fifth(w, bits, place):
    """Lower nibbles with a fifth bit: bit ``place`` of each byte of ``bits``."""
    return (w & NIBBLES) | (((bits >> place) << 4) & UPPER_BIT)


@triton.jit
def q5_k_load(codes, first, ok):
    """A superblock of Q5_K; every group reads the same eight words of upper bits."""
    block = codes + (first // 256) * 44
    k = tl.arange(0, 32)[None, :]
    w = _words(block[:, None] + 12 + k, ok[:, None])
    bits = _words(block[:, None] + 4 + k % 8, ok[:, None])
    d, a, b, c = _k_head(block, ok)
    return w, bits, d, a, b, c


@triton.jit
def q5_k_terms(w, bits, d, a, b, c, terms, first, K: tl.constexpr, ROWS: tl.constexpr):
    k = tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(w, ROWS, 8)
    b0, b1, b2, b3 = _quads(bits, ROWS, 8)
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
    return _k_scaled(low, high, d, a, b, c, terms, first, K)


@triton.jit
def q6_k_load(codes, scales, first, ok):
    """A superblock of Q6_K, whose scales are apart. Each word of upper bits twice, so that it lies beside
    the lower ones that it belongs to; scales of neighbouring groups in two bytes: the head is not
    aligned to more."""
    block, head = codes + (first // 256) * 48, scales + (first // 256) * 9
    k = tl.arange(0, 32)[None, :]
    w = _words(block[:, None] + k, ok[:, None])
    bits = _words(block[:, None] + 32 + 8 * (k // 16) + k % 8, ok[:, None])
    pair, own = tl.arange(0, 4)[None, :, None], ok[:, None, None]
    at = head[:, None, None] + 4 * (pair // 2) + pair % 2
    s0 = tl.load(at, mask=own, other=0).to(tl.int32)
    s1 = tl.load(at + 2, mask=own, other=0).to(tl.int32)
    return w, bits, s0, s1, _half((head + 8)[:, None, None], own)


@triton.jit
def q6_k_terms(w, bits, s0, s1, d, terms, first, K: tl.constexpr, ROWS: tl.constexpr):
    k = tl.arange(0, 32)[None, :]
    w0, w1, w2, w3 = _quads(w, ROWS, 8)
    b0, b1, b2, b3 = _quads(bits, ROWS, 8)
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
    up = 24 - 8 * tl.arange(0, 2)[None, None, :]
    part = tl.reshape(a, [ROWS, 4, 2]) * ((s0 << up) >> 24).to(tl.float32)
    part = tl.fma(tl.reshape(b, [ROWS, 4, 2]), ((s1 << up) >> 24).to(tl.float32), part)
    return tl.reshape(part * d, [ROWS, 8])


@triton.jit
def load_step(codes, scales, first, ok, FORMAT: tl.constexpr, K: tl.constexpr):
    """What a step loads."""
    if FORMAT == "q8_0":
        return q8_0_load(codes, scales, first, ok, K)
    elif FORMAT == "q4_0":
        return q4_0_load(codes, scales, first, ok, K)
    elif FORMAT == "q4_k":
        return q4_k_load(codes, first, ok)
    elif FORMAT == "q5_k":
        return q5_k_load(codes, first, ok)
    else:
        tl.static_assert(FORMAT == "q6_k", "no integer product for this format")
        return q6_k_load(codes, scales, first, ok)


@triton.jit
def add_step(acc, t, terms, first, FORMAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """acc, float32 [ROWS, 8], and what a step that has loaded ``t`` adds."""
    if FORMAT == "q8_0":
        return acc + q8_0_terms(t[0], t[1], terms, first, K, ROWS)
    elif FORMAT == "q4_0":
        return acc + q4_0_terms(t[0], t[1], terms, first, K, ROWS)
    elif FORMAT == "q4_k":
        return acc + q4_k_terms(t[0], t[1], t[2], t[3], t[4], terms, first, K, ROWS)
    elif FORMAT == "q5_k":
        return acc + q5_k_terms(t[0], t[1], t[2], t[3], t[4], t[5], terms, first, K, ROWS)
    else:
        return acc + q6_k_terms(t[0], t[1], t[2], t[3], t[4], terms, first, K, ROWS)


@triton.jit
def _load(codes, scales, first, ok, FORMAT: tl.constexpr, K: tl.constexpr):
    """``load_step``; of steps past the row's end nothing."""
    if first >= K:
        return (0,)
    else:
        return load_step(codes, scales, first, ok, FORMAT, K)


@triton.jit
def _add(acc, t, terms, first, FORMAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    if first >= K:
        return acc
    else:
        return add_step(acc, t, terms, first, FORMAT, K, ROWS)


@triton.jit
def terms_rows(
    codes, scales, terms, row, num_rows, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS]: rows of a stored matrix times an activation in terms; see ``has_terms``.

    The loads of AHEAD steps (2 or 4) are on their way while those before them are computed. The assembler
    would move them down to their use, and wait there for each; no load passes a barrier.
    """
    r = row + tl.arange(0, ROWS)
    ok = r < num_rows
    c = codes.to(tl.pointer_type(tl.int32)) + r * (CODE_STRIDE // 4)
    acc = tl.zeros([ROWS, 8], tl.float32)
    if FORMAT == "q6_k":
        s = scales.to(tl.pointer_type(tl.int16)) + r * (SCALE_STRIDE // 2)
    else:
        s = scales.to(tl.pointer_type(tl.int32)) + r * (SCALE_STRIDE // 4)
    step: tl.constexpr = 128 if FORMAT == "q8_0" else 256
    a0 = _load(c, s, 0, ok, FORMAT, K)
    a1 = _load(c, s, step, ok, FORMAT, K)
    a2 = _load(c, s, 2 * step if AHEAD > 2 else K, ok, FORMAT, K)
    a3 = _load(c, s, 3 * step if AHEAD > 2 else K, ok, FORMAT, K)
    for first in tl.static_range(0, K, AHEAD * step):
        b0 = _load(c, s, first + AHEAD * step, ok, FORMAT, K)
        b1 = _load(c, s, first + (AHEAD + 1) * step, ok, FORMAT, K)
        b2 = _load(c, s, first + 6 * step if AHEAD > 2 else K, ok, FORMAT, K)
        b3 = _load(c, s, first + 7 * step if AHEAD > 2 else K, ok, FORMAT, K)
        tl.debug_barrier()
        acc = _add(acc, a0, terms, first, FORMAT, K, ROWS)
        acc = _add(acc, a1, terms, first + step, FORMAT, K, ROWS)
        if AHEAD > 2:
            acc = _add(acc, a2, terms, first + 2 * step, FORMAT, K, ROWS)
            acc = _add(acc, a3, terms, first + 3 * step, FORMAT, K, ROWS)
        a0, a1, a2, a3 = b0, b1, b2, b3
    return tl.sum(acc, 1)
