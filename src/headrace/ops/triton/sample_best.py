"""The largest logit of each row: all of a greedy row's choice, and where the others begin."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.triton.overlap import wait_and_release
from headrace.ops.triton.sample_weights import RULE, key_value, order_key, tell

_LEAST_KEY = tl.constexpr(-(1 << 63))
_LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["rows"])  # one binary for every batch
def best_kernel(
    logits, rules, keys, counters, picked, tokens, vocab, rows,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (c, r) finds the best of chunk c of row r; the row's last one finds the best of those.

    keys: int64 [rows, chunks], of a logit and, among equals, the smaller id; counters: 0 before and after
    picked: int32 [2, rows], see the reference; tokens: int64 [rows], takes the ids, too
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    temperature = tl.load(rules + RULE * row)
    wait_and_release(PDL)
    if temperature >= 0.0:
        at = part * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
        key = (order_key(value).to(tl.int64) << 32) | (at ^ _LAST_ID).to(tl.int64)
        tl.store(keys + row * parts + part, tl.max(key, 0))
        tl.debug_barrier()
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == parts - 1:
            tl.store(counters + row, 0)
            chunk = tl.arange(0, CHUNKS)
            # Past the first-level cache, which knows nothing of other multiprocessors' keys.
            found = tl.load(
                keys + row * parts + chunk, mask=chunk < parts, other=_LEAST_KEY,
                cache_modifier=".cg",
            )  # fmt: skip
            best = tl.max(found, 0)
            high = (best >> 32).to(tl.int32)
            tell(picked, tokens, row, (best & 0x7FFFFFFF).to(tl.int32) ^ _LAST_ID)
            tl.store(picked + rows + row, key_value(high).to(tl.int32, bitcast=True))
    elif part == 0:
        tell(picked, tokens, row, part)  # 0: nobody's row may still be fed to the next step
        tl.store(picked + rows + row, 0)
