"""A step plan as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.step import PIECE_ROWS, ScheduledChunk
from headrace.kv.open_pages import OpenChunk, OpenPages
from headrace.ops.records import AttentionBatch, OpenBatch

# Pieces of a sequence end at whole pages, whatever their size.
_WHOLE = 128


@dataclass(frozen=True)
class _Part:
    """A chunk or a part of it. open: the open pages of its rows."""

    chunk: ScheduledChunk
    open: OpenChunk | None

    @property
    def end(self) -> int:
        return self.chunk.start + len(self.chunk.token_ids)


def build_batch(
    chunks: Sequence[ScheduledChunk],
    block_tokens: int,
    device: torch.device,
    open_pages: OpenPages | None = None,
    piece_rows: int = PIECE_ROWS,
) -> tuple[torch.Tensor, AttentionBatch]:
    """Lay the chunks out one after the other.

    ``open_pages``: hands out the open pages of a cache whose pages are sealed. More than ``piece_rows``
    rows get ``AttentionBatch.pieces``.

    Returns the token ids, int64 [T], and the batch that describes them.
    """
    opened = [None] * len(chunks) if open_pages is None else open_chunks(chunks, open_pages)
    parts = [_Part(chunk, one) for chunk, one in zip(chunks, opened)]
    ids = [t for c in chunks for t in c.token_ids]
    tokens = torch.from_numpy(np.array(ids, np.int64)).to(device)  # pyright: ignore[reportUnknownMemberType]
    batch = _batch(parts, block_tokens, device)
    if len(ids) > piece_rows:
        cut = cut_in_pieces(parts, piece_rows, block_tokens)
        batch = replace(batch, pieces=tuple(_batch(p, block_tokens, device) for p in cut))
    return tokens, batch


def open_chunks(chunks: Sequence[ScheduledChunk], open_pages: OpenPages) -> list[OpenChunk]:
    """The open pages of a step's chunks, or of some of them, for the first time or again."""
    open_pages.begin()
    return [open_pages.open_chunk(c.start, len(c.token_ids), c.block_ids) for c in chunks]


def cut_in_pieces(parts: Sequence[_Part], rows: int, size: int) -> list[list[_Part]]:
    """The same rows in pieces of at most ``rows``. size: tokens of a page."""
    pieces: list[list[_Part]] = [[]]
    free = rows
    for part in parts:
        start = part.chunk.start
        while start < part.end:
            stop = min(part.end, start + free)
            if stop < part.end:
                whole = stop // _WHOLE * _WHOLE
                stop = whole if whole > start or free < rows else stop
            if start < stop:
                pieces[-1].append(_between(part, start, stop, size))
                free -= stop - start
                start = stop
            if start < part.end:
                pieces.append([])
                free = rows
    return pieces


def _between(part: _Part, start: int, stop: int, size: int) -> _Part:
    """Positions ``start`` to ``stop - 1`` of a part."""
    chunk, opened = part.chunk, part.open
    of = chunk.token_ids[start - chunk.start : stop - chunk.start]
    sub = replace(chunk, token_ids=of, start=start, sample=chunk.sample and stop == part.end)
    if opened is None:
        return _Part(sub, None)
    first = chunk.start // size
    slots = opened.slots[start // size - first : -(-stop // size) - first]
    # Every page but perhaps the last one becomes full: the n-th of ``seals`` is the n-th page.
    seals = opened.seals[start // size - first : stop // size - first]
    return _Part(sub, OpenChunk(slots, seals))


def _batch(parts: Sequence[_Part], block_tokens: int, device: torch.device) -> AttentionBatch:
    chunks = [part.chunk for part in parts]
    lengths = [len(c.token_ids) for c in chunks]
    ends = [part.end for part in parts]
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
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

    return AttentionBatch(
        query_start=tensor(starts),
        context_lens=tensor(np.array(ends, np.int32)),
        block_tables=tensor(tables),
        positions=tensor(positions),
        slots=tensor(slots),
        decode=decode,
        open=_open_batch(parts, block_tokens, device),
    )


def _open_batch(parts: Sequence[_Part], size: int, device: torch.device) -> OpenBatch | None:
    found = [(part.chunk, part.open) for part in parts if part.open is not None]
    if not found:
        return None
    pages = np.zeros((len(found), max(len(one.slots) for _, one in found)), np.int32)
    rows: list[npt.NDArray[np.int64]] = []
    for index, (chunk, one) in enumerate(found):
        pages[index, : len(one.slots)] = one.slots
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int64)
        slots = np.array(one.slots, np.int64)[positions // size - chunk.start // size]
        rows.append(slots * size + positions % size)
    seals = np.array([s for _, one in found for s in one.seals], np.int32).reshape(-1, 3)

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

    return OpenBatch(tensor(np.concatenate(rows)), tensor(pages), tensor(seals))
