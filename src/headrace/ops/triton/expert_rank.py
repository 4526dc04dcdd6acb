"""What begins a step of the expert plan: counters age, experts are valued anew, slots are ranked.

The rules are ``headrace.experts.plan_oracle.begin_step``'s; names are those of ``expert_plan``.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.expert_plan import (
    CONST_DECAY,
    STATE_CURSOR,
    STATE_FREE,
    STATE_NOW,
    STATE_PLANNED,
    value_of,
)

LAST_KEY = tl.constexpr((1 << 63) - 1)  # ranks behind every slot


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
    tl.store(values + row, value_of(f0, f1, f2, constants), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(state + STATE_NOW, tl.load(state + STATE_NOW) + 1)
        tl.store(state + STATE_CURSOR, 0)
        tl.store(state + STATE_FREE, 0)
        tl.store(state + STATE_PLANNED, 0)


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
