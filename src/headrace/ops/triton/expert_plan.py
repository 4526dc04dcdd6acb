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
- ``state`` [9]: STATE_*
- ``counts`` [8]: COUNT_*
- ``hits``, ``fetches`` [n, 4]: slot, expert * S + slice, first pair, pairs
- ``pair_token``, ``pair_weight`` float32, ``on_gpu`` (bit s: slice s is computed here) [T * k], by pair
- ``pair_of`` [T * k]: pair of each id, -1 for none
- ``totals`` int64 [14]: COUNT_*, summed over all layers and steps; COUNT_PAIRS counts plans; TOTAL_*
- of prefetches (``expert_foresight``): ``foreseen`` [PROGRAMS, MAX_PREFETCH], the rows alike
  (expert * S + slice, in order), ``place_of`` [E * S] (where a slice stands in it, -1 if nowhere),
  ``arrived`` [PROGRAMS] (chunks that each program has copied), ``homes`` [MAX_PREFETCH] (slot that
  keeps it, -1 for none); ``origins`` [most fetches] (each fetch's place in ``foreseen``, -1 for none)

``block`` is the request block (``headrace.experts.request_block``) in pinned memory, as int32.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.overlap import wait
from headrace.ops.triton.shared_words import fence_system, seen_by_all

STATE_NOW = tl.constexpr(0)
STATE_CURSOR = tl.constexpr(1)
STATE_SEQ = tl.constexpr(2)
STATE_FAILED = tl.constexpr(3)  # not zero: the CPU did not answer
STATE_FREE = tl.constexpr(4)  # empty slots left: those at the cursor
STATE_PLANNED = tl.constexpr(5)  # 1 + layer of the last plan, 0 when a step begins; ends prefetches
STATE_FORESEEN = tl.constexpr(
    6
)  # 1 + layer that prefetches were chosen for, 0 if its plan was made
STATE_NUM_FORESEEN = tl.constexpr(7)
STATE_NEEDED = tl.constexpr(8)  # of the last plan: bit p, the prefetch of place p is computed

CONST_DECAY = tl.constexpr(0)
CONST_FLOOR = tl.constexpr(3)
CONST_ADMISSION = tl.constexpr(6)
CONST_TURN = tl.constexpr(7)

INFINITY = tl.constexpr(0x7F800000)  # float32 bits; positive floats are ordered as their bits are

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
# By ``expert_foresight``: prefetched chunks, those of them that were needed, nanoseconds.
TOTAL_SENT_CHUNKS = tl.constexpr(11)
TOTAL_USED_CHUNKS = tl.constexpr(12)
TOTAL_PREFETCH_NS = tl.constexpr(13)


@triton.jit
def value_of(f0, f1, f2, constants):
    """v of three counters; the order of operations is part of the policy."""
    a = f0 + tl.load(constants + CONST_FLOOR)
    q = (f1 + tl.load(constants + CONST_FLOOR + 1)) * (f2 + tl.load(constants + CONST_FLOOR + 2))
    return a * q * q


@triton.jit
def expert_plan(
    ids_ptr, weights_ptr, slot_of, owner_of, counters, values, last_use, constants, victims, scratch,
    split, state, counts, hits, fetches, pair_token, pair_weight, pair_of, on_gpu, totals, place_of,
    arrived, origins, homes, block, layer,
    USES: tl.constexpr, TOP_K: tl.constexpr, L: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    SLOTS: tl.constexpr, MAX_FETCH: tl.constexpr, SPLIT: tl.constexpr, HAS_CPU: tl.constexpr,
    AT_HEADER: tl.constexpr, AT_ITEMS: tl.constexpr, AT_TOKEN: tl.constexpr,
    AT_WEIGHT: tl.constexpr, N: tl.constexpr, SP: tl.constexpr, FP: tl.constexpr,
    WINDOW: tl.constexpr, WP: tl.constexpr, CHUNK: tl.constexpr, MAX_PREFETCH: tl.constexpr,
    PROGRAMS: tl.constexpr, SLICE_CHUNKS: tl.constexpr, THREADS: tl.constexpr, NUMBERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Plan one layer; one program. ids int32, weights float32 [USES]; AT_*: int32 offsets in ``block``;
    N, SP, FP, WP: USES, S, MAX_FETCH and WINDOW rounded up to powers of two; CHUNK: slots of the
    ranking looked at together; PROGRAMS prefetch in chunks, SLICE_CHUNKS a slice; NUMBERED: x has a
    number (``expert_prepare``)."""
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
    renewed = value_of(f0, f1, f2, constants)

    live = first[:, None] & (piece < S)
    slot = tl.load(slot_of + row[:, None] * S + piece, mask=live, other=0)
    hit = (live & (slot >= 0)).to(tl.int32)
    miss = (live & (slot < 0)).to(tl.int32)
    num_hit, num_miss = tl.sum(hit, 1), tl.sum(miss, 1)
    place = tl.full([N, SP], -1, tl.int32)
    needed = tl.sum(num_miss, 0) * 0  # bit p: the prefetched slice of place p is missing
    ahead_of = tl.sum(num_hit, 0) * 0  # slices' worth of them that is there
    if MAX_PREFETCH > 0:
        due = seen_by_all(state + STATE_FORESEEN, THREADS) == layer + 1
        where_ = place_of + e[:, None] * S + piece
        place = tl.load(where_, mask=(miss != 0) & due, other=-1, volatile=True)
        needed = tl.sum(tl.sum(tl.where(place >= 0, 1 << place, 0), 1), 0)
        # The counts grow meanwhile: one thread reads each, so that all agree.
        thread = tl.arange(0, THREADS)
        counts_now = tl.load(arrived + thread, mask=thread < PROGRAMS, other=0, volatile=True)
        ahead_of = _slices_ahead(needed, tl.sum(counts_now, 0), MAX_PREFETCH, SLICE_CHUNKS)
    foreseen = (place >= 0).to(tl.int32)
    num_plain = num_miss - tl.sum(foreseen, 1)
    hit_at = tl.sum(tl.where(less, num_hit[None, :], 0), 1)[:, None] + tl.cumsum(hit, 1) - hit
    ahead = (renewed[None, :] > renewed[:, None]) | (
        (renewed[None, :] == renewed[:, None]) & (e[None, :] < e[:, None])
    )
    ahead = both & firsts & ahead
    plain = miss - foreseen
    miss_at = tl.sum(tl.where(ahead, num_plain[None, :], 0), 1)[:, None] + tl.cumsum(plain, 1)
    miss_at += _ones_below(needed, MAX_PREFETCH) - plain
    for p in tl.static_range(MAX_PREFETCH):
        miss_at = tl.where(place == p, _ones_below(needed, p), miss_at)
    missing = tl.sum(num_miss, 0)
    wanted = tl.load(split + layer * SPLIT + missing - ahead_of) + ahead_of
    wanted = tl.minimum(wanted, tl.minimum(missing, MAX_FETCH))
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
    ahead_slot = MAX_FETCH + layer % 2 * MAX_PREFETCH + place
    transit = SLOTS + tl.where(place >= 0, ahead_slot, miss_at)
    _store_entry(fetches, miss_at, transit, index, range_first, range_count, fetch != 0)
    if MAX_FETCH > 0:
        offer = (renewed * tl.load(constants + CONST_ADMISSION)).to(tl.int32, bitcast=True)
        offer = offer[:, None] + tl.zeros_like(index)
        tl.store(scratch + 2 * WINDOW + miss_at, offer, mask=fetch != 0)
        tl.store(origins + miss_at, place, mask=fetch != 0)
    if MAX_PREFETCH > 0:
        each_place = tl.arange(0, MAX_PREFETCH)
        tl.store(homes + each_place, tl.full([MAX_PREFETCH], -1, tl.int32))
        computed = tl.where((place >= 0) & (fetch != 0), 1 << place, 0)
        tl.store(state + STATE_NEEDED, tl.sum(tl.sum(computed, 1), 0))

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
            number = now * L + layer + 1 if NUMBERED else now * 0
            tl.store(block + AT_HEADER + 4, number)
            seq = tl.load(state + STATE_SEQ) + 1
            tl.store(state + STATE_SEQ, seq)
            tl.debug_barrier()
            fence_system()
            tl.store(block, seq)

    if MAX_PREFETCH > 0:
        # Prefetches end now: their last chunks arrive while the rest of the plan is made. (Told at its end,
        # they kept the gather waiting for 12 us; H200, 2026-11-30.)
        tl.store(state + STATE_FORESEEN, 0)
        tl.store(state + STATE_PLANNED, layer + 1)
    admitted = tl.minimum(free, wanted)
    if MAX_FETCH > 0:
        tl.debug_barrier()
        if admitted > 0:  # Empty slots lie at the cursor.
            each = tl.arange(0, FP)
            taken = tl.load(victims + cursor + each, mask=each < admitted, other=0)
            _move_in(
                slot_of, owner_of, fetches, origins, homes, each, taken, layer * (E * S),
                each < admitted,
            )  # fmt: skip
            tl.store(state + STATE_FREE, free - admitted)
            tl.store(state + STATE_CURSOR, cursor + admitted)
        if wanted > admitted:
            found = _find_victims(
                owner_of, values, last_use, constants, victims, scratch, state, now, layer,
                cursor + admitted, L, E, S, SLOTS, WINDOW, CHUNK,
            )  # fmt: skip
            tl.debug_barrier()
            admitted = _admit(
                slot_of, owner_of, fetches, origins, homes, scratch, layer * (E * S), admitted,
                wanted, _ones_below(needed, MAX_PREFETCH), found, WINDOW, WP,
            )  # fmt: skip

    n = tl.arange(0, 8)
    values = tl.where(n == COUNT_HITS, total_hits, 0) + tl.where(n == COUNT_FETCHES, wanted, 0)
    values += tl.where(n == COUNT_CPU, total_cpu, 0) + tl.where(n == COUNT_MISSING, missing, 0)
    values += tl.where(n == COUNT_ADMITTED, admitted, 0)
    tl.store(counts + n, values + tl.where(n == COUNT_PAIRS, num_valid, 0))
    added = values + tl.where(n == COUNT_PAIRS, 1, 0)
    tl.store(totals + n, tl.load(totals + n) + added.to(tl.int64))


@triton.jit
def _ones_below(bits, place: tl.constexpr):
    """How many of the lowest ``place`` bits are set."""
    count = bits * 0
    for p in tl.static_range(place):
        count += (bits >> p) & 1
    return count


@triton.jit
def _slices_ahead(needed, sent, MAX_PREFETCH: tl.constexpr, SLICE_CHUNKS: tl.constexpr):
    """How many slices' worth of the needed prefetches is among the first ``sent`` chunks, rounded."""
    chunks = needed * 0
    for p in tl.static_range(MAX_PREFETCH):
        there = tl.minimum(tl.maximum(sent - p * SLICE_CHUNKS, 0), SLICE_CHUNKS)
        chunks += ((needed >> p) & 1) * there
    return (chunks + SLICE_CHUNKS // 2) // SLICE_CHUNKS


@triton.jit
def _store_entry(entries, at, slot, index, range_first, range_count, mask):
    tl.store(entries + at * 4, slot, mask=mask)
    tl.store(entries + at * 4 + 1, index, mask=mask)
    tl.store(entries + at * 4 + 2, range_first, mask=mask)
    tl.store(entries + at * 4 + 3, range_count, mask=mask)


@triton.jit
def _move_in(slot_of, owner_of, fetches, origins, homes, f, slot, first_key, mask):
    """Give the fetches ``f`` these slots to keep; what was prefetched moves there later."""
    key = first_key + tl.load(fetches + f * 4 + 1, mask=mask, other=0)
    place = tl.load(origins + f, mask=mask, other=-1)
    tl.store(fetches + f * 4, slot, mask=mask & (place < 0))
    tl.store(homes + place, slot, mask=mask & (place >= 0))
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
    slot_of, owner_of, fetches, origins, homes, scratch, first_key, first, wanted,
    num_foreseen, found, WINDOW: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Offer each fetch from ``first`` on the next victim by worth; returns how many now have a slot.

    The order by turn is never made: fetches fall in value, apart from the ``num_foreseen`` first, and
    victims rise in worth, so all is over at the first refusal after those, and a victim is the smallest
    of WINDOW numbers in registers, worth and place in one: one reduction for each admission, of which a
    layer has four or five. Ranking 160 victims by comparison would be 65,536 of them each time, more
    than the rest of the kernel.
    """
    n = tl.arange(0, WP)
    inside = n < found
    bits = tl.load(scratch + n, mask=inside, other=INFINITY)
    key = (bits.to(tl.int64) << 32) | n.to(tl.int64)  # the earlier in the ranking among equals
    gone = (tl.zeros([WP], tl.int64) + INFINITY) << 32
    given = tl.full([WP], -1, tl.int32)  # which fetch gets this victim's slot
    f = first + 0
    taken = first + 0
    going = (f < wanted).to(tl.int32)
    while going != 0:
        offer = tl.load(scratch + 2 * WINDOW + f)
        least = tl.min(key, 0)
        beats = (offer > (least >> 32).to(tl.int32)).to(tl.int32)
        mine = (key == least) & (beats != 0)
        given = tl.where(mine, f, given)
        key = tl.where(mine, gone, key)
        taken += beats
        going = beats | (f < num_foreseen).to(tl.int32)
        f += going
        going = going & (f < wanted).to(tl.int32)
    moved = given >= 0
    slot = tl.load(scratch + WINDOW + n, mask=moved, other=0)
    old = tl.load(owner_of + slot, mask=moved, other=0)
    tl.store(slot_of + old, tl.full([WP], -1, tl.int32), mask=moved)
    _move_in(slot_of, owner_of, fetches, origins, homes, given, slot, first_key, moved)
    return taken
