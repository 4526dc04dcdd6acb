"""Around the grouped products: sorting pairs, work lists, what stays in the cache, the CPU's part."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.expert_keep import ASK_DEVICE
from headrace.ops.triton.expert_grouped import ENTRY

ASK = tl.constexpr(ASK_DEVICE)


@triton.jit(do_not_specialize=["num_tokens"])
def pair_keys(
    ids, weights, keys, merged, num_tokens,
    TOP_K: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What pairs are sorted by: the expert, or -1 for nothing.

    ids: int32, weights: float32, keys: int32, merged: float32, all [T, TOP_K]. An expert that a row
    names twice counts once, with both weights.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PLACES)[None, :]
    row = t < num_tokens
    inside = row[:, None] & (place < TOP_K)
    at = t[:, None] * TOP_K + place
    own = tl.load(ids + at, mask=inside, other=-1)
    total = tl.zeros([ROWS, PLACES], tl.float32)
    again = tl.zeros([ROWS, PLACES], tl.int32)
    for i in tl.static_range(TOP_K):
        other = tl.load(ids + t * TOP_K + i, mask=row, other=-1)
        weight = tl.load(weights + t * TOP_K + i, mask=row, other=0.0)
        same = other[:, None] == own
        total += tl.where(same, weight[:, None], 0.0)
        again += (same & (place > i)).to(tl.int32)
    used = (own >= 0) & (again == 0)
    tl.store(keys + at, tl.where(used, own, -1), mask=inside)
    tl.store(merged + at, total, mask=inside)


@triton.jit
def prepare_rows(x, out, HIDDEN: tl.constexpr, PACKED: tl.constexpr, COLS: tl.constexpr):
    """x, float32 [T, HIDDEN], as bfloat16; PACKED: even columns before the odd ones."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    value = tl.load(x + row + c, mask=c < HIDDEN, other=0.0).to(tl.bfloat16)
    target = (c % 2) * (HIDDEN // 2) + c // 2 if PACKED else c
    tl.store(out + row + target, value, mask=c < HIDDEN)


@triton.jit(do_not_specialize=["count"])
def copy_words(source, target, count, WORDS: tl.constexpr):
    """int32 words from pinned host memory: a copy engine would make them wait behind the ring's."""
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(target + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def _staying(entry, dest, mask):
    """Slots that entries are to stay in, -1: none. ASK: what ``dest`` says of the key."""
    to = tl.load(entry + 2, mask=mask, other=-1)
    asked = tl.load(dest + tl.load(entry + 1, mask=mask, other=0), mask=mask, other=-1)
    return tl.where(to == ASK, asked, to)


@triton.jit
def keep_slices(arena, work, dest, SLICE_NBYTES: tl.constexpr, WORDS: tl.constexpr):
    """Copy the entries of a work list that are to stay. dest: int32 [E * S], by key."""
    entry = work + tl.program_id(0) * ENTRY
    to = _staying(entry, dest, True)
    if to >= 0:
        source = (arena + tl.load(entry).to(tl.int64) * SLICE_NBYTES).to(tl.pointer_type(tl.int64))
        target = (arena + to.to(tl.int64) * SLICE_NBYTES).to(tl.pointer_type(tl.int64))
        num_words: tl.constexpr = SLICE_NBYTES // 8
        for start in range(tl.program_id(1) * WORDS, num_words, tl.num_programs(1) * WORDS):
            at = start + tl.arange(0, WORDS)
            tl.store(target + at, tl.load(source + at, mask=at < num_words), mask=at < num_words)


@triton.jit(do_not_specialize=["num_entries", "first_key"])
def keep_tables(work, num_entries, dest, slot_of, owner_of, first_key, BLOCK: tl.constexpr):
    """Enter what ``keep_slices`` copied into the cache's tables; the layer's keys from ``first_key``."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = work + number * ENTRY
    inside = number < num_entries
    to = _staying(entry, dest, inside)
    key = first_key + tl.load(entry + 1, mask=inside, other=0)
    stays = to >= 0
    old = tl.load(owner_of + to, mask=stays, other=-1)
    tl.store(slot_of + old, -1, mask=stays & (old >= 0))
    tl.store(slot_of + key, to, mask=stays)
    tl.store(owner_of + to, key, mask=stays)


@triton.jit(do_not_specialize=["seq"])
def await_answer(block, seq, AT_ACK: tl.constexpr, AT_ABORT: tl.constexpr, SPINS: tl.constexpr):
    """Wait until the CPU has answered request ``seq``; one program of one warp.

    block: int32, the request block. Ends at the latest after SPINS reads over PCIe or when the abort
    word is set; without an answer that word is set afterwards, and the step's end reports it.
    """
    spins = 0
    waiting = (tl.load(block + AT_ACK, volatile=True) != seq).to(tl.int32)
    while waiting != 0:
        spins += 1
        ack = tl.load(block + AT_ACK, volatile=True)
        abort = tl.load(block + AT_ABORT, volatile=True)
        waiting = ((ack != seq) & (abort == 0) & (spins < SPINS)).to(tl.int32)
    silent = tl.load(block + AT_ACK, volatile=True) != seq
    if silent & (tl.load(block + AT_ABORT, volatile=True) == 0):
        tl.store(block + AT_ABORT, 1)


@triton.jit(do_not_specialize=["count"])
def add_answer(block, out, count, AT_OUT: tl.constexpr, COLS: tl.constexpr):
    """out += the CPU's rows, float32 [count]. block: float32, the request block."""
    at = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = at < count
    answer = tl.load(block + AT_OUT + at, mask=inside, other=0.0, volatile=True)
    tl.store(out + at, tl.load(out + at, mask=inside, other=0.0) + answer, mask=inside)
