"""The border among a row's candidates, and the draw from what is above it.

Where few weights are candidates they are listed, in order of token id, and searched by one program that
holds them all. Where they are many, since thousands are equal or a large top_k precedes top_p, the program
searches all of the row's logits instead: slowly, and with the same result.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.overlap import wait_and_release
from headrace.ops.triton.sample_narrow import (
    BY_COUNT,
    BY_MASS,
    LISTED,
    STATE,
    STATE_COUNT_ABOVE,
    STATE_FOUND,
    STATE_HIGH,
    STATE_KIND,
    STATE_LOW,
    STATE_MASS_ABOVE,
    STATE_MODE,
    STATE_NEED,
    WIDE,
    draw_of_chunk,
)
from headrace.ops.triton.sample_weights import (
    RULE,
    TOP,
    is_drawn,
    mass_of,
    share_of,
    target_of,
    tell,
    weigh,
)

_WAYS = tl.constexpr(8)


@triton.jit
def _from(
    kind, least, bits, logits, top, temperature, inverse, min_p, vocab,
    ALL: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """int64 [W]: how many weights have bits of ``least`` [W] or more, or their mass: of ``bits`` [N], or of
    ALL of a row."""
    if ALL:
        at = tl.arange(0, CHUNK)
        found = tl.zeros((_WAYS,), tl.int64)
        for start in range(0, vocab, CHUNK):
            some = weigh(logits, start + at, start + at < vocab, top, temperature, inverse, min_p)
            inside = some[None, :] >= least[:, None]
            amount = tl.where(kind == BY_COUNT, 1, mass_of(some, UNITS))
            found += tl.sum(tl.where(inside, amount[None, :], 0), 1)
    else:
        inside = bits[None, :] >= least[:, None]
        if kind == BY_COUNT:
            found = tl.sum(inside.to(tl.int32), 1).to(tl.int64)
        else:
            found = tl.sum(tl.where(inside, mass_of(bits, UNITS)[None, :], 0), 1)
    return found


@triton.jit
def _search(
    kind, need, low, high, above, bits, logits, top, temperature, inverse, min_p, vocab,
    ALL: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Bits of the largest weight in [low, high) that, with all above it, reaches ``need``.

    above: count or mass of what ``bits`` leaves out since it is above
    """
    way = tl.arange(0, _WAYS)
    while high - low > 1:
        # Eight points at a time: what a round costs is waiting for its sums.
        least = low + (high - low) * way // _WAYS
        reached = above + _from(
            kind, least.to(tl.int32), bits, logits, top, temperature, inverse, min_p, vocab, ALL, CHUNK, UNITS
        ) >= need  # fmt: skip
        last = tl.sum(reached.to(tl.int32), 0)  # the first point is ``low``, which does
        high = tl.where(last == _WAYS, high, low + (high - low) * last // _WAYS)
        low = tl.max(tl.where(way < last, least, 0), 0)
    return low


@triton.jit
def _above(
    border, bits, logits, top, temperature, inverse, min_p, vocab,
    ALL: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """(count, mass), int64, of the weights above ``border``: of ``bits``, or of ALL of a row."""
    if ALL:
        at = tl.arange(0, CHUNK)
        count = tl.zeros((CHUNK,), tl.int32)
        mass = tl.zeros((CHUNK,), tl.int64)
        for start in range(0, vocab, CHUNK):
            some = weigh(logits, start + at, start + at < vocab, top, temperature, inverse, min_p)
            count += (some > border).to(tl.int32)
            mass += tl.where(some > border, mass_of(some, UNITS), 0)
    else:
        count = (bits > border).to(tl.int32)
        mass = tl.where(bits > border, mass_of(bits, UNITS), 0)
    return tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0)


@triton.jit
def _settle(
    state, top_p, bits, logits, top, temperature, inverse, min_p, vocab,
    ALL: tl.constexpr, CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """(bits of the border, how many that equal it are kept, mass of all that is kept)."""
    kind, need = tl.load(state + STATE_KIND), tl.load(state + STATE_NEED)
    low, high = tl.load(state + STATE_LOW), tl.load(state + STATE_HIGH)
    count_above, mass_above = kind * 0, kind * 0
    if not ALL:
        count_above = tl.load(state + STATE_COUNT_ABOVE)
        mass_above = tl.load(state + STATE_MASS_ABOVE)
    border, count, mass, searching = low, kind * 0, kind * 0, kind == kind
    while searching:  # once, or by count and then, among what that has left, by mass
        above = tl.where(kind == BY_COUNT, count_above, mass_above)
        border = _search(
            kind, need, low, high, above, bits, logits, top, temperature, inverse, min_p, vocab,
            ALL, CHUNK, UNITS,
        )  # fmt: skip
        count, mass = _above(
            border.to(tl.int32), bits, logits, top, temperature, inverse, min_p, vocab,
            ALL, CHUNK, UNITS,
        )  # fmt: skip
        mass += mass_above
        searching = (kind == BY_COUNT) & (top_p < 1.0)
        if searching:
            total = mass + (need - count_above - count) * mass_of(border.to(tl.int32), UNITS)
            need = target_of(top_p, total)
            kind += BY_MASS - BY_COUNT
            low, high = border, border * 0 + TOP
    ties = need - count_above - count  # by count
    one = mass_of(border.to(tl.int32), UNITS)
    ties = tl.where(kind == BY_MASS, (need - mass + one - 1) // tl.maximum(one, 1), ties)
    return border.to(tl.int32), ties.to(tl.int32), mass + ties * one


@triton.jit
def _draw_listed(
    state, bases, above, ids, sums, equals, number, top_p, bits, logits, top, temperature, inverse, min_p,
    vocab, parts, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """The token of a row whose candidates are ``bits`` [ROOM]; pointers are the row's own."""
    border, ties, total = _settle(
        state, top_p, bits, logits, top, temperature, inverse, min_p, vocab, False, CHUNK, UNITS
    )
    mark = tl.minimum(share_of(number, total), total - 1)
    place = tl.arange(0, ROOM)
    equal = tl.cumsum((bits == border).to(tl.int32), 0)
    kept = (bits > border) | ((bits == border) & (equal <= ties))
    sum_ = tl.cumsum(tl.where(kept, mass_of(bits, UNITS), 0), 0)
    if tl.load(state + STATE_HIGH) == TOP:
        token = tl.load(ids + tl.sum((sum_ <= mark).to(tl.int32), 0))
    else:
        # What is above the candidates is kept, too: find the chunk first.
        tl.store(sums + place, sum_)
        tl.store(equals + place, equal)
        tl.debug_barrier()
        chunk = tl.arange(0, CHUNKS)
        begin = tl.load(bases + chunk, mask=chunk < parts, other=0)
        end = tl.load(bases + chunk + 1, mask=chunk < parts, other=0)
        more = tl.load(above + chunk, mask=chunk < parts, other=0, cache_modifier=".cg")
        upto = tl.cumsum(more, 0) + tl.load(sums + end - 1, mask=end > 0, other=0)
        before = tl.load(equals + begin - 1, mask=begin > 0, other=0)
        mine = tl.sum(((upto <= mark) & (chunk < parts)).to(tl.int32), 0)
        mark -= tl.sum(tl.where(chunk == mine - 1, upto, 0), 0)
        ties -= tl.sum(tl.where(chunk == mine, before, 0), 0)
        token = draw_of_chunk(
            logits,
            mine,
            mark,
            top,
            temperature,
            inverse,
            min_p,
            vocab,
            border,
            ties,
            False,
            CHUNK,
            UNITS,
        )
    return token


@triton.jit
def _draw_wide(
    state, number, top_p, logits, top, temperature, inverse, min_p, vocab, parts,
    CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The token of a row, by passes over all of its logits."""
    border, ties, total = _settle(
        state, top_p, tl.zeros((1,), tl.int32), logits, top, temperature, inverse, min_p, vocab, True, CHUNK,
        UNITS,
    )  # fmt: skip
    mark = tl.minimum(share_of(number, total), total - 1)
    one = mass_of(border, UNITS)
    chunk, searching = parts * 0, parts == parts
    while searching:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        bits = weigh(logits, at, at < vocab, top, temperature, inverse, min_p)
        equal = tl.minimum(tl.sum((bits == border).to(tl.int32), 0), ties)
        mass = tl.sum(tl.where(bits > border, mass_of(bits, UNITS), 0), 0) + equal * one
        searching = mass <= mark
        mark -= tl.where(searching, mass, 0)
        ties -= tl.where(searching, equal, 0)
        chunk += searching.to(tl.int32)
    return draw_of_chunk(
        logits,
        chunk,
        mark,
        top,
        temperature,
        inverse,
        min_p,
        vocab,
        border,
        ties,
        False,
        CHUNK,
        UNITS,
    )


@triton.jit
def _list_chunk(
    logits, state, bases, above, candidates, ids, part, vocab, top, temperature, inverse, min_p,
    CHUNK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Write a chunk's candidates to their places, and the mass that is above them."""
    low = tl.load(state + STATE_LOW).to(tl.int32)
    high = tl.load(state + STATE_HIGH).to(tl.int32)
    base, end = tl.load(bases + part), tl.load(bases + part + 1)
    if (end > base) | (high < TOP):
        at = part * CHUNK + tl.arange(0, CHUNK)
        bits = weigh(logits, at, at < vocab, top, temperature, inverse, min_p)
        inside = (bits >= low) & (bits < high)
        place = base + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(candidates + place, bits, mask=inside)
        tl.store(ids + place, at, mask=inside)
        tl.store(above + part, tl.sum(tl.where(bits >= high, mass_of(bits, UNITS), 0), 0))


@triton.jit(do_not_specialize=["rows"])  # one binary for every batch
def finish_kernel(
    logits, rules, picked, tokens, state, bases, above, candidates, ids, sums, equals, counters, vocab, rows,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr, UNITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (c, r) lists the candidates of chunk c of row r; the row's last one draws.

    above: int64 [rows, chunks], mass above the candidates; candidates (bits), ids, equals: int32, sums: int64
    [rows, ROOM]
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    temperature = tl.load(rules + RULE * row).to(tl.float32)
    inverse = tl.div_rn(1.0, temperature)
    min_p = tl.load(rules + RULE * row + 1).to(tl.float32)
    top_p = tl.load(rules + RULE * row + 3)
    number = tl.load(rules + RULE * row + 4)
    wait_and_release(PDL)
    active, top = is_drawn(rules, picked, row, rows)
    state += row * STATE
    mode = tl.load(state + STATE_MODE)
    logits += row * vocab
    bases += row * (parts + 1)
    above += row * parts
    candidates, ids = candidates + row * ROOM, ids + row * ROOM
    if active & (mode == LISTED):
        _list_chunk(
            logits, state, bases, above, candidates, ids, part, vocab, top, temperature, inverse, min_p,
            CHUNK, UNITS,
        )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == parts - 1:
            tl.store(counters + row, 0)
            place = tl.arange(0, ROOM)
            found = tl.load(state + STATE_FOUND)
            bits = tl.load(candidates + place, mask=place < found, other=-1, cache_modifier=".cg")
            token = _draw_listed(
                state, bases, above, ids, sums + row * ROOM, equals + row * ROOM, number, top_p,
                bits, logits, top, temperature, inverse, min_p, vocab, parts, CHUNK, CHUNKS, ROOM, UNITS,
            )  # fmt: skip
            tell(picked, tokens, row, token)
    if active & (mode == WIDE) & (part == 0):
        token = _draw_wide(
            state,
            number,
            top_p,
            logits,
            top,
            temperature,
            inverse,
            min_p,
            vocab,
            parts,
            CHUNK,
            UNITS,
        )
        tell(picked, tokens, row, token)
