"""Attention over sealed pages, in plain PyTorch: the oracle of every other implementation.

A row at position p sees the sealed form of every page before its own, and the bf16 form of its own
page up to p, whether it came in a long prompt or alone.
"""

from __future__ import annotations

import torch

from headrace.core.errors import InternalError
from headrace.core.kv_formats import FIRST_TOKENS
from headrace.ops.records import AttentionBatch, OpenBatch, SealedKV
from headrace.ops.reference.attention import QUERY_ROWS, attend
from headrace.ops.reference.sealing import pages_of, read_keys, read_values, seal


def sealed_append(k: torch.Tensor, v: torch.Tensor, cache: SealedKV, batch: AttentionBatch) -> None:
    """Store this step's keys and values in open pages, and seal those that become full.

    k, v: float32 [T, Hkv, hd]
    """
    where = _open(batch)
    size = cache.block_tokens
    slot, row = open_row(cache, where.rows // size), where.rows % size
    cache.open_keys[slot, :, row] = k.to(torch.bfloat16)
    cache.open_values[slot, :, row] = v.to(torch.bfloat16)
    full = where.seals[where.seals[:, 0] >= 0].long()
    if full.shape[0]:
        _seal(cache, full[:, 0], open_row(cache, full[:, 1]), full[:, 2] == 1)


def _seal(cache: SealedKV, blocks: torch.Tensor, slots: torch.Tensor, first: torch.Tensor) -> None:
    keys = cache.open_keys[slots]
    pages = seal(
        keys,
        cache.open_values[slots],
        nvfp4=cache.key_scales is not None,
        first=None if cache.first_keys is None else first,
        directions=cache.directions,
    )
    parts = (
        (cache.key_codes, pages.key_codes),
        (cache.key_scales, pages.key_scales),
        (cache.key_residuals, pages.key_residuals),
        (cache.key_refs, pages.key_refs),
        (cache.value_codes, pages.value_codes),
        (cache.page_scales, pages.page_scales),
    )
    for stored, part in parts:
        if stored is not None and part is not None:
            stored[blocks] = part
    if cache.first_keys is not None and bool(first.any()):
        cache.first_keys[blocks[first]] = keys[first, :, :FIRST_TOKENS]


def sealed_attention(
    q: torch.Tensor,
    cache: SealedKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q K^T * scale) V, as ``attention`` has it: q [T, H, hd] -> the same shape and dtype.

    Computes in q's dtype: float64 queries give the oracle.
    """
    where = _open(batch)
    size = cache.block_tokens
    out = torch.empty_like(q)
    starts = [int(start) for start in batch.query_start]
    for seq in range(len(starts) - 1):
        start, end = starts[seq], starts[seq + 1]
        origin = int(batch.positions[start]) // size
        while start < end:  # rows of one page at a time: they see the same keys
            page = int(batch.positions[start]) // size
            inside = int(batch.positions[start]) % size
            stop = min(end, start + min(QUERY_ROWS, size - inside))
            positions = batch.positions[start:stop]
            lowest = 0 if window is None else max(int(positions[0]) - window + 1, 0)
            begin = min(lowest // size, page)
            table = batch.block_tables[seq, begin:page].long()
            slot = open_row(cache, where.pages[seq, page - origin].long())
            last = int(positions[-1]) % size + 1
            keys, values = _gather(cache, table, slot, last, begin == 0 and page > 0, q.dtype)
            distance = positions[:, None] - torch.arange(
                begin * size, page * size + last, device=q.device
            )
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            extra = None if sinks is None else sinks.to(q.dtype)
            out[start:stop] = attend(q[start:stop], keys, values, hidden, scale, extra)
            start = stop
    return out


def _gather(
    cache: SealedKV,
    blocks: torch.Tensor,
    slot: torch.Tensor,
    last: int,
    has_first: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sealed ``blocks`` and then the open page's rows 0 to ``last - 1``: two [Hkv, L, hd]."""
    pages = pages_of(cache, blocks)
    keys = read_keys(pages, cache.directions, dtype)
    if has_first and cache.first_keys is not None:
        keys[0, :, :FIRST_TOKENS] = cache.first_keys[blocks[0]].to(dtype)
    values = read_values(pages, dtype)
    rows = (cache.open_keys[slot, :, :last].to(dtype), cache.open_values[slot, :, :last].to(dtype))
    return (
        torch.cat((keys.transpose(0, 1).flatten(1, 2), rows[0]), 1),
        torch.cat((values.transpose(0, 1).flatten(1, 2), rows[1]), 1),
    )


def open_row(cache: SealedKV, slots: torch.Tensor) -> torch.Tensor:
    """Rows of ``open_keys`` of this layer's open slots."""
    return slots + (slots >= cache.num_shared) * cache.open_offset


def _open(batch: AttentionBatch) -> OpenBatch:
    if batch.open is None:
        raise InternalError("a batch over sealed pages does not say where its open pages are")
    return batch.open
