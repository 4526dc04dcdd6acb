"""The chosen experts of a decoding step: grouped matrix-vector products over slices in slots.

Work comes as device lists (``expert_plan``): an entry is a slice in a slot, with the range of pairs
(uses by tokens) that want it. The grids are fixed, programs take tiles of the entries until none is
left, and the number of entries is read on the device, so a captured graph serves every routing.

Three kernels: gate, up and activation (``*_gate_up``), down (``*_down``), which leaves one
partial result for each (pair, slice), and their sum for each token in a fixed order
(``expert_combine``), the CPU's part included. No atomics: the same placement gives the same bits.
Those of MXFP4 are in ``expert_loop`` and ``expert_halves``.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import COUNT_CPU, TOTAL_STALL_NS, TOTAL_STALLS
from headrace.ops.triton.expert_rows import bf16_rows, gated, store_partial
from headrace.ops.triton.overlap import release, wait, wait_and_release
from headrace.ops.triton.shared_words import clock_ns, host_word


@triton.jit
def _slot_of(arena, entries, entry, SLICE_NBYTES: tl.constexpr):
    return arena + tl.load(entries + entry * 4).to(tl.int64) * SLICE_NBYTES


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
    partial, pair_of, on_gpu, counts, block, residual, out, AT_OUT: tl.constexpr,
    TOP_K: tl.constexpr, S: tl.constexpr, HIDDEN: tl.constexpr, HAS_CPU: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum of its partial results, by place and slice, and of the CPU's row; then, with
    HAS_RESIDUAL, + residual[token]."""
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
    if HAS_RESIDUAL:
        acc += tl.load(residual + token * HIDDEN + c, mask=ok, other=0.0)
    tl.store(out + token * HIDDEN + c, acc, mask=ok)


@triton.jit
def expert_await(
    counts, state, block, totals, AT_ACK: tl.constexpr, AT_ABORT: tl.constexpr,
    STATE_SEQ: tl.constexpr, STATE_FAILED: tl.constexpr, SPINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait until the CPU has answered this layer's request; one program of one warp.

    Ends at the latest after SPINS reads over PCIe (about a microsecond each), or when the abort word is
    set; then the failure is noted in the state, the abort word is set, and later waits end at once.
    With PDL it begins to ask while the products before it run: an answer that is there costs nothing.
    """
    release(PDL)
    if tl.load(counts + COUNT_CPU) > 0:
        seq = tl.load(state + STATE_SEQ)
        spins = 0
        missing = (host_word(block + AT_ACK, 32) != seq).to(tl.int32)
        # What came before is done: from here on it is the CPU that is waited for.
        wait(PDL)
        start = clock_ns()
        stalled = missing.to(tl.int64)
        given_up = missing * 0
        while (missing != 0) & (given_up == 0):
            spins += 1
            missing = (host_word(block + AT_ACK, 32) != seq).to(tl.int32)
            abort = host_word(block + AT_ABORT, 32)
            given_up = ((abort != 0) | (spins >= SPINS)).to(tl.int32)
        tl.store(totals + TOTAL_STALLS, tl.load(totals + TOTAL_STALLS) + stalled)
        spent = totals + TOTAL_STALL_NS
        tl.store(spent, tl.load(spent) + stalled * (clock_ns() - start))
        if missing != 0:
            tl.store(state + STATE_FAILED, 1)
            tl.store(block + AT_ABORT, 1)
    else:
        wait(PDL)
