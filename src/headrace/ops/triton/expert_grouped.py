"""Many slices of experts for the tokens routed to them, in one launch for each matrix.

A prompt chunk's pairs (token, place among its experts) are sorted by expert and token. A launch gets a
work list of (slot, expert * S + slice) and finds each entry's pairs by itself, so the host need not
know the routing. Weight rows are the M of the tensor cores' product, unpacked in registers, tokens its
N.

Each pair has a row of outputs of its own, to which the launches add one after the other; in one launch
the slices of an expert follow each other and are added up in registers. So no two programs meet, and
all sums run in a fixed order. (Adding to the token's row instead saves these rows, but then an output's
programs must take all experts in turn: 47 TFLOP/s at best on an H200, where gate and up reach 200.)

Long chunks have no room for these rows. There a launch has one expert (ALONE), which no token chose twice:
outputs times weights are added to the tokens' rows, and activations lie from the expert's first pair on.

MXFP4: two codes share a byte, so x and h hold the even columns of a row (for h: of a slice) before the
odd ones, and low and high codes are two products. A code's bits, moved into a float32's exponent and
mantissa, are its value times 2^-126; with the scale folded in weights are 2^-64 times their value,
exactly, for scales from 2^-62 to 2^65, and sums are multiplied by 2^64.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_rows import BLOCK, gated

# Words of a work list's entry: slot, key, where it is to stay, and, at the first of an expert's entries,
# how many there are, else 0.
ENTRY = tl.constexpr(4)
UNSCALE = tl.constexpr(2.0**64)
_BIAS_OF_SCALE = tl.constexpr(62)  # 127 + 126 - 127 - 64


@triton.jit
def _unpacked(codes, e, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """bfloat16 [ROWS, BYTES] of the low and of the high codes, times 2^-64.

    codes: uint8 [ROWS, BYTES]; e: E8M0 uint8 [ROWS, BYTES / 16]
    """
    blocks: tl.constexpr = BYTES // 16
    scale = ((e.to(tl.int32) + _BIAS_OF_SCALE) << 23).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(scale[:, :, None], [ROWS, blocks, 16])
    scale = tl.reshape(scale, [ROWS, BYTES])
    c = codes.to(tl.int32)
    low = (((c & 0x07) << 22) | ((c & 0x08) << 28)).to(tl.float32, bitcast=True)
    high = (((c & 0x70) << 18) | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)
    return (low * scale).to(tl.bfloat16), (high * scale).to(tl.bfloat16)


@triton.jit
def _packed_dot(
    acc, base, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr, row, ok, at, x0, x1,
    K: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """acc + rows of an MXFP4 matrix at these bytes of a row, times the even and odd columns' x."""
    c = at + tl.arange(0, BYTES)
    b = at // 16 + tl.arange(0, BYTES // 16)
    codes = tl.load(
        base + AT_CODES + row[:, None] * (K // 2) + c[None, :],
        mask=ok[:, None] & (c < K // 2)[None, :], other=0,
    )  # fmt: skip
    e = tl.load(
        base + AT_SCALES + row[:, None] * (K // BLOCK) + b[None, :],
        mask=ok[:, None] & (b < K // BLOCK)[None, :], other=0,
    )  # fmt: skip
    low, high = _unpacked(codes, e, ROWS, BYTES)
    # A sum of its own, so that it is waited for before the registers of these weights are used again: with
    # ``acc`` in the products Triton 3.6 leaves the last one running into the next step (H200: NaN).
    return acc + tl.dot(high, x1, tl.dot(low, x0))


@triton.jit
def _plain_dot(
    acc, base, AT_DATA: tl.constexpr, row, ok, at, x, K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    c = at + tl.arange(0, COLS)
    data = (base + AT_DATA).to(tl.pointer_type(tl.bfloat16))
    w = tl.load(
        data + row[:, None] * K + c[None, :], mask=ok[:, None] & (c < K)[None, :], other=0.0
    )
    return tl.dot(w, x, acc)


@triton.jit
def columns_of(x, at, there, END: tl.constexpr, COLS: tl.constexpr):
    """bfloat16 [COLS, tokens]: columns from ``at`` of the rows at these pointers."""
    c = at + tl.arange(0, COLS)
    return tl.load(x[None, :] + c[:, None], mask=(c < END)[:, None] & there[None, :], other=0.0)


@triton.jit
def inner_row(pair, begin, ALONE: tl.constexpr):
    """Where a pair's activations lie in h. begin: the expert's first pair."""
    if ALONE:
        return (pair - begin).to(tl.int64)
    return pair.to(tl.int64)


@triton.jit
def grouped_gate_up(
    arena, work, bounds, order, x, h, top_k,
    PACKED: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, S: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """h[pair, slice's columns] = act(gate x, up x).

    arena: uint8; work: int32 [n, 4]; bounds: int32 [E + 1], first pairs of the experts; order: int64
    [pairs], places in [T, top_k] by expert and token; x: bfloat16 [T, HIDDEN]; h: bfloat16 [pairs,
    S * WIDTH], where ALONE [most pairs of an expert, S * WIDTH]. Grid: n * ceil(WIDTH / ROWS), and how many
    programs share the tokens. COLS: columns at once, for MXFP4 bytes.
    """
    num_tiles: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    entry = work + (tl.program_id(0) // num_tiles) * ENTRY
    base = arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES
    key = tl.load(entry + 1)
    expert, piece = key // S, key % S
    begin, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    i = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    ok = i < WIDTH
    for start in range(begin + tl.program_id(1) * TOKENS, last, tl.num_programs(1) * TOKENS):
        pair = start + tl.arange(0, TOKENS)
        there = pair < last
        token = tl.load(order + pair, mask=there, other=0) // top_k
        own = x + token * HIDDEN
        gate = tl.zeros([ROWS, TOKENS], tl.float32)
        up = tl.zeros([ROWS, TOKENS], tl.float32)
        if PACKED:
            half: tl.constexpr = HIDDEN // 2
            for at in range(0, half, COLS):
                x0 = columns_of(own, at, there, half, COLS)
                x1 = columns_of(own + half, at, there, half, COLS)
                gate = _packed_dot(
                    gate, base, AT_CODES, AT_SCALES, 2 * i, ok, at, x0, x1, HIDDEN, ROWS, COLS
                )
                up = _packed_dot(
                    up, base, AT_CODES, AT_SCALES, 2 * i + 1, ok, at, x0, x1, HIDDEN, ROWS, COLS
                )
            gate *= UNSCALE
            up *= UNSCALE
        else:
            for at in range(0, HIDDEN, COLS):
                value = columns_of(own, at, there, HIDDEN, COLS)
                gate = _plain_dot(gate, base, AT_CODES, 2 * i, ok, at, value, HIDDEN, COLS)
                up = _plain_dot(up, base, AT_CODES, 2 * i + 1, ok, at, value, HIDDEN, COLS)
        column = (i % 2) * (WIDTH // 2) + i // 2 if PACKED else i
        inner = h + inner_row(pair, begin, ALONE) * (S * WIDTH) + piece * WIDTH
        store_activations(
            gate, up, base, i, ok, there, inner, column, AT_BIAS, HAS_BIAS, CLAMPED, ALPHA, LIMIT
        )


@triton.jit
def store_activations(
    gate, up, base, i, ok, there, inner, column, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """act(gate + bias, up + bias) of rows i of a slice at ``base``, to ``column`` of each row of ``inner``.

    Addresses are made last: made before the activation they cost registers that it needs (sm_90 spilled).
    """
    if HAS_BIAS:
        bias = (base + AT_BIAS).to(tl.pointer_type(tl.float32))
        gate += tl.load(bias + 2 * i, mask=ok, other=0.0)[:, None]
        up += tl.load(bias + 2 * i + 1, mask=ok, other=0.0)[:, None]
    act = gated(gate, up, CLAMPED, ALPHA, LIMIT).to(tl.bfloat16)
    tl.store(inner[None, :] + column[:, None], act, mask=ok[:, None] & there[None, :])


@triton.jit
def grouped_down(
    arena, work, bounds, order, h, y, weights, top_k,
    PACKED: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, S: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y[place] += down h + bias, over the entries of an expert; ALONE: y[token] += weight (down h + bias).

    y: bfloat16 or float32 [T * top_k, HIDDEN], ALONE float32 [T, HIDDEN]; weights: float32 [T, top_k].
    Grid: as ``grouped_gate_up``, with ceil(HIDDEN / ROWS).
    """
    num_tiles: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    entry = work + (tl.program_id(0) // num_tiles) * ENTRY
    count = tl.load(entry + 3)
    row = (tl.program_id(0) % num_tiles) * ROWS + tl.arange(0, ROWS)
    ok = row < HIDDEN
    expert = tl.load(entry + 1) // S
    begin, last = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    last = tl.where(count > 0, last, begin)
    for start in range(begin + tl.program_id(1) * TOKENS, last, tl.num_programs(1) * TOKENS):
        pair = start + tl.arange(0, TOKENS)
        there = pair < last
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        for number in range(0, count):
            base = arena + tl.load(entry + number * ENTRY).to(tl.int64) * SLICE_NBYTES
            piece = tl.load(entry + number * ENTRY + 1) % S
            inner = h + inner_row(pair, begin, ALONE) * (S * WIDTH) + piece * WIDTH
            if PACKED:
                half: tl.constexpr = WIDTH // 2
                for at in range(0, half, COLS):
                    x0 = columns_of(inner, at, there, half, COLS)
                    x1 = columns_of(inner + half, at, there, half, COLS)
                    acc = _packed_dot(
                        acc, base, AT_CODES, AT_SCALES, row, ok, at, x0, x1, WIDTH, ROWS, COLS
                    )
            else:
                for at in range(0, WIDTH, COLS):
                    value = columns_of(inner, at, there, WIDTH, COLS)
                    acc = _plain_dot(acc, base, AT_CODES, row, ok, at, value, WIDTH, COLS)
            tl.debug_barrier()  # the next slice's loads overwrite what other warps still read
        if PACKED:
            acc *= UNSCALE
        store_outputs(
            acc, arena, entry, count, order, y, weights, top_k, pair, there, row, ok, SLICE_NBYTES,
            AT_BIAS, HAS_BIAS, HIDDEN, ALONE,
        )  # fmt: skip


@triton.jit
def store_outputs(
    acc, arena, entry, count, order, y, weights, top_k, pair, there, row, ok,
    SLICE_NBYTES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Add rows of an expert's outputs, with the biases of its ``count`` slices, to its pairs' (ALONE:
    weighted to its tokens')."""
    if HAS_BIAS:
        for number in range(0, count):
            base = arena + tl.load(entry + number * ENTRY).to(tl.int64) * SLICE_NBYTES
            bias = (base + AT_BIAS).to(tl.pointer_type(tl.float32))
            acc += tl.load(bias + row, mask=ok, other=0.0)[:, None]
    place = tl.load(order + pair, mask=there, other=0)
    if ALONE:
        acc *= tl.load(weights + place, mask=there, other=0.0)[None, :]
        place = place // top_k
    target = y + place[None, :] * HIDDEN + row[:, None]
    mask = ok[:, None] & there[None, :]
    acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def grouped_sum(y, weights, out, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, COLS: tl.constexpr):
    """out[token] = sum of weight * y over its places. weights: float32 [T, TOP_K]; out: float32."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    acc = tl.zeros([COLS], tl.float32)
    for i in tl.static_range(TOP_K):
        place = token * TOP_K + i
        value = tl.load(y + place * HIDDEN + c, mask=c < HIDDEN, other=0.0).to(tl.float32)
        acc += value * tl.load(weights + place)
    tl.store(out + token * HIDDEN + c, acc, mask=c < HIDDEN)
