"""One layer's plan on the GPU: which experts are hits, what is fetched into which slot, what the CPU gets.

``headrace.experts.plan_oracle`` says in plain Python what these kernels decide; a property test holds
them to it. A layer is one small program, so that it runs inside a CUDA graph without the host:
T * k uses (at most 128) are compared with each other as matrices. Values are float32 without fused
multiply-adds (``enable_fp_fusion=False``), so that they have the bits of ``cache_policy``.

Device state, int32 unless said:

- ``slot_of`` [L * E * S], ``owner_of`` [slots], ``victims`` [slots], ``counters`` float32 [3, L * E],
  ``values`` float32 [L * E] (as of the step's begin, or of the use in this step), ``last_use`` [L * E]
  (a step's number), ``constants`` float32 [7 + L] (CONST_*), ``split`` [L, SPLIT = most missing + 1]
- ``scratch`` [2 * WINDOW + most fetches]: of a layer's victims the worth (bits) and the slot; what
  each fetch offers (bits)
- ``state`` [8]: STATE_*
- ``counts`` [8]: COUNT_*
- ``hits``, ``fetches`` [n, 4]: slot, expert * S + slice, first pair, pairs
- ``pair_token``, ``pair_weight`` float32, ``on_gpu`` (bit s: slice s is computed here) [T * k], by pair
- ``pair_of`` [T * k]: pair of each id, -1 for none
- ``totals`` int64 [11]: COUNT_*, summed over all layers and steps; COUNT_PAIRS counts plans; TOTAL_*

``block`` is the request block (``headrace.experts.request_block``) in pinned memory, as int32.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.overlap import wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

STATE_NOW = tl.constexpr(0)
STATE_CURSOR = tl.constexpr(1)
STATE_SEQ = tl.constexpr(2)
STATE_FAILED = tl.constexpr(3)  # not zero: the CPU did not answer
STATE_FREE = tl.constexpr(4)  # empty slots left: those at the cursor

CONST_DECAY = tl.constexpr(0)
CONST_FLOOR = tl.constexpr(3)
CONST_ADMISSION = tl.constexpr(6)
CONST_TURN = tl.constexpr(7)

INFINITY = tl.constexpr(0x7F800000)  # float32 bits; positive floats are ordered as their bits are
LAST_KEY = tl.constexpr((1 << 63) - 1)  # ranks behind every slot

COUNT_HITS = tl.constexpr(0)
COUNT_FETCHES = tl.constexpr(1)
COUNT_CPU = tl.constexpr(2)
COUNT_PAIRS = tl.constexpr(3)
COUNT_MISSING = tl.constexpr(4)
COUNT_ADMITTED = tl.constexpr(5)
# Of ``totals`` only, by other kernels: fetches' nanoseconds, waits for the CPU, their nanoseconds.
TOTAL_FETCH_NS = tl.constexpr(8)
TOTAL_STALLS = tl.constexpr(9)
TOTAL_STALL_NS = tl.constexpr(10)


@triton.jit
def fence_system():
    """Order this thread's memory operations before its later ones for the whole system."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def clock_ns():
    """The GPU's clock in nanoseconds, int64; 0 in the interpreter."""
    if INTERPRETED:
        return tl.zeros((), tl.int64)
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def _value(f0, f1, f2, constants):
    """v of three counters; the order of operations is part of the policy."""
    a = f0 + tl.load(constants + CONST_FLOOR)
    q = (f1 + tl.load(constants + CONST_FLOOR + 1)) * (f2 + tl.load(constants + CONST_FLOOR + 2))
    return a * q * q


@triton.jit
def expert_plan(
    ids_ptr, weights_ptr, slot_of, owner_of, counters, values, last_use, constants, victims, scratch,
    split, state, counts, hits, fetches, pair_token, pair_weight, pair_of, on_gpu, totals, block, layer,
    USES: tl.constexpr, TOP_K: tl.constexpr, L: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    SLOTS: tl.constexpr, MAX_FETCH: tl.constexpr, SPLIT: tl.constexpr, HAS_CPU: tl.constexpr,
    AT_HEADER: tl.constexpr, AT_ITEMS: tl.constexpr, AT_TOKEN: tl.constexpr,
    AT_WEIGHT: tl.constexpr, N: tl.constexpr, SP: tl.constexpr, FP: tl.constexpr,
    WINDOW: tl.constexpr, WP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Plan one layer; one program. ids int32, weights float32 [USES]; AT_*: int32 offsets in ``block``;
    N, SP, FP, WP: USES, S, MAX_FETCH and WINDOW rounded up to powers of two; CHUNK: slots of the
    ranking looked at together."""
    i = tl.arange(0, N)
    piece = tl.arange(0, SP)[None, :]
    # No release: early, what follows would take the registers that a fetch beside it needs.
    wait(PDL)
    e = tl.load(ids_ptr + i, mask=i < USES, other=-1)
    weight = tl.load(weights_ptr + i, mask=i < USES, other=0.0)
    valid = e >= 0
    now = tl.load(state + STATE_NOW)
    cursor = tl.load(state + STATE_CURSOR)
    free = tl.load(state + STATE_FREE)

    # Uses against uses: rows i, columns j.
    both = valid[:, None] & valid[None, :]
    same = both & (e[:, None] == e[None, :])
    earlier = same & (i[None, :] < i[:, None])
    num_earlier = tl.sum(earlier.to(tl.int32), 1)
    first = valid & (num_earlier == 0)
    less = both & (e[None, :] < e[:, None])
    first_pair = tl.sum(less.to(tl.int32), 1)
    num_pairs = tl.sum(same.to(tl.int32), 1)
    pair = first_pair + num_earlier
    firsts = first.to(tl.int32)[None, :] != 0
    less = less & firsts

    row = layer * E + e
    f0 = tl.load(counters + row, mask=valid, other=0.0) + 1.0
    f1 = tl.load(counters + L * E + row, mask=valid, other=0.0) + 1.0
    f2 = tl.load(counters + 2 * L * E + row, mask=valid, other=0.0) + 1.0
    renewed = _value(f0, f1, f2, constants)

    live = first[:, None] & (piece < S)
    slot = tl.load(slot_of + row[:, None] * S + piece, mask=live, other=0)
    hit = (live & (slot >= 0)).to(tl.int32)
    miss = (live & (slot < 0)).to(tl.int32)
    num_hit, num_miss = tl.sum(hit, 1), tl.sum(miss, 1)
    hit_at = tl.sum(tl.where(less, num_hit[None, :], 0), 1)[:, None] + tl.cumsum(hit, 1) - hit
    ahead = (renewed[None, :] > renewed[:, None]) | (
        (renewed[None, :] == renewed[:, None]) & (e[None, :] < e[:, None])
    )
    ahead = both & firsts & ahead
    miss_at = tl.sum(tl.where(ahead, num_miss[None, :], 0), 1)[:, None] + tl.cumsum(miss, 1) - miss
    missing = tl.sum(num_miss, 0)
    wanted = tl.minimum(tl.load(split + layer * SPLIT + missing), tl.minimum(missing, MAX_FETCH))
    fetch = ((miss != 0) & (miss_at < wanted)).to(tl.int32)
    cpu = miss - fetch
    num_cpu = tl.sum(cpu, 1)
    cpu_at = tl.sum(tl.where(less, num_cpu[None, :], 0), 1)[:, None] + tl.cumsum(cpu, 1) - cpu
    total_cpu = tl.sum(num_cpu, 0)
    total_hits = tl.sum(num_hit, 0)

    # All loads of the old tables are done by every thread before any thread writes.
    tl.debug_barrier()
    tl.store(counters + row, f0, mask=first)
    tl.store(counters + L * E + row, f1, mask=first)
    tl.store(counters + 2 * L * E + row, f2, mask=first)
    tl.store(values + row, renewed, mask=first)
    tl.store(last_use + row, now + tl.zeros_like(e), mask=first)
    index = e[:, None] * S + piece
    range_first = first_pair[:, None] + tl.zeros_like(index)
    range_count = num_pairs[:, None] + tl.zeros_like(index)
    _store_entry(hits, hit_at, slot, index, range_first, range_count, hit != 0)
    transit = SLOTS + miss_at
    _store_entry(fetches, miss_at, transit, index, range_first, range_count, fetch != 0)
    if MAX_FETCH > 0:
        offer = (renewed * tl.load(constants + CONST_ADMISSION)).to(tl.int32, bitcast=True)
        offer = offer[:, None] + tl.zeros_like(index)
        tl.store(scratch + 2 * WINDOW + miss_at, offer, mask=fetch != 0)

    mask_here = tl.sum((hit + fetch) << piece, 1)
    mask_of = tl.sum(tl.where(same & firsts, mask_here[None, :], 0), 1)
    tl.store(on_gpu + pair, mask_of, mask=valid)
    tl.store(pair_token + pair, i // TOP_K, mask=valid)
    tl.store(pair_weight + pair, weight, mask=valid)
    tl.store(pair_of + i, tl.where(valid, pair, -1), mask=i < USES)
    num_valid = tl.sum(valid.to(tl.int32), 0)
    if HAS_CPU:  # noqa: SIM102 (one is known when the kernel is compiled)
        if total_cpu > 0:
            items = block + AT_ITEMS + cpu_at * 4
            is_cpu = cpu != 0
            tl.store(items, e[:, None] + tl.zeros_like(index), mask=is_cpu)
            tl.store(items + 1, piece + tl.zeros_like(index), mask=is_cpu)
            tl.store(items + 2, range_first, mask=is_cpu)
            tl.store(items + 3, range_count, mask=is_cpu)
            tl.store(block + AT_TOKEN + pair, i // TOP_K, mask=valid)
            bits = weight.to(tl.int32, bitcast=True)
            tl.store(block + AT_WEIGHT + pair, bits, mask=valid)
            tl.store(block + AT_HEADER, layer)
            tl.store(block + AT_HEADER + 1, USES // TOP_K)
            tl.store(block + AT_HEADER + 2, total_cpu)
            tl.store(block + AT_HEADER + 3, num_valid)
            seq = tl.load(state + STATE_SEQ) + 1
            tl.store(state + STATE_SEQ, seq)
            tl.debug_barrier()
            fence_system()
            tl.store(block, seq)

    admitted = tl.minimum(free, wanted)
    if MAX_FETCH > 0:
        tl.debug_barrier()
        if admitted > 0:  # Empty slots lie at the cursor.
            each = tl.arange(0, FP)
            taken = tl.load(victims + cursor + each, mask=each < admitted, other=0)
            _move_in(slot_of, owner_of, fetches, each, taken, layer * (E * S), each < admitted)
            tl.store(state + STATE_FREE, free - admitted)
            tl.store(state + STATE_CURSOR, cursor + admitted)
        if wanted > admitted:
            found = _find_victims(
                owner_of, values, last_use, constants, victims, scratch, state, now, layer,
                cursor + admitted, L, E, S, SLOTS, WINDOW, CHUNK,
            )  # fmt: skip
            tl.debug_barrier()
            admitted = _admit(
                slot_of, owner_of, fetches, scratch, layer * (E * S), admitted, wanted, found,
                WINDOW, WP,
            )  # fmt: skip

    n = tl.arange(0, 8)
    values = tl.where(n == COUNT_HITS, total_hits, 0) + tl.where(n == COUNT_FETCHES, wanted, 0)
    values += tl.where(n == COUNT_CPU, total_cpu, 0) + tl.where(n == COUNT_MISSING, missing, 0)
    values += tl.where(n == COUNT_ADMITTED, admitted, 0)
    tl.store(counts + n, values + tl.where(n == COUNT_PAIRS, num_valid, 0))
    added = values + tl.where(n == COUNT_PAIRS, 1, 0)
    tl.store(totals + n, tl.load(totals + n) + added.to(tl.int64))


@triton.jit
def _store_entry(entries, at, slot, index, range_first, range_count, mask):
    tl.store(entries + at * 4, slot, mask=mask)
    tl.store(entries + at * 4 + 1, index, mask=mask)
    tl.store(entries + at * 4 + 2, range_first, mask=mask)
    tl.store(entries + at * 4 + 3, range_count, mask=mask)


@triton.jit
def _move_in(slot_of, owner_of, fetches, f, slot, first_key, mask):
    """Give the fetches ``f`` these slots to keep."""
    key = first_key + tl.load(fetches + f * 4 + 1, mask=mask, other=0)
    tl.store(fetches + f * 4, slot, mask=mask)
    tl.store(slot_of + key, slot, mask=mask)
    tl.store(owner_of + slot, key, mask=mask)


@triton.jit
def _find_victims(
    owner_of, values, last_use, constants, victims, scratch, state, now, layer, start,
    L: tl.constexpr, E: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write worth and slot of the ranking's first WINDOW slots whose experts were not used in this step,
    from place ``start`` on; returns how many there are.

    A slot whose owner changed belongs to an expert that was used, so owners need not be compared. The
    cursor goes to the first such slot: what lies before it is no victim for the rest of the step.
    """
    found = start * 0
    at = start + 0
    while (found < WINDOW) & (at < SLOTS):
        w = at + tl.arange(0, CHUNK)
        slot = tl.load(victims + w, mask=w < SLOTS, other=-1)
        owner = tl.load(owner_of + slot, mask=slot >= 0, other=-1)
        row = tl.maximum(owner, 0) // S
        live = (owner >= 0) & (tl.load(last_use + row, mask=owner >= 0, other=0) != now)
        distance = row // E - layer - 1
        distance = tl.where(distance < 0, distance + L, distance)
        turn = tl.load(constants + CONST_TURN + distance, mask=live, other=0.0)
        worth = tl.load(values + row, mask=live, other=0.0) * turn
        order = found + tl.cumsum(live.to(tl.int32), 0) - 1
        keep = live & (order < WINDOW)
        tl.store(scratch + order, worth.to(tl.int32, bitcast=True), mask=keep)
        tl.store(scratch + WINDOW + order, slot, mask=keep)
        tl.store(state + STATE_CURSOR + order, w, mask=keep & (order == 0))
        found += tl.sum(live.to(tl.int32), 0)
        at += CHUNK
    return tl.minimum(found, WINDOW)


@triton.jit
def _admit(
    slot_of, owner_of, fetches, scratch, first_key, first, wanted, found, WINDOW: tl.constexpr,
    WP: tl.constexpr,
):  # fmt: skip
    """Offer each fetch from ``first`` on the next victim by worth; returns the first one refused.

    The order by turn is never made: fetches fall in value and victims rise in worth, so all is over
    at the first refusal, and a victim is the smallest of WINDOW numbers in registers: two reductions
    and 48 instructions for each admission, of which a layer has three or four. Ranking 160 victims by
    comparison would be 65,536 of them each time, more than the rest of the kernel.
    """
    n = tl.arange(0, WP)
    inside = n < found
    bits = tl.load(scratch + n, mask=inside, other=INFINITY)
    given = tl.full([WP], -1, tl.int32)  # which fetch gets this victim's slot
    f = first + 0
    going = (f < wanted).to(tl.int32)
    while going != 0:
        offer = tl.load(scratch + 2 * WINDOW + f)
        lowest = tl.min(bits, 0)
        place = tl.min(tl.where(bits == lowest, n, WP), 0)  # the earlier in the ranking
        beats = (offer > lowest).to(tl.int32)
        mine = (n == place) & (beats != 0)
        given = tl.where(mine, f, given)
        bits = tl.where(mine, INFINITY, bits)
        f += beats
        going = beats & (f < wanted).to(tl.int32)
    moved = given >= 0
    slot = tl.load(scratch + WINDOW + n, mask=moved, other=0)
    old = tl.load(owner_of + slot, mask=moved, other=0)
    tl.store(slot_of + old, tl.full([WP], -1, tl.int32), mask=moved)
    _move_in(slot_of, owner_of, fetches, given, slot, first_key, moved)
    return f


@triton.jit
def begin_step(
    counters, values, constants, state, ROWS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Advance the clock, let all ROWS = L * E counters decay and value the experts anew; programs take
    CHUNK experts each."""
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ok = row < ROWS
    f0 = tl.load(counters + row, mask=ok, other=0.0) * tl.load(constants + CONST_DECAY)
    f1 = tl.load(counters + ROWS + row, mask=ok, other=0.0) * tl.load(constants + CONST_DECAY + 1)
    f2 = tl.load(counters + 2 * ROWS + row, mask=ok, other=0.0) * tl.load(
        constants + CONST_DECAY + 2
    )
    tl.store(counters + row, f0, mask=ok)
    tl.store(counters + ROWS + row, f1, mask=ok)
    tl.store(counters + 2 * ROWS + row, f2, mask=ok)
    tl.store(values + row, _value(f0, f1, f2, constants), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(state + STATE_NOW, tl.load(state + STATE_NOW) + 1)
        tl.store(state + STATE_CURSOR, 0)
        tl.store(state + STATE_FREE, 0)


@triton.jit
def _rank_key(owner_of, values, slot, S: tl.constexpr, SLOTS: tl.constexpr):
    """int64: empty slots first, by slot; then by (value, owner), as one comparison."""
    owner = tl.load(owner_of + slot, mask=slot < SLOTS, other=-1)
    value = tl.load(values + tl.maximum(owner, 0) // S, mask=owner >= 0, other=0.0)
    key = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | owner.to(tl.int64)
    key = tl.where(owner >= 0, key, slot.to(tl.int64) - SLOTS)
    return tl.where(slot < SLOTS, key, LAST_KEY), (slot < SLOTS) & (owner < 0)


@triton.jit
def rank_victims(
    owner_of, values, victims, state, S: tl.constexpr, SLOTS: tl.constexpr, MINE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Rank all slots by (value, owner): each program counts, for MINE slots, how many come before each.

    A sort in one program would have to hold thousands of slots; counting is SLOTS ** 2 comparisons
    spread over the whole GPU, right for any number of slots (indices are 32 bits). A comparison is six
    instructions with its share of the loads: by that count some 10 us on an H200 for 5,000 slots, and
    four times as many for 10,000.
    """
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    own, empty = _rank_key(owner_of, values, mine, S, SLOTS)
    before = tl.zeros([MINE, CHUNK], tl.int32)
    for start in range(0, SLOTS, CHUNK):
        other, _ = _rank_key(owner_of, values, start + tl.arange(0, CHUNK), S, SLOTS)
        before += (other[None, :] < own[:, None]).to(tl.int32)
    tl.store(victims + tl.sum(before, 1), mine, mask=mine < SLOTS)
    num_empty = tl.sum(empty.to(tl.int32), 0)
    if num_empty > 0:
        tl.atomic_add(state + STATE_FREE, num_empty)
