"""Where the smallest weight that is kept lies: between two edges of a few, or nowhere.

A first call compares a row's weights with the powers of two down to 2^-30, a second one with 30 edges
between the two that the first one found. Rows that keep everything are drawn for by the first call.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.overlap import wait_and_release
from headrace.ops.triton.sample_weights import (
    RULE,
    TOP,
    is_drawn,
    key_value,
    mass_of,
    share_of,
    target_of,
    tell,
    weigh,
    weight_bits,
)

EDGES = tl.constexpr(32)
_GROUP = tl.constexpr(16)  # edges at a time
# What is known of a row, int64 each. STATE_MODE says what is left to do.
STATE = tl.constexpr(8)
STATE_MODE, STATE_LOW, STATE_HIGH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STATE_KIND, STATE_NEED, STATE_FOUND = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
STATE_COUNT_ABOVE, STATE_MASS_ABOVE = tl.constexpr(6), tl.constexpr(7)
DONE, LISTED, WIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BY_COUNT, BY_MASS = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def _edges(low, high, e, FIRST: tl.constexpr):
    """Bits of the edges, falling: the first is above what can be the border, the last is not."""
    if FIRST:
        octave = 0x3F800000 - (e << 23)
        return tl.where(e == 0, TOP, tl.where(e == EDGES - 1, 0, octave))
    return (low + (high - low) * (31 - e) // 31).to(tl.int32)


@triton.jit
def draw_of_chunk(
    logits, chunk, mark, top, temperature, inverse, min_p, vocab, border, ties,
    ALL: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The id in a chunk at which the sum of kept masses exceeds ``mark``: ALL of them, or those above
    ``border``, and the first ``ties`` of those that equal it."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    bits = weigh(logits, at, at < vocab, top, temperature, inverse, min_p)
    mass = mass_of(bits, UNITS)
    if not ALL:
        equal = (bits == border).to(tl.int32)
        kept = (bits > border) | ((equal > 0) & (tl.cumsum(equal, 0) <= ties))
        mass = tl.where(kept, mass, 0)
    sums = tl.cumsum(mass, 0)
    return chunk * CHUNK + tl.sum((sums <= mark).to(tl.int32), 0)


@triton.jit
def _decide(
    counts, masses, state, bases, row, parts, top_k, top_p, low, high,
    FIRST: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Find the two edges, and whether what lies between, or above the lower one, can be listed.

    Returns the row's mode.
    """
    state += row * STATE
    e, chunk = tl.arange(0, EDGES), tl.arange(0, CHUNKS)
    here = (row * parts + chunk[:, None]) * EDGES + e[None, :]
    ok = (chunk < parts)[:, None]
    count = tl.sum(tl.load(counts + here, mask=ok, other=0, cache_modifier=".cg"), 0)
    mass = tl.sum(tl.load(masses + here, mask=ok, other=0, cache_modifier=".cg"), 0)
    if FIRST:
        all_count = tl.sum(tl.where(e == EDGES - 1, count, 0), 0)
        all_mass = tl.sum(tl.where(e == EDGES - 1, mass, 0), 0)
        by_count = (top_k > 0) & (top_k < all_count)
        kind = (~by_count).to(tl.int64)
        need = tl.where(by_count, top_k.to(tl.int64), target_of(top_p, all_mass))
        tl.store(state + STATE_KIND, kind)
        tl.store(state + STATE_NEED, need)
        nothing = (kind == BY_MASS) & (top_p >= 1.0)
    else:
        kind = tl.load(state + STATE_KIND)
        need = tl.load(state + STATE_NEED)
        nothing = kind < 0
    enough = tl.where(kind == BY_COUNT, count.to(tl.int64), mass) >= need
    found = tl.sum((enough == 0).to(tl.int32), 0)  # falling edges: the first one that is enough
    edges = _edges(low, high, e, FIRST)
    low_edge = tl.sum(tl.where(e == found, edges, 0), 0)
    high_edge = tl.sum(tl.where(e == found - 1, edges, 0), 0)
    count_low = tl.sum(tl.where(e == found, count, 0), 0)
    count_high = tl.sum(tl.where(e == found - 1, count, 0), 0)
    mass_high = tl.sum(tl.where(e == found - 1, mass, 0), 0)
    whole = count_low <= ROOM
    part = (count_low - count_high <= ROOM) & ((kind == BY_MASS) | (top_p >= 1.0))
    mode = tl.where(whole | part, LISTED, WIDE)
    mode = tl.where(nothing, DONE, mode)
    tl.store(state + STATE_MODE, mode.to(tl.int64))
    tl.store(state + STATE_LOW, low_edge.to(tl.int64))
    tl.store(state + STATE_HIGH, tl.where(whole, TOP, high_edge).to(tl.int64))
    tl.store(state + STATE_FOUND, tl.where(whole, count_low, count_low - count_high).to(tl.int64))
    tl.store(state + STATE_COUNT_ABOVE, tl.where(whole, 0, count_high).to(tl.int64))
    tl.store(state + STATE_MASS_ABOVE, tl.where(whole, 0, mass_high))
    if mode == LISTED:
        at = (row * parts + chunk) * EDGES + found
        mine = tl.load(counts + at, mask=chunk < parts, other=0, cache_modifier=".cg")
        above = tl.load(counts + at - 1, mask=chunk < parts, other=0, cache_modifier=".cg")
        mine = tl.where(whole, mine, mine - above)
        tl.store(bases + row * (parts + 1) + chunk + 1, tl.cumsum(mine, 0), mask=chunk < parts)
        tl.store(bases + row * (parts + 1), 0)
    return mode


@triton.jit
def _draw_from_all(
    logits, rules, masses, picked, tokens, row, parts, vocab, top, temperature, inverse, min_p,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Draw from all that min_p has left: first a chunk, then an id in it."""
    chunk = tl.arange(0, CHUNKS)
    at = (row * parts + chunk) * EDGES + EDGES - 1
    mass = tl.load(masses + at, mask=chunk < parts, other=0, cache_modifier=".cg")
    total = tl.sum(mass, 0)
    mark = tl.minimum(share_of(tl.load(rules + RULE * row + 4), total), total - 1)
    before = (tl.cumsum(mass, 0) <= mark) & (chunk < parts)
    mine = tl.sum(before.to(tl.int32), 0)
    mark -= tl.sum(tl.where(before, mass, 0), 0)
    token = draw_of_chunk(
        logits, mine, mark, top, temperature, inverse, min_p, vocab, 0, 0, True, CHUNK, UNITS
    )
    tell(picked, tokens, row, token)


@triton.jit
def _sum_chunk(
    logits, masses, row, part, parts, vocab, top, temperature, inverse, min_p,
    CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """A chunk's mass, where the last edge's is."""
    at = part * CHUNK + tl.arange(0, CHUNK)
    bits = weigh(logits, at, at < vocab, top, temperature, inverse, min_p)
    where = (row * parts + part) * EDGES + EDGES - 1
    tl.store(masses + where, tl.sum(mass_of(bits, UNITS), 0))


@triton.jit
def _compare_chunk(
    logits, keys, counts, masses, low, high, row, part, parts, vocab, top, temperature, inverse, min_p,
    FIRST: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """How many of a chunk's weights are not below each edge, and their mass.

    Half of the edges at a time, and not those above the chunk's largest weight: where a few tokens are
    likely, most chunks have none above the first half.
    """
    lane = tl.arange(0, LANES)
    most = weight_bits(
        key_value((tl.load(keys + row * parts + part) >> 32).to(tl.int32)),
        top, temperature, inverse, min_p,
    )  # fmt: skip
    for first in range(0, EDGES, _GROUP):
        e = first + tl.arange(0, _GROUP)
        edge = _edges(low, high, e, FIRST)
        count = tl.zeros((_GROUP, LANES), tl.int32)
        mass = tl.zeros((_GROUP, LANES), tl.int64)
        if most >= tl.min(edge, 0):
            at = part * CHUNK + lane
            coming = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
            for _ in range(CHUNK // LANES):
                value = coming  # the next ones are on their way meanwhile; the last time they are nobody's
                at += LANES
                coming = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
                bits = weight_bits(value, top, temperature, inverse, min_p)
                bits = tl.where(at - LANES < vocab, bits, -1)
                inside = bits[None, :] >= edge[:, None]
                count += inside.to(tl.int32)
                mass += tl.where(inside, mass_of(bits, UNITS)[None, :], 0)
        where = (row * parts + part) * EDGES + e
        tl.store(counts + where, tl.sum(count, 1))
        tl.store(masses + where, tl.sum(mass, 1))


@triton.jit(do_not_specialize=["rows"])  # one binary for every batch
def narrow_kernel(
    logits, rules, picked, tokens, keys, counts, masses, state, bases, counters, vocab, rows,
    FIRST: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr, ROOM: tl.constexpr, UNITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (c, r) compares chunk c of row r with the edges; the row's last one decides.

    keys: as ``best_kernel`` leaves them
    counts: int32, masses: int64 [rows, chunks, EDGES], of what is not below an edge
    state: int64 [rows, STATE]; bases: int32 [rows, chunks + 1], where each chunk's candidates go
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    temperature = tl.load(rules + RULE * row).to(tl.float32)
    inverse = tl.div_rn(1.0, temperature)
    min_p = tl.load(rules + RULE * row + 1).to(tl.float32)
    top_k = tl.load(rules + RULE * row + 2).to(tl.int32)
    top_p = tl.load(rules + RULE * row + 3)
    wait_and_release(PDL)
    active, top = is_drawn(rules, picked, row, rows)
    logits += row * vocab
    low, high = row * 0, row * 0
    if not FIRST:
        low = tl.load(state + row * STATE + STATE_LOW)
        high = tl.load(state + row * STATE + STATE_HIGH)
        active = active & (tl.load(state + row * STATE + STATE_MODE) == WIDE)
    if active:
        everything = (top_k <= 0) & (top_p >= 1.0)
        if everything:
            _sum_chunk(
                logits,
                masses,
                row,
                part,
                parts,
                vocab,
                top,
                temperature,
                inverse,
                min_p,
                CHUNK,
                UNITS,
            )
        else:
            _compare_chunk(
                logits, keys, counts, masses, low, high, row, part, parts, vocab, top, temperature, inverse,
                min_p, FIRST, CHUNK, LANES, UNITS,
            )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == parts - 1:
            tl.store(counters + row, 0)
            if everything:
                mode = part * 0 + DONE
                tl.store(state + row * STATE + STATE_MODE, 0)
            else:
                mode = _decide(
                    counts, masses, state, bases, row, parts, top_k, top_p, low, high,
                    FIRST, CHUNKS, ROOM,
                )  # fmt: skip
            if mode == DONE:
                _draw_from_all(
                    logits, rules, masses, picked, tokens, row, parts, vocab, top, temperature, inverse,
                    min_p, CHUNK, CHUNKS, UNITS,
                )  # fmt: skip
