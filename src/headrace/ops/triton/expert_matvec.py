"""The chosen experts of a decoding step: grouped matrix-vector products over slices in slots.

Work comes as device lists (``expert_plan``): an entry is a slice in a slot, with the range of pairs
(uses by tokens) that want it. The grids are fixed, programs take tiles of the entries until none is
left, and the number of entries is read on the device, so a captured graph serves every routing.

Three kernels: gate, up and activation (``expert_gate_up``), down (``expert_down``), which leaves one
partial result for each (pair, slice), and their sum for each token in a fixed order
(``expert_combine``), the CPU's part included. No atomics: the same placement gives the same bits.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Kernels are a language of their own; pyright sees Python.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import COUNT_CPU
from headrace.ops.triton.expert_rows import (
    BLOCK,
    NUM_PLANES,
    bf16_rows,
    gated,
    mxfp4_rows,
    store_planes,
)

GATE_UP_TILE = tl.constexpr(
    64
)  # rows of a tile: their 32 results are one block of the next product


@triton.jit
def expert_prepare(
    x, planes, units, block, AT_X: tl.constexpr, HIDDEN: tl.constexpr, NB: tl.constexpr,
    MXFP4: tl.constexpr, HAS_CPU: tl.constexpr,
):  # fmt: skip
    """Give every row of x to the CPU (float32) and to the next kernels (planes). One program a row."""
    token = tl.program_id(0)
    b = tl.arange(0, NB)
    at = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.load(x + token * HIDDEN + at, mask=at < HIDDEN, other=0.0)
    if HAS_CPU:
        target = block.to(tl.pointer_type(tl.float32)) + AT_X + token * HIDDEN
        tl.store(target + at, row, mask=at < HIDDEN)
    if MXFP4:
        planes += token * (NUM_PLANES * (HIDDEN // 8))
        units += token * (HIDDEN // BLOCK)
        store_planes(row, planes, units, b, b < HIDDEN // BLOCK, HIDDEN, NB)


@triton.jit(do_not_specialize=["scale_stride"])
def expert_gate_up(
    arena, entries, counts, pair_token, x, planes, units, h, h_planes, h_units,
    scale_stride, WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, MXFP4: tl.constexpr,
    NB: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    WARPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """h[pair, slice columns] = act(gate x, up x), for the ``counts[WHICH]`` entries.

    h: float32 [pairs, S * WIDTH] for BF16; for MXFP4 its planes and units, rows by pair.
    """
    num_tiles = (2 * WIDTH + GATE_UP_TILE - 1) // GATE_UP_TILE
    total = tl.load(counts + WHICH) * num_tiles
    half: tl.constexpr = GATE_UP_TILE // 2
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * GATE_UP_TILE
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        base = arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES
        for pair in range(first, last):
            token = tl.load(pair_token + pair)
            if MXFP4:
                y = mxfp4_rows(
                    (base + AT_CODES).to(tl.pointer_type(tl.int32)), base + AT_SCALES,
                    planes + token * (NUM_PLANES * (HIDDEN // 8)),
                    units + token * (HIDDEN // BLOCK),
                    row, 2 * WIDTH, scale_stride, HIDDEN, GATE_UP_TILE, NB, HIDDEN, WARPS, UNROLL,
                )  # fmt: skip
            else:
                data = (base + AT_CODES).to(tl.pointer_type(tl.bfloat16))
                y = bf16_rows(
                    data, x + token * HIDDEN, row, 2 * WIDTH, HIDDEN, GATE_UP_TILE, 8 * NB
                )
            if HAS_BIAS:
                r = row + tl.arange(0, GATE_UP_TILE)
                bias = (base + AT_BIAS).to(tl.pointer_type(tl.float32))
                y += tl.load(bias + r, mask=r < 2 * WIDTH, other=0.0)
            gate, up = tl.split(tl.reshape(y, [half, 2]))
            act = gated(gate, up, CLAMPED, ALPHA, LIMIT)
            column = row // 2 + tl.arange(0, half)
            if MXFP4:
                out = h_planes + pair * (NUM_PLANES * (S * WIDTH // 8))
                at = (piece * WIDTH + row // 2) // BLOCK + tl.arange(0, 1)
                store_planes(
                    tl.reshape(act, [1, half]), out, h_units + pair * (S * WIDTH // BLOCK),
                    at, at >= 0, S * WIDTH, 1,
                )  # fmt: skip
            else:
                at = pair * (S * WIDTH) + piece * WIDTH + column
                tl.store(h + at, act, mask=column < WIDTH)


@triton.jit(do_not_specialize=["scale_stride"])
def expert_down(
    arena, entries, counts, pair_weight, h, h_planes, h_units, partial,
    scale_stride, WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, MXFP4: tl.constexpr,
    NB: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """partial[pair, slice] = weight * (down h + bias), float32 [pairs, S, HIDDEN], for the entries."""
    num_tiles = (HIDDEN + TILE - 1) // TILE
    total = tl.load(counts + WHICH) * num_tiles
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * TILE
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        base = arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES
        r = row + tl.arange(0, TILE)
        for pair in range(first, last):
            if MXFP4:
                y = mxfp4_down_rows(
                    base, AT_CODES, AT_SCALES, h_planes + pair * (NUM_PLANES * (S * WIDTH // 8)),
                    h_units + pair * (S * WIDTH // BLOCK), piece, row, scale_stride,
                    HIDDEN, WIDTH, S, NB, TILE, WARPS, UNROLL,
                )  # fmt: skip
            else:
                data = (base + AT_CODES).to(tl.pointer_type(tl.bfloat16))
                own = h + pair * (S * WIDTH) + piece * WIDTH
                y = bf16_rows(data, own, row, HIDDEN, WIDTH, TILE, 8 * NB)
            if HAS_BIAS:
                bias = (base + AT_BIAS).to(tl.pointer_type(tl.float32))
                y += tl.load(bias + r, mask=r < HIDDEN, other=0.0)
            y = y * tl.load(pair_weight + pair)
            tl.store(partial + (pair * S + piece) * HIDDEN + r, y, mask=r < HIDDEN)


@triton.jit
def mxfp4_down_rows(
    base, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr, planes, units, piece, row,
    scale_stride, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, NB: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The slice's columns of the activation are a range of the pair's planes."""
    return mxfp4_rows(
        (base + AT_CODES).to(tl.pointer_type(tl.int32)), base + AT_SCALES,
        planes + piece * (WIDTH // 8), units + piece * (WIDTH // BLOCK),
        row, HIDDEN, scale_stride, WIDTH, TILE, NB, S * WIDTH, WARPS, UNROLL,
    )  # fmt: skip


@triton.jit
def expert_combine(
    partial, pair_of, on_gpu, counts, block, out, AT_OUT: tl.constexpr, TOP_K: tl.constexpr,
    S: tl.constexpr, HIDDEN: tl.constexpr, HAS_CPU: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum of its partial results, by place and slice, and of the CPU's row."""
    token = tl.program_id(0)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = c < HIDDEN
    acc = tl.zeros([COLS], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = tl.load(pair_of + token * TOP_K + place)
        here = tl.load(on_gpu + pair, mask=pair >= 0, other=0)
        for piece in tl.static_range(S):
            mine = ok & (((here >> piece) & 1) != 0)
            acc += tl.load(partial + (pair * S + piece) * HIDDEN + c, mask=mine, other=0.0)
    if HAS_CPU:
        waited = tl.load(counts + COUNT_CPU) > 0
        row = block + AT_OUT + token * HIDDEN + c
        acc += tl.load(row, mask=ok & waited, other=0.0, volatile=True)
    tl.store(out + token * HIDDEN + c, acc, mask=ok)


@triton.jit
def expert_await(
    counts, state, block, AT_ACK: tl.constexpr, AT_ABORT: tl.constexpr, STATE_SEQ: tl.constexpr,
    STATE_FAILED: tl.constexpr, SPINS: tl.constexpr,
):  # fmt: skip
    """Wait until the CPU has answered this layer's request; one program of one warp.

    Ends at the latest after SPINS reads over PCIe (about a microsecond each), or when the abort word is
    set; then the failure is noted in the state, the abort word is set, and later waits end at once.
    """
    if tl.load(counts + COUNT_CPU) > 0:
        seq = tl.load(state + STATE_SEQ)
        spins = 0
        waiting = (tl.load(block + AT_ACK, volatile=True) != seq).to(tl.int32)
        while waiting != 0:
            spins += 1
            ack = tl.load(block + AT_ACK, volatile=True)
            abort = tl.load(block + AT_ABORT, volatile=True)
            waiting = ((ack != seq) & (abort == 0) & (spins < SPINS)).to(tl.int32)
        if tl.load(block + AT_ACK, volatile=True) != seq:
            tl.store(state + STATE_FAILED, 1)
            tl.store(block + AT_ABORT, 1)
