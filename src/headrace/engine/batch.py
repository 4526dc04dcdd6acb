"""A step plan as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.step import ScheduledChunk
from headrace.kv.open_pages import OpenChunk, OpenPages
from headrace.ops.records import AttentionBatch, OpenBatch


def build_batch(
    chunks: Sequence[ScheduledChunk],
    block_tokens: int,
    device: torch.device,
    open_pages: OpenPages | None = None,
) -> tuple[torch.Tensor, AttentionBatch]:
    """Lay the chunks out one after the other.

    ``open_pages``: hands out the open pages of a cache whose pages are sealed.

    Returns the token ids, int64 [T], and the batch that describes them.
    """
    lengths = [len(c.token_ids) for c in chunks]
    ends = [c.start + n for c, n in zip(chunks, lengths)]
    tables = np.zeros((len(chunks), max(-(-end // block_tokens) for end in ends)), np.int32)
    for row, (chunk, end) in enumerate(zip(chunks, ends)):
        used = -(-end // block_tokens)
        tables[row, :used] = chunk.block_ids[:used]
    decode = max(lengths) == 1
    if decode:
        positions = np.array([c.start for c in chunks], np.int64)
        rows = np.arange(len(chunks))
    else:
        positions = np.concatenate([np.arange(c.start, end) for c, end in zip(chunks, ends)])
        rows = np.repeat(np.arange(len(chunks)), lengths)
    slots = tables[rows, positions // block_tokens].astype(np.int64) * block_tokens
    slots += positions % block_tokens
    tokens = np.fromiter((t for c in chunks for t in c.token_ids), np.int64, len(positions))
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

    return tensor(tokens), AttentionBatch(
        query_start=tensor(starts),
        context_lens=tensor(np.array(ends, np.int32)),
        block_tables=tensor(tables),
        positions=tensor(positions),
        slots=tensor(slots),
        decode=decode,
        open=None if open_pages is None else _open_batch(chunks, block_tokens, device, open_pages),
    )


def open_chunks(chunks: Sequence[ScheduledChunk], open_pages: OpenPages) -> list[OpenChunk]:
    """The open pages of a step's chunks, or of some of them, for the first time or again."""
    open_pages.begin()
    return [open_pages.open_chunk(c.start, len(c.token_ids), c.block_ids) for c in chunks]


def _open_batch(
    chunks: Sequence[ScheduledChunk], size: int, device: torch.device, open_pages: OpenPages
) -> OpenBatch:
    found = open_chunks(chunks, open_pages)
    pages = np.zeros((len(chunks), max(len(f.slots) for f in found)), np.int32)
    rows: list[npt.NDArray[np.int64]] = []
    for index, (chunk, one) in enumerate(zip(chunks, found, strict=True)):
        pages[index, : len(one.slots)] = one.slots
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int64)
        slots = np.array(one.slots, np.int64)[positions // size - chunk.start // size]
        rows.append(slots * size + positions % size)
    seals = np.array([s for f in found for s in f.seals], np.int32).reshape(-1, 3)

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

    return OpenBatch(tensor(np.concatenate(rows)), tensor(pages), tensor(seals))
