"""The next token of each row of logits: four launches, whatever the rows' rules are.

What a row's rule does not need its programs skip, so that one captured graph serves greedy rows and
sampled ones. ``headrace.ops.reference.sampling`` says what is computed.
"""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton

from headrace.ops.reference.sampling import check, mass_bits
from headrace.ops.triton.overlap import can_overlap
from headrace.ops.triton.sample_best import best_kernel
from headrace.ops.triton.sample_finish import finish_kernel
from headrace.ops.triton.sample_narrow import EDGES, STATE, narrow_kernel

CHUNK = 2048  # logits of a program: 99 programs for a row of 201,088
WARPS = 8  # of a program that works out weights
_LANES = 256  # of a chunk's logits that are compared with edges at once
ROOM = 2048  # candidates that one program holds in registers


def sample(
    logits: torch.Tensor,
    rules: torch.Tensor,
    counters: torch.Tensor,
    tokens: torch.Tensor | None = None,
    chunk: int = CHUNK,
    room: int = ROOM,
    warps: int = WARPS,
) -> torch.Tensor:
    """See the reference. ``chunk`` and ``room`` are powers of two; they and ``warps`` do not change what is
    chosen."""
    check(logits, rules, counters, tokens)
    logits, rules = logits.contiguous(), rules.contiguous()
    rows, vocab = logits.shape
    picked = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return picked
    if tokens is None:  # nobody asks, but one binary serves all
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunks = triton.cdiv(vocab, chunk)
    edges, state_words = int(EDGES.value), int(STATE.value)

    def words(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    keys, masses = words(torch.int64, chunks), words(torch.int64, chunks, edges)
    counts, state = words(torch.int32, chunks, edges), words(torch.int64, state_words)
    bases, above = words(torch.int32, chunks + 1), words(torch.int64, chunks)
    listed, sums = words(torch.int32, 3, room), words(torch.int64, room)
    candidates, ids, equals = listed.view(3, rows, room)
    overlap = can_overlap(logits.device)
    grid = (chunks, rows)
    shape = {"CHUNK": chunk, "CHUNKS": triton.next_power_of_2(chunks), "PDL": overlap}
    units = float(2 ** mass_bits(vocab))
    best_kernel[grid](
        logits,
        rules,
        keys,
        counters,
        picked,
        tokens,
        vocab,
        rows,
        **shape,
        num_warps=4,
        launch_pdl=overlap,
    )
    for first in (True, False):
        narrow_kernel[grid](
            logits, rules, picked, tokens, keys, counts, masses, state, bases, counters, vocab, rows,
            FIRST=first, LANES=min(_LANES, chunk), ROOM=room, UNITS=units, **shape, num_warps=warps,
            launch_pdl=overlap,
        )  # fmt: skip
    finish_kernel[grid](
        logits, rules, picked, tokens, state, bases, above, candidates, ids, sums, equals, counters, vocab,
        rows, ROOM=room, UNITS=units, **shape, num_warps=8, launch_pdl=overlap,
    )  # fmt: skip
    return picked
