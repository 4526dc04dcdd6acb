"""The paged KV cache and attention over it."""

from __future__ import annotations

import torch

from headrace.core.errors import InternalError
from headrace.ops.cpu import _native
from headrace.ops.cpu.arguments import address, checked, in_range
from headrace.ops.records import AttentionBatch, LayerKV

_CACHE = "_cpu_cache"
_BATCH = "_cpu_batch"
# Rows times keys from which a call gives up the interpreter lock: about 100 us of work.
_LONG_CALL = 16 * 1024


def native_cache(cache: LayerKV) -> tuple[_native.Cache, int, int, int]:
    """The native record of a layer's cache, its slots, key heads and head size; made once."""
    found = cache.__dict__.get(_CACHE)
    if found is None:
        keys, values = cache.keys, cache.values
        if (
            keys.dtype not in (torch.float32, torch.bfloat16)
            or values.dtype != keys.dtype
            or values.shape != keys.shape
            or values.stride() != keys.stride()
            or keys.dim() != 4
            or keys.stride(3) != 1
        ):
            raise InternalError(
                f"KV cache: found keys {keys.dtype} {list(keys.shape)} {list(keys.stride())}, "
                f"values {values.dtype} {list(values.shape)} {list(values.stride())}, expected "
                "two float32 or bfloat16 [blocks, heads, tokens, head_dim] of the same layout"
            )
        blocks, heads, tokens, head = keys.shape
        native = _native.make_cache(
            keys.data_ptr(),
            values.data_ptr(),
            blocks,
            heads,
            tokens,
            head,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            keys.dtype is torch.bfloat16,
        )
        found = cache.__dict__[_CACHE] = (native, blocks * tokens, heads, head)
    return found


def native_batch(batch: AttentionBatch) -> tuple[int, ...]:
    """Addresses of starts, tables and positions, sequences, table width, rows; made once a step."""
    found = batch.__dict__.get(_BATCH)
    if found is None:
        sequences, width = batch.block_tables.shape
        rows = batch.positions.numel()
        tables = checked(batch.block_tables, torch.int32, (sequences, width), "block_tables")
        starts = checked(batch.query_start, torch.int32, (sequences + 1,), "query_start")
        positions = checked(batch.positions, torch.int64, (rows,), "positions")
        falls = bool((starts[1:] < starts[:-1]).any())
        if int(starts[0]) != 0 or int(starts[-1]) != rows or falls:
            raise InternalError(f"query_start: found {starts}, expected to rise from 0 to {rows}")
        addresses = (starts.data_ptr(), tables.data_ptr(), positions.data_ptr())
        # The tensors stay with their addresses, should one of them have been copied above.
        found = (addresses, (sequences, width, rows), (starts, tables, positions))
        batch.__dict__[_BATCH] = found
    return (*found[0], *found[1])


def kv_append(k: torch.Tensor, v: torch.Tensor, cache: LayerKV, slots: torch.Tensor) -> None:
    """Store keys and values, float32 [T, Hkv, head_dim], at int64 ``slots`` [T] of the cache."""
    native, limit, heads, head = native_cache(cache)
    tokens = slots.numel()
    k = checked(k, torch.float32, (tokens, heads, head), "k")
    v = checked(v, torch.float32, (tokens, heads, head), "v")
    slots = checked(slots, torch.int64, (tokens,), "slots")
    bad = _native.kv_append(native, k.data_ptr(), v.data_ptr(), tokens, slots.data_ptr())
    in_range(bad, slots, f"0 to {limit - 1}", "slots")


def attention(
    q: torch.Tensor,
    cache: LayerKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of float32 q [T, H, head_dim] over a paged cache -> same shape.

    Query head h reads key head h // (H / Hkv). With a window w, the row at position p sees keys
    p - w + 1 to p. ``sinks`` [H]: one more logit per head, in the denominator only. Serves prefill
    and decode alike, and gives a row the same bits in both.
    """
    native, _, kv_heads, head = native_cache(cache)
    tokens, heads, _ = q.shape
    q = checked(q, torch.float32, (tokens, heads, head), "q")
    if heads % kv_heads or (window is not None and window < 1):
        raise InternalError(f"attention: {heads} heads on {kv_heads} key heads, window {window}")
    starts, tables, positions, sequences, width, rows = native_batch(batch)
    if rows != tokens:
        raise InternalError(f"attention: q has {tokens} rows, the batch {rows}")
    out = torch.empty_like(q)
    bad = _native.attention(
        native,
        q.data_ptr(),
        out.data_ptr(),
        heads,
        scale,
        window or 0,
        address(sinks, heads, "sinks"),
        starts,
        tables,
        positions,
        sequences,
        width,
        tokens * width * cache.block_tokens > _LONG_CALL,
    )
    in_range(
        bad, batch.positions, "a position whose blocks are in the table and the cache", "positions"
    )
    return out
