"""The chosen experts of a decoding step: grouped matrix-vector products over slices in slots.

Work comes as device lists (``expert_plan``): an entry is a slice in a slot, with the range of pairs
(uses by tokens) that want it. The grids are fixed, programs take tiles of the entries until none is
left, and the number of entries is read on the device, so a captured graph serves every routing.

Three kernels: gate, up and activation (``*_gate_up``), down (``*_down``), which leaves one
partial result for each (pair, slice), and their sum for each token in a fixed order
(``expert_combine``), the CPU's part included. No atomics: the same placement gives the same bits.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import (
    COUNT_CPU,
    TOTAL_STALL_NS,
    TOTAL_STALLS,
    clock_ns,
)
from headrace.ops.triton.expert_rows import (
    BLOCK,
    NUM_PLANES,
    bf16_rows,
    gated,
    mxfp4_dot,
    mxfp4_load,
    store_partial,
    store_planes,
    store_words,
)
from headrace.ops.triton.overlap import wait_and_release


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


@triton.jit
def _mxfp4_tiles(
    base, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr, row, num_rows, scale_stride,
    K: tl.constexpr, ROWS: tl.constexpr, NB: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """All blocks of ROWS rows, on their way: three pairs of codes and scales."""
    codes = (base + AT_CODES).to(tl.pointer_type(tl.int32))
    scales = base + AT_SCALES
    w0, e0 = mxfp4_load(codes, scales, row, num_rows, scale_stride, 0, K, ROWS, NB, WARPS)
    w1, e1 = mxfp4_load(codes, scales, row, num_rows, scale_stride, 1, K, ROWS, NB, WARPS)
    w2, e2 = mxfp4_load(codes, scales, row, num_rows, scale_stride, 2, K, ROWS, NB, WARPS)
    return w0, e0, w1, e1, w2, e2


@triton.jit
def _mxfp4_product(
    w0, e0, w1, e1, w2, e2, codes, scales, planes, units, row, num_rows, scale_stride,
    K: tl.constexpr, ROWS: tl.constexpr, NB: tl.constexpr, LENGTH: tl.constexpr,
    WARPS: tl.constexpr, WORD_UNITS: tl.constexpr,
):  # fmt: skip
    """float32 [reps, WARPS]: the rows times one activation; rows longer than three tiles are read on."""
    acc = tl.zeros([ROWS // WARPS, WARPS, NB], tl.float32)
    acc = mxfp4_dot(acc, w0, e0, planes, units, 0, K, ROWS, NB, LENGTH, WARPS, WORD_UNITS)
    acc = mxfp4_dot(acc, w1, e1, planes, units, 1, K, ROWS, NB, LENGTH, WARPS, WORD_UNITS)
    acc = mxfp4_dot(acc, w2, e2, planes, units, 2, K, ROWS, NB, LENGTH, WARPS, WORD_UNITS)
    for tile in tl.static_range(3, (K // BLOCK + NB - 1) // NB):
        w, e = mxfp4_load(codes, scales, row, num_rows, scale_stride, tile, K, ROWS, NB, WARPS)
        acc = mxfp4_dot(acc, w, e, planes, units, tile, K, ROWS, NB, LENGTH, WARPS, WORD_UNITS)
    return tl.sum(acc, 2)


@triton.jit(do_not_specialize=["scale_stride"])
def mxfp4_gate_up(
    arena, entries, counts, pair_token, planes, units, h_planes, h_units, scale_stride,
    WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, NB: tl.constexpr, TILE: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """h[pair, slice columns] = act(gate x, up x), for the ``counts[WHICH]`` entries, MXFP4.

    The next tile's weights are on their way while one is computed, and serve all its pairs.
    """
    num_tiles = 2 * WIDTH // TILE
    total = tl.load(counts + WHICH) * num_tiles
    step = tl.num_programs(0)
    item = tl.program_id(0)
    if item < total:
        base = _slot_of(arena, entries, item // num_tiles, SLICE_NBYTES)
        w0, e0, w1, e1, w2, e2 = _mxfp4_tiles(
            base, AT_CODES, AT_SCALES, (item % num_tiles) * TILE, 2 * WIDTH, scale_stride,
            HIDDEN, TILE, NB, WARPS,
        )  # fmt: skip
        for item in range(tl.program_id(0), total, step):
            # The last one loads itself again, from the cache, rather than branch.
            then = tl.minimum(item + step, total - 1)
            next_base = _slot_of(arena, entries, then // num_tiles, SLICE_NBYTES)
            v0, f0, v1, f1, v2, f2 = _mxfp4_tiles(
                next_base, AT_CODES, AT_SCALES, (then % num_tiles) * TILE, 2 * WIDTH, scale_stride,
                HIDDEN, TILE, NB, WARPS,
            )  # fmt: skip
            entry = entries + (item // num_tiles) * 4
            row = (item % num_tiles) * TILE
            piece = tl.load(entry + 1) % S
            first = tl.load(entry + 2)
            last = first + tl.load(entry + 3)
            for pair in range(first, last):
                token = tl.load(pair_token + pair)
                y = _mxfp4_product(
                    w0, e0, w1, e1, w2, e2,
                    (base + AT_CODES).to(tl.pointer_type(tl.int32)), base + AT_SCALES,
                    planes + token * (NUM_PLANES * (HIDDEN // 8)),
                    units + token * (HIDDEN // BLOCK), row, 2 * WIDTH, scale_stride,
                    HIDDEN, TILE, NB, HIDDEN, WARPS, False,
                )  # fmt: skip
                act = _activate_rows(
                    y, base + AT_BIAS, row, HAS_BIAS, CLAMPED, ALPHA, LIMIT, TILE, WARPS
                )
                words: tl.constexpr = TILE // 16
                at = (piece * WIDTH + row // 2) // 8 + tl.arange(0, words)
                store_words(
                    act, h_planes + pair * (NUM_PLANES * (S * WIDTH // 8)),
                    h_units + pair * (S * WIDTH // 8), at, at >= 0, S * WIDTH, words,
                )  # fmt: skip
            base = next_base
            w0, e0, w1, e1, w2, e2 = v0, f0, v1, f1, v2, f2


@triton.jit
def _slot_of(arena, entries, entry, SLICE_NBYTES: tl.constexpr):
    return arena + tl.load(entries + entry * 4).to(tl.int64) * SLICE_NBYTES


@triton.jit
def _activate_rows(
    y, bias, row, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """y [reps, WARPS], of row v * reps + rep, to activations [TILE / 2] in the order of the columns.

    Gate and up are two values of one thread; only the last step passes through shared memory.
    """
    pairs: tl.constexpr = TILE // WARPS // 2
    y = tl.reshape(y, [pairs, 2, WARPS])
    side = tl.arange(0, 2)[None, :, None]
    if HAS_BIAS:
        pair = tl.arange(0, pairs)[:, None, None]
        r = row + tl.arange(0, WARPS)[None, None, :] * (2 * pairs) + 2 * pair + side
        y += tl.load(bias.to(tl.pointer_type(tl.float32)) + r)
    gate = tl.sum(tl.where(side == 0, y, 0.0), 1)
    up = tl.sum(tl.where(side == 0, 0.0, y), 1)
    act = tl.reshape(tl.trans(gated(gate, up, CLAMPED, ALPHA, LIMIT)), [TILE // 2])
    # Each warp has values of its own. A sum with one term gives all of them to all threads in one
    # exchange; without it each of the next steps' reductions would be one.
    i = tl.arange(0, TILE // 2)
    return tl.sum(tl.where(i[:, None] == i[None, :], act[None, :], 0.0), 1)


@triton.jit(do_not_specialize=["scale_stride"])
def mxfp4_down(
    arena, entries, counts, pair_weight, h_planes, h_units, partial, scale_stride,
    WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr, AT_CODES: tl.constexpr,
    AT_SCALES: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, NB: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """partial[pair, slice] = weight * (down h + bias), float32 [pairs, S, HIDDEN], MXFP4."""
    num_tiles = (HIDDEN + TILE - 1) // TILE
    total = tl.load(counts + WHICH) * num_tiles
    step = tl.num_programs(0)
    item = tl.program_id(0)
    if item < total:
        base = _slot_of(arena, entries, item // num_tiles, SLICE_NBYTES)
        w0, e0, w1, e1, w2, e2 = _mxfp4_tiles(
            base, AT_CODES, AT_SCALES, (item % num_tiles) * TILE, HIDDEN, scale_stride,
            WIDTH, TILE, NB, WARPS,
        )  # fmt: skip
        for item in range(tl.program_id(0), total, step):
            then = tl.minimum(item + step, total - 1)
            next_base = _slot_of(arena, entries, then // num_tiles, SLICE_NBYTES)
            v0, f0, v1, f1, v2, f2 = _mxfp4_tiles(
                next_base, AT_CODES, AT_SCALES, (then % num_tiles) * TILE, HIDDEN, scale_stride,
                WIDTH, TILE, NB, WARPS,
            )  # fmt: skip
            entry = entries + (item // num_tiles) * 4
            row = (item % num_tiles) * TILE
            piece = tl.load(entry + 1) % S
            first = tl.load(entry + 2)
            last = first + tl.load(entry + 3)
            reps: tl.constexpr = TILE // WARPS
            r = row + tl.arange(0, WARPS)[None, :] * reps + tl.arange(0, reps)[:, None]
            for pair in range(first, last):
                y = _mxfp4_product(
                    w0, e0, w1, e1, w2, e2,
                    (base + AT_CODES).to(tl.pointer_type(tl.int32)), base + AT_SCALES,
                    h_planes + pair * (NUM_PLANES * (S * WIDTH // 8)) + piece * (WIDTH // 8),
                    h_units + pair * (S * WIDTH // 8) + piece * (WIDTH // 8),
                    row, HIDDEN, scale_stride, WIDTH, TILE, NB, S * WIDTH, WARPS, True,
                )  # fmt: skip
                store_partial(
                    y, base + AT_BIAS, pair_weight + pair, partial + (pair * S + piece) * HIDDEN,
                    r, HAS_BIAS, HIDDEN,
                )  # fmt: skip
            base = next_base
            w0, e0, w1, e1, w2, e2 = v0, f0, v1, f1, v2, f2


@triton.jit
def bf16_gate_up(
    arena, entries, counts, pair_token, x, h, WHICH: tl.constexpr, SLICE_NBYTES: tl.constexpr,
    AT_DATA: tl.constexpr, AT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, S: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """h[pair, slice columns] = act(gate x, up x), float32 [pairs, S * WIDTH], for bfloat16 weights."""
    num_tiles = (2 * WIDTH + TILE - 1) // TILE
    total = tl.load(counts + WHICH) * num_tiles
    half: tl.constexpr = TILE // 2
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * TILE
        base = _slot_of(arena, entries, item // num_tiles, SLICE_NBYTES)
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        data = (base + AT_DATA).to(tl.pointer_type(tl.bfloat16))
        for pair in range(first, last):
            own = x + tl.load(pair_token + pair) * HIDDEN
            y = bf16_rows(data, own, row, 2 * WIDTH, HIDDEN, TILE, COLS)
            if HAS_BIAS:
                r = row + tl.arange(0, TILE)
                bias = (base + AT_BIAS).to(tl.pointer_type(tl.float32))
                y += tl.load(bias + r, mask=r < 2 * WIDTH, other=0.0)
            gate, up = tl.split(tl.reshape(y, [half, 2]))
            act = gated(gate, up, CLAMPED, ALPHA, LIMIT)
            column = row // 2 + tl.arange(0, half)
            tl.store(h + pair * (S * WIDTH) + piece * WIDTH + column, act, mask=column < WIDTH)


@triton.jit
def bf16_down(
    arena, entries, counts, pair_weight, h, partial, WHICH: tl.constexpr,
    SLICE_NBYTES: tl.constexpr, AT_DATA: tl.constexpr, AT_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
    COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """partial[pair, slice] = weight * (down h + bias), float32 [pairs, S, HIDDEN], for bfloat16."""
    num_tiles = (HIDDEN + TILE - 1) // TILE
    total = tl.load(counts + WHICH) * num_tiles
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = entries + (item // num_tiles) * 4
        row = (item % num_tiles) * TILE
        base = _slot_of(arena, entries, item // num_tiles, SLICE_NBYTES)
        piece = tl.load(entry + 1) % S
        first = tl.load(entry + 2)
        last = first + tl.load(entry + 3)
        r = row + tl.arange(0, TILE)
        data = (base + AT_DATA).to(tl.pointer_type(tl.bfloat16))
        for pair in range(first, last):
            own = h + pair * (S * WIDTH) + piece * WIDTH
            y = bf16_rows(data, own, row, HIDDEN, WIDTH, TILE, COLS)
            store_partial(
                y, base + AT_BIAS, pair_weight + pair, partial + (pair * S + piece) * HIDDEN, r,
                HAS_BIAS, HIDDEN,
            )  # fmt: skip


@triton.jit
def expert_combine(
    partial, pair_of, on_gpu, counts, block, out, AT_OUT: tl.constexpr, TOP_K: tl.constexpr,
    S: tl.constexpr, HIDDEN: tl.constexpr, HAS_CPU: tl.constexpr, COLS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum of its partial results, by place and slice, and of the CPU's row."""
    token = tl.program_id(0)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = c < HIDDEN
    acc = tl.zeros([COLS], tl.float32)
    # The plan was done before the kernel that this one may overlap began.
    rows = ()
    masks = ()
    for place in tl.static_range(TOP_K):
        pair = tl.load(pair_of + token * TOP_K + place)
        rows = rows + (partial + pair * S * HIDDEN + c,)  # noqa: RUF005 (Triton's tuples know no stars)
        here = tl.load(on_gpu + pair, mask=pair >= 0, other=0)
        masks = masks + (here,)  # noqa: RUF005
    wait_and_release(PDL)
    for place in tl.static_range(TOP_K):
        for piece in tl.static_range(S):
            mine = ok & (((masks[place] >> piece) & 1) != 0)
            acc += tl.load(rows[place] + piece * HIDDEN, mask=mine, other=0.0)
    if HAS_CPU:
        waited = tl.load(counts + COUNT_CPU) > 0
        row = block + AT_OUT + token * HIDDEN + c
        acc += tl.load(row, mask=ok & waited, other=0.0, volatile=True)
    tl.store(out + token * HIDDEN + c, acc, mask=ok)


@triton.jit
def expert_await(
    counts, state, block, totals, AT_ACK: tl.constexpr, AT_ABORT: tl.constexpr,
    STATE_SEQ: tl.constexpr, STATE_FAILED: tl.constexpr, SPINS: tl.constexpr,
):  # fmt: skip
    """Wait until the CPU has answered this layer's request; one program of one warp.

    Ends at the latest after SPINS reads over PCIe (about a microsecond each), or when the abort word is
    set; then the failure is noted in the state, the abort word is set, and later waits end at once.
    """
    if tl.load(counts + COUNT_CPU) > 0:
        seq = tl.load(state + STATE_SEQ)
        spins = 0
        start = clock_ns()
        waiting = (tl.load(block + AT_ACK, volatile=True) != seq).to(tl.int32)
        stalled = waiting.to(tl.int64)
        while waiting != 0:
            spins += 1
            ack = tl.load(block + AT_ACK, volatile=True)
            abort = tl.load(block + AT_ABORT, volatile=True)
            waiting = ((ack != seq) & (abort == 0) & (spins < SPINS)).to(tl.int32)
        tl.store(totals + TOTAL_STALLS, tl.load(totals + TOTAL_STALLS) + stalled)
        spent = totals + TOTAL_STALL_NS
        tl.store(spent, tl.load(spent) + stalled * (clock_ns() - start))
        if tl.load(block + AT_ACK, volatile=True) != seq:
            tl.store(state + STATE_FAILED, 1)
            tl.store(block + AT_ABORT, 1)
