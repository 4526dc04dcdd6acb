"""Caches whose pages are quantised when full: writing, sealing, and attention over them."""

from __future__ import annotations

import torch

from headrace.core.errors import InternalError
from headrace.core.kv_formats import FIRST_TOKENS, KEY_GROUP
from headrace.ops.cpu import _native
from headrace.ops.cpu.arguments import address, checked, in_range
from headrace.ops.cpu.attention import native_batch
from headrace.ops.records import AttentionBatch, OpenBatch, SealedKV

_CACHE = "_cpu_sealed"
_OPEN = "_cpu_open"


def _expected(cache: SealedKV) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of the parts that are there, as ``SealedKV`` has them."""
    blocks, heads, size, columns = cache.key_codes.shape
    dim, rank = cache.head_dim, cache.rank
    byte, bf16, f32 = torch.uint8, torch.bfloat16, torch.float32
    nvfp4 = cache.key_scales is not None
    first = 0 if cache.first_keys is None else cache.first_keys.shape[0]
    rows = cache.open_keys.shape[0]
    if columns != (dim // 2 if nvfp4 else dim) or dim % KEY_GROUP or size % KEY_GROUP:
        raise InternalError(f"sealed cache: {columns} bytes a key, heads of {dim}, pages of {size}")
    return {
        "key_codes": (byte, (blocks, heads, size, columns)),
        "key_scales": (byte, (blocks, heads, size, dim // KEY_GROUP)),
        "key_residuals": (byte, (blocks, heads, size, rank)),
        "key_refs": (bf16, (blocks, heads, dim)),
        "value_codes": (byte, (blocks, heads, dim, size)),
        "page_scales": (f32, (blocks, heads, 2)),
        "first_keys": (bf16, (first, heads, FIRST_TOKENS, dim)),
        "directions": (f32, (heads, rank, dim)),
        "open_keys": (bf16, (rows, heads, size, dim)),
        "open_values": (bf16, (rows, heads, size, dim)),
    }


def native_sealed(cache: SealedKV) -> _native.SealedCache:
    """The native record of a layer's cache, made once."""
    found = cache.__dict__.get(_CACHE)
    if found is None:
        addresses: list[int] = []
        for name, (dtype, shape) in _expected(cache).items():
            part: torch.Tensor | None = getattr(cache, name)
            if part is not None and not part.is_contiguous():
                raise InternalError(f"sealed cache: {name} is not contiguous")
            addresses.append(0 if part is None else checked(part, dtype, shape, name).data_ptr())
        blocks, heads, size, _ = cache.key_codes.shape
        first = 0 if cache.first_keys is None else cache.first_keys.shape[0]
        counts = (blocks, heads, size, cache.head_dim, cache.rank, first, cache.open_keys.shape[0])
        found = _native.make_sealed_cache(addresses, [*counts, cache.num_shared, cache.open_offset])
        cache.__dict__[_CACHE] = found
    return found


def _native_open(batch: AttentionBatch) -> tuple[_native.OpenPages, OpenBatch]:
    """The native record of a step's open pages, made once a step."""
    where = batch.open
    if where is None:
        raise InternalError("a batch over sealed pages does not say where its open pages are")
    found = where.__dict__.get(_OPEN)
    if found is None:
        sequences, width = where.pages.shape
        rows = checked(where.rows, torch.int64, (batch.positions.numel(),), "open rows")
        pages = checked(where.pages, torch.int32, (sequences, width), "open pages")
        seals = checked(where.seals, torch.int32, (where.seals.shape[0], 3), "seals")
        if sequences != batch.block_tables.shape[0]:
            raise InternalError(f"open pages of {sequences} sequences, tables of others")
        addresses = [rows.data_ptr(), pages.data_ptr(), seals.data_ptr()]
        # The tensors stay with their addresses, should one of them have been copied above.
        native = _native.make_open_pages(addresses, width, seals.shape[0])
        found = where.__dict__[_OPEN] = (native, (rows, pages, seals))
    return found[0], where


def sealed_append(k: torch.Tensor, v: torch.Tensor, cache: SealedKV, batch: AttentionBatch) -> None:
    """Store float32 keys and values [T, Hkv, head_dim], and seal the pages that become full."""
    native = native_sealed(cache)
    where, given = _native_open(batch)
    tokens, shape = batch.positions.numel(), (cache.key_codes.shape[1], cache.head_dim)
    k = checked(k, torch.float32, (tokens, *shape), "k")
    v = checked(v, torch.float32, (tokens, *shape), "v")
    bad = _native.sealed_append(native, where, k.data_ptr(), v.data_ptr(), tokens)
    if bad >= tokens:
        raise InternalError(f"seals[{bad - tokens}]: found {given.seals[bad - tokens]}")
    in_range(bad, given.rows, "a row of an open page", "open rows")


def sealed_attention(
    q: torch.Tensor,
    cache: SealedKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attention`` over sealed pages: float32 q [T, H, head_dim] -> same shape.

    Serves prefill and decode alike, and gives a row the same bits in both.
    """
    native = native_sealed(cache)
    where, _ = _native_open(batch)
    tokens, heads, _ = q.shape
    q = checked(q, torch.float32, (tokens, heads, cache.head_dim), "q")
    kv_heads = cache.key_codes.shape[1]
    if heads % kv_heads or (window is not None and window < 1):
        raise InternalError(f"attention: {heads} heads on {kv_heads} key heads, window {window}")
    starts, tables, positions, sequences, width, rows = native_batch(batch)
    if rows != tokens:
        raise InternalError(f"attention: q has {tokens} rows, the batch {rows}")
    out = torch.empty_like(q)
    addresses = [q.data_ptr(), out.data_ptr(), address(sinks, heads, "sinks")]
    bad = _native.sealed_attention(
        native,
        where,
        [*addresses, starts, tables, positions],
        heads,
        scale,
        window or 0,
        sequences,
        width,
    )
    in_range(bad, batch.positions, "a position whose pages are in the tables", "positions")
    return out
