"""Prefetches: a layer's routing guessed before its attention, and slices sent on their way meanwhile.

``headrace.experts.plan_oracle`` says which slices (``foresee``) and what the plan makes of them. One
kernel asks the router, one chooses and copies until the plan is made; both run beside the step's own
work. Names are those of ``expert_plan``.

A prefetch never stands in a fetch's way for longer than a chunk of each program takes: programs look at
``STATE_PLANNED`` after each chunk and end when the plan has been made. What has arrived by then is
counted for each program, so that the gather brings only the rest. Nobody waits for the choice, either: a
plan that comes before it knows of no prefetch.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import (
    STATE_FORESEEN,
    STATE_NUM_FORESEEN,
    STATE_PLANNED,
    TOTAL_PREFETCH_NS,
)
from headrace.ops.triton.shared_words import clock_ns, fence_system, seen_by_all

LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def guess_logits(
    x, scale, weight, bias, logits, stride, num_experts, eps,
    COLS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Router logits of rmsnorm(x) * scale, float32 [T, E]; programs: (experts / ROWS, T).

    Every program adds up x's squares for itself: a kernel for the norm alone would take as long again.
    """
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_experts
    squares = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.static_range(0, COLS, TILE):
        k = start + tl.arange(0, TILE)
        value = tl.load(x + token * COLS + k, mask=k < COLS, other=0.0)
        factor = tl.load(scale + k, mask=k < COLS, other=0.0)
        at = row.to(tl.int64)[:, None] * stride + k[None, :]
        w = tl.load(weight + at, mask=inside[:, None] & (k < COLS)[None, :], other=0.0)
        squares += value * value
        acc += w.to(tl.float32) * (value * factor)[None, :]
    y = tl.sum(acc, 1) / tl.sqrt(tl.sum(squares, 0) / COLS + eps)
    if HAS_BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0)
    tl.store(logits + token * num_experts + row, y, mask=inside)


@triton.jit
def _surest(logits, e, i, TOP_K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr):
    """``e`` with its first TOP_K elements the experts of the largest logits, smaller ones among equals."""
    expert = tl.arange(0, EP)
    bits = tl.load(logits + expert, mask=expert < E, other=0.0).to(tl.int32, bitcast=True)
    # Ordered as the floats are, with the expert below, so that one maximum finds both.
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = tl.where(expert < E, (order << 32) | (E - 1 - expert).to(tl.int64), LEAST)
    for j in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        winner = E - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        key = tl.where(expert == winner, LEAST, key)
        e = tl.where(i == j, winner, e)
    return e


@triton.jit
def expert_prefetch(
    logits, guesses, valid, slot_of, state, foreseen, place_of, arrived, bases, arena, totals, layer,
    TOKENS: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    MAX_PREFETCH: tl.constexpr, HAS_VALID: tl.constexpr, N: tl.constexpr, SP: tl.constexpr,
    EP: tl.constexpr, FIRST_SLOT: tl.constexpr, SLICE_NBYTES: tl.constexpr,
    HOST_NBYTES: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """List what is missing of the guessed experts, then copy it until the layer's plan is made.

    guesses: int32 [T, k], the surest first; of one token they are found here, from ``logits`` [1, E].
    valid: bytes [T], 0 for rows that are nobody's. N, SP, EP: T * k, S and E rounded up. All programs
    make the same list, each in a row of ``foreseen``; the first publishes its own. Chunk g of all is
    program g % programs' (``expert_gather`` counts on it). SLICE_NBYTES: of a slot; HOST_NBYTES: of the
    layer's slices, which may be shorter.
    """
    start = clock_ns()
    program = tl.program_id(0)
    uses: tl.constexpr = TOKENS * TOP_K
    i = tl.arange(0, N)
    # First choices of all tokens, then second ones.
    rank, token = i // TOKENS, i % TOKENS
    if TOKENS == 1:
        e = _surest(logits, tl.full([N], -1, tl.int32), i, TOP_K, E, EP)
    else:
        e = tl.load(guesses + token * TOP_K + rank, mask=i < uses, other=-1)
    if HAS_VALID:
        e = tl.where(tl.load(valid + token, mask=i < uses, other=0) != 0, e, -1)
    known = e >= 0
    before = known[:, None] & known[None, :] & (i[None, :] < i[:, None])
    again = tl.sum((before & (e[:, None] == e[None, :])).to(tl.int32), 1) > 0
    first = known & ~again
    piece = tl.arange(0, SP)[None, :]
    index = e[:, None] * S + piece
    live = first[:, None] & (piece < S)
    slot = tl.load(slot_of + layer * (E * S) + index, mask=live, other=0)
    miss = (live & (slot < 0)).to(tl.int32)
    num_miss = tl.sum(miss, 1)
    at = tl.sum(tl.where(before, num_miss[None, :], 0), 1)[:, None] + tl.cumsum(miss, 1) - miss
    chosen = (miss != 0) & (at < MAX_PREFETCH)
    count = tl.minimum(tl.sum(num_miss, 0), MAX_PREFETCH)

    own = foreseen + program * MAX_PREFETCH
    place = tl.arange(0, MAX_PREFETCH)
    if program == 0:
        old = tl.load(own + place)
        was = place < tl.load(state + STATE_NUM_FORESEEN)
        tl.store(place_of + old, tl.full([MAX_PREFETCH], -1, tl.int32), mask=was)
    tl.store(arrived + program, 0)
    tl.debug_barrier()
    tl.store(own + at, index, mask=chosen)
    if program == 0:
        tl.store(place_of + index, at, mask=chosen)
        tl.store(state + STATE_NUM_FORESEEN, count)
        tl.debug_barrier()
        fence_system()
        tl.store(state + STATE_FORESEEN, layer + 1)
    tl.debug_barrier()

    num_words: tl.constexpr = SLICE_NBYTES // 8
    num_chunks: tl.constexpr = (num_words + WORDS - 1) // WORDS
    total = count * num_chunks
    base = tl.load(bases + layer)
    w = tl.arange(0, WORDS)
    done = count * 0
    g = program + count * 0
    going = ((seen_by_all(state + STATE_PLANNED, THREADS) != layer + 1) & (g < total)).to(tl.int32)
    while going != 0:
        item = g // num_chunks
        word = (g % num_chunks) * WORDS + w
        ok = word < HOST_NBYTES // 8
        source = base + tl.load(own + item).to(tl.int64) * HOST_NBYTES
        source = tl.multiple_of(source, 4096).to(tl.pointer_type(tl.int64))
        target = arena + (FIRST_SLOT + layer % 2 * MAX_PREFETCH + item).to(tl.int64) * SLICE_NBYTES
        target = target.to(tl.pointer_type(tl.int64))
        from_ = tl.max_contiguous(tl.multiple_of(source + word, 2), 2)
        value = tl.load(from_, mask=ok, other=0, eviction_policy="evict_first")
        tl.store(target + word, value, mask=ok)
        done += 1
        tl.store(arrived + program, done)
        g += tl.num_programs(0)
        planned = seen_by_all(state + STATE_PLANNED, THREADS)
        going = ((planned != layer + 1) & (g < total)).to(tl.int32)
    tl.debug_barrier()
    if (program == 0) & (done > 0):
        spent = totals + TOTAL_PREFETCH_NS
        tl.store(spent, tl.load(spent) + clock_ns() - start)
