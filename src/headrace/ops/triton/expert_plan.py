"""One layer's plan on the GPU: which experts are hits, what is fetched into which slot, what the CPU gets.

``headrace.experts.plan_oracle`` says in plain Python what these kernels decide; a property test holds
them to it. Everything is one small program, so that it runs inside a CUDA graph without the host:
T * k uses (at most 128) are compared with each other as matrices.

Device state, int32 unless said:

- ``slot_of`` [L * E * S], ``owner_of`` [slots], ``victims`` [slots], ``score`` float32 [L * E],
  ``last_use`` [L * E], ``decay`` float32 [D], ``split`` [L, SPLIT = most missing + 1]
- ``state`` [4]: STATE_*
- ``counts`` [8]: COUNT_*
- ``hits``, ``fetches`` [n, 4]: slot, expert * S + slice, first pair, pairs
- ``pair_token``, ``pair_weight`` float32, ``on_gpu`` (bit s: slice s is computed here) [T * k], by pair
- ``pair_of`` [T * k]: pair of each id, -1 for none
- ``totals`` int64 [8]: COUNT_*, summed over all layers and steps; COUNT_PAIRS counts plans

``block`` is the request block (``headrace.experts.request_block``) in pinned memory, as int32.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

STATE_NOW = tl.constexpr(0)
STATE_CURSOR = tl.constexpr(1)
STATE_SEQ = tl.constexpr(2)
STATE_FAILED = tl.constexpr(3)  # not zero: the CPU did not answer

COUNT_HITS = tl.constexpr(0)
COUNT_FETCHES = tl.constexpr(1)
COUNT_CPU = tl.constexpr(2)
COUNT_PAIRS = tl.constexpr(3)
COUNT_MISSING = tl.constexpr(4)
COUNT_ADMITTED = tl.constexpr(5)


@triton.jit
def fence_system():
    """Order this thread's memory operations before its later ones for the whole system."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def expert_plan(
    ids_ptr, weights_ptr, slot_of, owner_of, score, last_use, decay, victims, split, state,
    counts, hits, fetches, pair_token, pair_weight, pair_of, on_gpu, totals, block, layer,
    USES: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    SLOTS: tl.constexpr, MAX_FETCH: tl.constexpr, DECAY: tl.constexpr, SPLIT: tl.constexpr,
    HAS_CPU: tl.constexpr,
    AT_HEADER: tl.constexpr, AT_ITEMS: tl.constexpr, AT_TOKEN: tl.constexpr,
    AT_WEIGHT: tl.constexpr, N: tl.constexpr, SP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Plan one layer; one program. ids int32, weights float32 [USES]; AT_*: int32 offsets in ``block``;
    N, SP: USES and S rounded up to powers of two."""
    i = tl.arange(0, N)
    piece = tl.arange(0, SP)[None, :]
    e = tl.load(ids_ptr + i, mask=i < USES, other=-1)
    weight = tl.load(weights_ptr + i, mask=i < USES, other=0.0)
    valid = e >= 0
    now = tl.load(state + STATE_NOW)
    cursor = tl.load(state + STATE_CURSOR)

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
    age = tl.minimum(now - tl.load(last_use + row, mask=valid, other=0), DECAY - 1)
    renewed = tl.load(score + row, mask=valid, other=0.0) * tl.load(decay + age) + 1.0

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
    tl.store(score + row, renewed, mask=first)
    tl.store(last_use + row, now + tl.zeros_like(e), mask=first)
    index = e[:, None] * S + piece
    range_first = first_pair[:, None] + tl.zeros_like(index)
    range_count = num_pairs[:, None] + tl.zeros_like(index)
    _store_entry(hits, hit_at, slot, index, range_first, range_count, hit != 0)
    transit = SLOTS + miss_at
    _store_entry(fetches, miss_at, transit, index, range_first, range_count, fetch != 0)

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

    # The f-th fetch is offered the f-th slot of the ranking that nobody of this layer owns.
    tl.debug_barrier()
    w = tl.arange(0, WINDOW)
    victim = tl.load(victims + cursor + w, mask=cursor + w < SLOTS, other=-1)
    owner = tl.load(owner_of + victim, mask=victim >= 0, other=-1)
    owner_row = tl.maximum(owner, 0) // S
    owner_expert = tl.where(owner_row // E == layer, owner_row % E, -1)
    users = tl.sum(((owner_expert[:, None] == e[None, :]) & valid[None, :]).to(tl.int32), 1)
    offered = (victim >= 0) & ((owner < 0) | (users == 0))
    f = tl.cumsum(offered.to(tl.int32), 0) - 1
    offered = offered & (f < wanted)
    owned = offered & (owner >= 0)
    old_age = tl.minimum(now - tl.load(last_use + owner_row, mask=owned, other=0), DECAY - 1)
    worth = tl.load(score + owner_row, mask=owned, other=0.0) * tl.load(decay + old_age)
    worth = tl.where(owned, worth, -1.0)
    newcomer = tl.load(fetches + f * 4 + 1, mask=offered, other=0)
    new_worth = tl.load(score + layer * E + newcomer // S, mask=offered, other=0.0)
    admit = offered & (new_worth > worth)
    tl.store(fetches + f * 4, victim, mask=admit)
    tl.store(slot_of + owner, tl.full([WINDOW], -1, tl.int32), mask=admit & (owner >= 0))
    new_key = layer * (E * S) + newcomer
    tl.store(slot_of + new_key, victim, mask=admit)
    tl.store(owner_of + victim, new_key, mask=admit)
    tl.store(state + STATE_CURSOR, cursor + tl.max(tl.where(admit, w + 1, 0), 0))

    n = tl.arange(0, 8)
    values = tl.where(n == COUNT_HITS, total_hits, 0) + tl.where(n == COUNT_FETCHES, wanted, 0)
    values += tl.where(n == COUNT_CPU, total_cpu, 0) + tl.where(n == COUNT_MISSING, missing, 0)
    values += tl.where(n == COUNT_ADMITTED, tl.sum(admit.to(tl.int32), 0), 0)
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
def begin_step(state):
    """Advance the clock; one program."""
    tl.store(state + STATE_NOW, tl.load(state + STATE_NOW) + 1)
    tl.store(state + STATE_CURSOR, 0)


@triton.jit
def _worth(owner_of, score, last_use, decay, slots, now, S: tl.constexpr, SLOTS: tl.constexpr,
           DECAY: tl.constexpr):  # fmt: skip
    owner = tl.load(owner_of + slots, mask=slots < SLOTS, other=-1)
    row = tl.maximum(owner, 0) // S
    owned = owner >= 0
    age = tl.minimum(now - tl.load(last_use + row, mask=owned, other=0), DECAY - 1)
    worth = tl.load(score + row, mask=owned, other=0.0) * tl.load(decay + age)
    return tl.where(owned, worth, -1.0)


@triton.jit
def rank_victims(
    owner_of, score, last_use, decay, victims, state, S: tl.constexpr, SLOTS: tl.constexpr,
    DECAY: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Rank all slots by value: each program counts, for MINE slots, how many come before each.

    A sort in one program would have to hold thousands of slots; counting is SLOTS ** 2 comparisons,
    spread over the whole GPU.
    """
    now = tl.load(state + STATE_NOW)
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    worth = _worth(owner_of, score, last_use, decay, mine, now, S, SLOTS, DECAY)
    rank = tl.zeros([MINE], tl.int32)
    for start in range(0, SLOTS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = _worth(owner_of, score, last_use, decay, other, now, S, SLOTS, DECAY)
        before = (theirs[None, :] < worth[:, None]) | (
            (theirs[None, :] == worth[:, None]) & (other[None, :] < mine[:, None])
        )
        rank += tl.sum((before & (other[None, :] < SLOTS)).to(tl.int32), 1)
    tl.store(victims + rank, mine, mask=mine < SLOTS)
