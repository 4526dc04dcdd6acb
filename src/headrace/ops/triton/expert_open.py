"""Fetches that the CPU may still take: what the gather reads of it, tells it, and settles in the end.

The plan gives the CPU less than its share and leaves the last fetches *open*: the CPU's request names them,
too (``experts.request_block``), and the CPU takes them, from the last one back, as long as it would be done
before PCIe is. So both end together whatever their rates are in this layer. Only the CPU decides, and what it
has taken it never gives back: a slice that the gather has copied nevertheless is not computed here. Once the
CPU has closed the choice, one program of the gather writes it down for the kernels that follow.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import (
    COUNT_ADMITTED,
    COUNT_HERE,
    STATE_FAILED,
    host_word,
    host_word_of_warp,
)

CLOSED = tl.constexpr(128)
MOST_TAKEN = tl.constexpr(127)
SEQ_BITS = tl.constexpr(0xFFFFFF)
# Units of ``pace``, nanoseconds.
LEFT_NS = tl.constexpr(64.0)
SLICE_NS = tl.constexpr(32.0)
LARGEST = tl.constexpr(65535.0)


@triton.jit
def _concerns(word, seq):
    return ((word >> 8) & SEQ_BITS) == (seq & SEQ_BITS)


@triton.jit
def taken_now(block, seq, near, AT_TAKEN: tl.constexpr):
    """Open fetches that the CPU has taken as far as can be seen; 0 unless ``near``. Warps may disagree."""
    word = host_word_of_warp(block + AT_TAKEN, near.to(tl.int32))
    return tl.where(_concerns(word, seq), word & MOST_TAKEN, 0)


@triton.jit
def tell_pace(
    block, seq, spent_ns, copied, left, AT_PACE: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """``copied`` chunks of this program took ``spent_ns``; ``left`` are to come, the open ones included."""
    each = spent_ns.to(tl.float32) / copied.to(tl.float32)
    rest = tl.minimum(each * left.to(tl.float32) / LEFT_NS, LARGEST)
    whole = tl.minimum(each * (NUM_CHUNKS / PROGRAMS) / SLICE_NS, LARGEST)
    value = (seq.to(tl.int64) << 32) | (rest.to(tl.int64) << 16) | whole.to(tl.int64)
    # Written through: the CPU reads it while this kernel goes on.
    tl.store((block + AT_PACE).to(tl.pointer_type(tl.int64)), value, cache_modifier=".wt")


@triton.jit
def settle_open(
    block, state, counts, totals, fetches, slot_of, owner_of, on_gpu, layer, seq, wanted,
    AT_TAKEN: tl.constexpr, AT_ABORT: tl.constexpr, SPINS: tl.constexpr, E: tl.constexpr,
    S: tl.constexpr, SLOTS: tl.constexpr, OPEN: tl.constexpr, OPEN_POWER: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Wait until the CPU has closed the choice; then what it took is not computed here, and slots that were
    kept for it are empty. One program.

    Ends at the latest after SPINS reads, or when the abort word is set: then the step has failed.
    """
    word = host_word(block + AT_TAKEN, THREADS)
    spins = wanted * 0
    closed = (_concerns(word, seq) & ((word & CLOSED) != 0)).to(tl.int32)
    given_up = wanted * 0
    while (closed | given_up) == 0:
        spins += 1
        word = host_word(block + AT_TAKEN, THREADS)
        closed = (_concerns(word, seq) & ((word & CLOSED) != 0)).to(tl.int32)
        abort = host_word(block + AT_ABORT, THREADS)
        given_up = ((abort != 0) | (spins >= SPINS)).to(tl.int32)
    if closed == 0:
        tl.store(state + STATE_FAILED, 1)
        tl.store(block + AT_ABORT, 1)
    taken = tl.where(_concerns(word, seq), word & MOST_TAKEN, 0)
    if taken > 0:
        i = tl.arange(0, OPEN_POWER)
        mine = i < taken
        entry = fetches + (wanted - 1 - i) * 4
        slot = tl.load(entry, mask=mine, other=SLOTS)
        key = layer * (E * S) + tl.load(entry + 1, mask=mine, other=0)
        kept = mine & (slot < SLOTS)
        tl.store(slot_of + key, tl.full([OPEN_POWER], -1, tl.int32), mask=kept)
        tl.store(owner_of + slot, tl.full([OPEN_POWER], -1, tl.int32), mask=kept)
        undone = tl.sum(kept.to(tl.int32), 0)
        for number in tl.static_range(OPEN):
            if number < taken:
                own = fetches + (wanted - 1 - number) * 4
                others = ~(1 << (tl.load(own + 1) % S))
                first = tl.load(own + 2)
                for pair in range(first, first + tl.load(own + 3)):
                    tl.store(on_gpu + pair, tl.load(on_gpu + pair) & others)
                    tl.debug_barrier()  # the next slice may be of the same expert
        tl.store(counts + COUNT_HERE, wanted - taken)
        here = totals + COUNT_HERE
        tl.store(here, tl.load(here) - taken.to(tl.int64))
        tl.store(counts + COUNT_ADMITTED, tl.load(counts + COUNT_ADMITTED) - undone)
        admitted = totals + COUNT_ADMITTED
        tl.store(admitted, tl.load(admitted) - undone.to(tl.int64))
