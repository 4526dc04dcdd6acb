"""Prefetches: a layer's routing guessed before its attention, and slices sent on their way meanwhile.

``headrace.experts.plan_oracle`` says which slices (``foresee``) and what the plan makes of them. Two
small kernels choose, one copies until the plan is made, one moves what stays into the slot that the plan
gave it; all of them run beside the step's own work. Names are those of ``expert_plan``.

A prefetch never stands in a fetch's way for longer than a chunk of each program takes: programs look at
``STATE_PLANS`` after each chunk and end when the plan has been made. What has arrived by then is
counted for each program, so that the gather brings only the rest.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import (
    STATE_FORESEEN,
    STATE_NEEDED,
    STATE_NUM_FORESEEN,
    STATE_PLANS,
    TOTAL_PREFETCH_NS,
    TOTAL_SENT_CHUNKS,
    TOTAL_USED_CHUNKS,
    clock_ns,
)


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
def choose_prefetches(
    guesses, valid, slot_of, state, foreseen, place_of, arrived, layer,
    TOKENS: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    MAX_PREFETCH: tl.constexpr, PROGRAMS: tl.constexpr, HAS_VALID: tl.constexpr, N: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    """List what is missing of the guessed experts; one program. guesses: int32 [T, k], the surest
    first; valid: bytes [T], 0 for rows that are nobody's. N, SP: T * k and S rounded up."""
    uses: tl.constexpr = TOKENS * TOP_K
    i = tl.arange(0, N)
    # First choices of all tokens, then second ones.
    rank, token = i // TOKENS, i % TOKENS
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

    place = tl.arange(0, MAX_PREFETCH)
    old = tl.load(foreseen + place)
    was = place < tl.load(state + STATE_NUM_FORESEEN)
    tl.store(place_of + old, tl.full([MAX_PREFETCH], -1, tl.int32), mask=was)
    tl.debug_barrier()
    tl.store(foreseen + at, index, mask=chosen)
    tl.store(place_of + index, at, mask=chosen)
    tl.store(arrived + tl.arange(0, PROGRAMS), tl.zeros([PROGRAMS], tl.int32))
    tl.store(state + STATE_NUM_FORESEEN, tl.minimum(tl.sum(num_miss, 0), MAX_PREFETCH))
    tl.store(state + STATE_FORESEEN, tl.load(state + STATE_PLANS))


@triton.jit
def _plans_made(state, THREADS: tl.constexpr):
    """STATE_PLANS as it is now, the same for all THREADS of a program: warps that read it for themselves
    might disagree, and some would copy a part of a chunk that the others leave out."""
    each = tl.load(state + STATE_PLANS + tl.zeros([THREADS], tl.int32), volatile=True)
    return tl.max(each, 0)


@triton.jit
def expert_prefetch(
    bases, arena, foreseen, arrived, state, totals, layer, FIRST_SLOT: tl.constexpr,
    SLICE_NBYTES: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Copy the listed slices into their slots, chunk by chunk over all programs, until the plan is made.
    Chunk g of all is program g % programs' (``expert_gather`` counts on it)."""
    start = clock_ns()
    num_words: tl.constexpr = SLICE_NBYTES // 8
    num_chunks: tl.constexpr = (num_words + WORDS - 1) // WORDS
    total = tl.load(state + STATE_NUM_FORESEEN) * num_chunks
    expected = tl.load(state + STATE_FORESEEN)
    base = tl.load(bases + layer)
    w = tl.arange(0, WORDS)
    done = total * 0
    g = tl.program_id(0) + total * 0
    going = ((_plans_made(state, THREADS) == expected) & (g < total)).to(tl.int32)
    while going != 0:
        place = g // num_chunks
        at = (g % num_chunks) * WORDS + w
        ok = at < num_words
        source = base + tl.load(foreseen + place).to(tl.int64) * SLICE_NBYTES
        source = tl.multiple_of(source, 4096).to(tl.pointer_type(tl.int64))
        target = arena + (FIRST_SLOT + place).to(tl.int64) * SLICE_NBYTES
        target = target.to(tl.pointer_type(tl.int64))
        from_ = tl.max_contiguous(tl.multiple_of(source + at, 2), 2)
        value = tl.load(from_, mask=ok, other=0, eviction_policy="evict_first")
        tl.store(target + at, value, mask=ok)
        done += 1
        tl.store(arrived + tl.program_id(0), done)
        g += tl.num_programs(0)
        going = ((_plans_made(state, THREADS) == expected) & (g < total)).to(tl.int32)
    tl.debug_barrier()
    if (tl.program_id(0) == 0) & (done > 0):
        spent = totals + TOTAL_PREFETCH_NS
        tl.store(spent, tl.load(spent) + clock_ns() - start)


@triton.jit
def chunks_there(arrived, g, PROGRAMS: tl.constexpr):
    """Whether chunk(s) g of all prefetches have arrived; after ``expert_prefetch`` has ended."""
    return g // PROGRAMS < tl.load(arrived + g % PROGRAMS)


@triton.jit
def settle_prefetches(
    arena, state, arrived, homes, totals, FIRST_SLOT: tl.constexpr, MAX_PREFETCH: tl.constexpr,
    PROGRAMS: tl.constexpr, SLICE_NBYTES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """After the gather: move the prefetched slices that stay into the slots that the plan gave them.
    Programs: (MAX_PREFETCH, any). Nothing uses those slots before the next step."""
    num_words: tl.constexpr = SLICE_NBYTES // 8
    num_chunks: tl.constexpr = (num_words + WORDS - 1) // WORDS
    place = tl.program_id(0)
    if (place == 0) & (tl.program_id(1) == 0):
        _count_chunks(state, arrived, totals, MAX_PREFETCH, PROGRAMS, num_chunks)
    home = tl.load(homes + place)
    if home >= 0:
        source = arena + (FIRST_SLOT + place).to(tl.int64) * SLICE_NBYTES
        target = arena + home.to(tl.int64) * SLICE_NBYTES
        source = source.to(tl.pointer_type(tl.int64))
        target = target.to(tl.pointer_type(tl.int64))
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            at = chunk * WORDS + tl.arange(0, WORDS)
            ok = at < num_words
            tl.store(target + at, tl.load(source + at, mask=ok, other=0), mask=ok)


@triton.jit
def _count_chunks(
    state, arrived, totals, MAX_PREFETCH: tl.constexpr, PROGRAMS: tl.constexpr,
    SLICE_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add the chunks that have arrived to the totals, and those whose slices were computed."""
    program = tl.arange(0, PROGRAMS)
    there = tl.load(arrived + program)
    needed = tl.load(state + STATE_NEEDED)
    used = needed * 0
    for p in tl.static_range(MAX_PREFETCH):
        # Of program r's chunks r, r + PROGRAMS, ..., those below an end: (end - r) / PROGRAMS, rounded up.
        last = ((p + 1) * SLICE_CHUNKS - program + PROGRAMS - 1) // PROGRAMS
        first = (p * SLICE_CHUNKS - program + PROGRAMS - 1) // PROGRAMS
        first = tl.maximum(first, 0)
        mine = tl.minimum(there, tl.maximum(last, 0)) - tl.minimum(there, first)
        used += ((needed >> p) & 1) * tl.sum(mine, 0)
    sent = totals + TOTAL_SENT_CHUNKS
    tl.store(sent, tl.load(sent) + tl.sum(there, 0).to(tl.int64))
    useful = totals + TOTAL_USED_CHUNKS
    tl.store(useful, tl.load(useful) + used.to(tl.int64))
