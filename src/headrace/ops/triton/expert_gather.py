"""Fetches: slices from pinned host slabs into slots, by plain loads from a fixed grid.

A copy engine cannot be told by the device what to copy; a kernel can, so that fetches are chosen inside
a captured graph. About 24 programs reach what PCIe 5 gives (2026-11-29, H200 machine: 51 GB/s of the
copy engine's 55), and they take as many multiprocessors from the hits.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import (
    COUNT_FETCHES,
    STATE_NEEDED,
    TOTAL_FETCH_NS,
    TOTAL_SENT_CHUNKS,
    TOTAL_USED_CHUNKS,
)
from headrace.ops.triton.shared_words import clock_ns


@triton.jit
def settle(
    arena, state, arrived, homes, totals, layer, program, num_programs, FIRST_SLOT: tl.constexpr,
    MAX_PREFETCH: tl.constexpr, PROGRAMS: tl.constexpr, SLICE_NBYTES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Move the chunks that were prefetched of slices with a home; count them all."""
    num_words: tl.constexpr = SLICE_NBYTES // 8
    num_chunks: tl.constexpr = (num_words + WORDS - 1) // WORDS
    if program == 0:
        _count_chunks(state, arrived, totals, MAX_PREFETCH, PROGRAMS, num_chunks)
    for g in range(program, MAX_PREFETCH * num_chunks, num_programs):
        place = g // num_chunks
        home = tl.load(homes + place)
        at = (g % num_chunks) * WORDS + tl.arange(0, WORDS)
        ok = (at < num_words) & (home >= 0) & (g // PROGRAMS < tl.load(arrived + g % PROGRAMS))
        source = arena + (FIRST_SLOT + layer % 2 * MAX_PREFETCH + place).to(tl.int64) * SLICE_NBYTES
        target = arena + home.to(tl.int64) * SLICE_NBYTES
        source = source.to(tl.pointer_type(tl.int64))
        target = target.to(tl.pointer_type(tl.int64))
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


@triton.jit
def expert_gather(
    bases, arena, fetches, counts, totals, origins, arrived, homes, state, layer, GATHERING: tl.constexpr,
    SLICE_NBYTES: tl.constexpr, HOST_NBYTES: tl.constexpr, WORDS: tl.constexpr,
    FIRST_SLOT: tl.constexpr, MAX_PREFETCH: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Copy every fetch of the layer. bases: int64 [L], addresses of the layers' first slabs; WORDS:
    8-byte words that a program moves at a time; SLICE_NBYTES: of a slot; HOST_NBYTES: of the layer's
    slices, which may be shorter.

    GATHERING programs share the work evenly, so the first one's time, which ``totals`` takes, is that of
    all. With MAX_PREFETCH, chunks that PROGRAMS have prefetched are left out (where those are as many as
    the gathering ones, what remains is evenly shared, too), and any programs after them move what has a
    home there: nothing reads it before the next step.
    """
    if MAX_PREFETCH > 0:  # noqa: SIM102 (one is known when the kernel is compiled)
        if tl.program_id(0) >= GATHERING:
            settle(
                arena, state, arrived, homes, totals, layer, tl.program_id(0) - GATHERING,
                tl.num_programs(0) - GATHERING, FIRST_SLOT, MAX_PREFETCH, PROGRAMS, SLICE_NBYTES, WORDS,
            )  # fmt: skip
            return
    start = clock_ns()
    num_words: tl.constexpr = SLICE_NBYTES // 8
    num_chunks: tl.constexpr = (num_words + WORDS - 1) // WORDS
    total = tl.load(counts + COUNT_FETCHES) * num_chunks
    base = tl.load(bases + layer)
    w = tl.arange(0, WORDS)
    for item in range(tl.program_id(0), total, GATHERING):
        entry = fetches + (item // num_chunks) * 4
        chunk = item % num_chunks
        at = chunk * WORDS + w
        ok = at < HOST_NBYTES // 8
        if MAX_PREFETCH > 0:
            place = tl.load(origins + item // num_chunks)
            g = tl.maximum(place, 0) * num_chunks + chunk
            ok = ok & ((place < 0) | (g // PROGRAMS >= tl.load(arrived + g % PROGRAMS)))
            home = tl.load(homes + place, mask=place >= 0, other=-1)
        # Slices are pages, so every address here is a multiple of 16 bytes.
        source = tl.multiple_of(base + tl.load(entry + 1).to(tl.int64) * HOST_NBYTES, 4096)
        source = source.to(tl.pointer_type(tl.int64))
        target = arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES
        target = target.to(tl.pointer_type(tl.int64))
        from_ = tl.max_contiguous(tl.multiple_of(source + at, 2), 2)
        value = tl.load(from_, mask=ok, other=0, eviction_policy="evict_first")
        tl.store(target + at, value, mask=ok)
        if MAX_PREFETCH > 0:
            target = arena + home.to(tl.int64) * SLICE_NBYTES
            tl.store(target.to(tl.pointer_type(tl.int64)) + at, value, mask=ok & (home >= 0))
    tl.debug_barrier()
    if (tl.program_id(0) == 0) & (total > 0):
        spent = totals + TOTAL_FETCH_NS
        tl.store(spent, tl.load(spent) + clock_ns() - start)
