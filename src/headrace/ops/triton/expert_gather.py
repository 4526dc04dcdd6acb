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

from headrace.ops.triton.expert_plan import COUNT_FETCHES, TOTAL_FETCH_NS, clock_ns


@triton.jit
def expert_gather(
    bases, arena, fetches, counts, totals, layer, SLICE_NBYTES: tl.constexpr,
    SLOT_NBYTES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy every fetch of the layer. bases: int64 [L], addresses of the layers' first slabs; WORDS:
    8-byte words that a program moves at a time; SLICE_NBYTES: of the layer's slices. Any grid. All
    programs share the work evenly, so the first one's time, which ``totals`` takes, is that of all."""
    start = clock_ns()
    num_words: tl.constexpr = SLICE_NBYTES // 8
    num_chunks: tl.constexpr = (num_words + WORDS - 1) // WORDS
    total = tl.load(counts + COUNT_FETCHES) * num_chunks
    base = tl.load(bases + layer)
    w = tl.arange(0, WORDS)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = fetches + (item // num_chunks) * 4
        at = (item % num_chunks) * WORDS + w
        ok = at < num_words
        # Slices are pages, so every address here is a multiple of 16 bytes.
        source = tl.multiple_of(base + tl.load(entry + 1).to(tl.int64) * SLICE_NBYTES, 4096)
        source = source.to(tl.pointer_type(tl.int64))
        target = arena + tl.load(entry).to(tl.int64) * SLOT_NBYTES
        target = target.to(tl.pointer_type(tl.int64))
        from_ = tl.max_contiguous(tl.multiple_of(source + at, 2), 2)
        value = tl.load(from_, mask=ok, other=0, eviction_policy="evict_first")
        tl.store(target + at, value, mask=ok)
    tl.debug_barrier()
    if (tl.program_id(0) == 0) & (total > 0):
        spent = totals + TOTAL_FETCH_NS
        tl.store(spent, tl.load(spent) + clock_ns() - start)
