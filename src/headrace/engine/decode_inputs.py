"""The fixed tensors that captured decoding steps read, and how a step's inputs get there.

A step may be sent while the one before it is still being computed. Its image is another one then: the
device may not have copied the first yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.step import ScheduledChunk
from headrace.kv.open_pages import OpenChunk
from headrace.machine.device import Device
from headrace.ops.records import GREEDY_RULE, NO_RULE, AttentionBatch, OpenBatch, Rule

# Parts of the inputs start at multiples of this many bytes, which kernels may rely on.
_ALIGN = 16
# Of a cache whose pages are sealed: where padding rows go. Slots below ``num_shared`` belong to pages that
# start and end within one step, which no decoding step has; there is one at least (``pool_shape``).
SCRATCH_OPEN_SLOT = 0
_NO_SEAL = (-1, 0, 0)
# Steps whose inputs may be on their way at once: one that is computed, and the one behind it.
IMAGES = 2


class DecodeInputs:
    """The fixed tensors that graphs read, and their images in pinned host memory, used in turn.

    One block of bytes each, so that a step's inputs travel in one copy: ``_Views`` has its parts.
    Block tables come last, and only the rows in use are copied.

    Args:
        batch: rows at most; max_blocks: of a sequence
        scratch_block: belongs to nobody: padding rows write there
        block_tokens: rows of a block
        sealed: batches say where open pages are
    """

    def __init__(
        self,
        device: Device,
        batch: int,
        max_blocks: int,
        *,
        scratch_block: int,
        block_tokens: int,
        sealed: bool = False,
    ) -> None:
        self._device = device
        self._max_blocks = max_blocks
        self._scratch = scratch_block
        self._block_tokens = block_tokens
        self._sealed = sealed
        layout = _Layout(batch, max_blocks)
        target = device.torch_device
        self._device_bytes = torch.zeros(layout.nbytes, dtype=torch.uint8, device=target)
        self._layout = layout
        self._views = _Views(self._device_bytes, layout)
        self._query_start = torch.arange(batch + 1, dtype=torch.int32, device=target)
        self._images = [_Image(device, layout) for _ in range(IMAGES)]
        for image in self._images:
            image.rows.fill_padding(slice(0, batch), scratch_block, block_tokens)

    def batch(self, size: int) -> tuple[torch.Tensor, AttentionBatch]:
        """Token ids and batch of the first ``size`` rows, as views of the fixed tensors."""
        views, opened = self._views, None
        if self._sealed:
            opened = OpenBatch(views.open_rows[:size], views.open_pages[:size], views.seals[:size])
        return views.tokens[:size], AttentionBatch(
            query_start=self._query_start[: size + 1],
            context_lens=views.contexts[:size],
            block_tables=views.tables[:size, : self._max_blocks],
            positions=views.positions[:size],
            slots=views.slots[:size],
            decode=True,
            valid=views.valid[:size] if size > 1 else None,
            open=opened,
        )

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids, int64 [batch], where a step leaves those that the next one may begin with."""
        return self._views.tokens

    def rules(self, size: int) -> torch.Tensor:
        """float64 [size, 5]: how to choose each row's token (``ops.records.Rule``)."""
        return self._views.rules[:size]

    def fill(
        self,
        chunks: Sequence[ScheduledChunk],
        size: int,
        opened: Sequence[OpenChunk] = (),
        rules: Sequence[Rule] | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """Send a step's inputs: one row for each chunk, padding up to ``size``.

        The step that was sent ``IMAGES`` calls ago must be done.

        opened: the open page of each chunk, where pages are sealed.
        rules: how to choose each chunk's token; None: greedily.
        ahead: the tokens are those that the step before leaves in ``tokens``.
        """
        self._images.append(self._images.pop(0))
        image, block_tokens = self._images[-1], self._block_tokens
        host = image.rows
        for row, chunk in enumerate(chunks):
            host.tokens[row] = chunk.token_ids[0]
            host.positions[row] = chunk.start
            used = chunk.start // block_tokens + 1
            image.fill_table(row, chunk.block_ids[:used])
            place = chunk.start % block_tokens
            host.slots[row] = chunk.block_ids[used - 1] * block_tokens + place
            host.contexts[row] = chunk.start + 1
            host.valid[row] = True
            host.rules[row] = GREEDY_RULE if rules is None else rules[row]
            if self._sealed:
                (slot,) = opened[row].slots
                host.open_rows[row] = slot * block_tokens + place
                host.open_pages[row, 0] = slot
                host.seals[row] = opened[row].seals[0] if opened[row].seals else _NO_SEAL
        host.fill_padding(slice(len(chunks), size), self._scratch, block_tokens)
        image.tables[len(chunks) : size] = [()] * (size - len(chunks))
        sent = slice(self._layout.offsets[1] if ahead else 0, self._layout.nbytes_of(size))
        self._device.copy(self._device_bytes[sent], image.data[sent])


class _Image:
    """A step's inputs on the host.

    tables: what each row of the block tables holds. Writing 2,000 numbers of Python anew takes 49 us of
    every step, finding that they are the same 10 (Zen 4, 2026-11-30).
    """

    def __init__(self, device: Device, layout: _Layout) -> None:
        self.data = device.pinned(layout.nbytes, dtype=torch.uint8)
        self.data.zero_()
        self.rows = _HostRows(_Views(self.data, layout))
        self.tables: list[tuple[int, ...]] = [()] * layout.batch

    def fill_table(self, row: int, ids: tuple[int, ...]) -> None:
        """Write a row's blocks, those that it does not hold yet."""
        known = self.tables[row]
        if ids == known:
            return
        same = len(known) if ids[: len(known)] == known else 0
        self.rows.tables[row][same : len(ids)] = ids[same:]
        self.tables[row] = ids


class _Layout:
    """Where the parts lie: for each, bytes of a row."""

    WIDTHS = (8, 8, 8, 4, 1, 8, 4, 12, 40)  # in the order of ``_Views``, block tables left out

    def __init__(self, batch: int, max_blocks: int) -> None:
        self.batch = batch
        self.row_nbytes = _aligned(4 * max_blocks)  # of block tables
        offsets = [0]
        for width in self.WIDTHS:
            offsets.append(offsets[-1] + _aligned(width * batch))
        self.offsets = tuple(offsets)
        self.nbytes = self.nbytes_of(batch)

    def nbytes_of(self, rows: int) -> int:
        """Bytes up to the block table of the last of ``rows``."""
        return self.offsets[-1] + rows * self.row_nbytes


class _Views:
    """Typed views of one block of inputs: int64 tokens, positions, slots [B]; int32 context lengths [B];
    bool, rows that count [B]; of open pages int64 rows [B], int32 slots [B, 1], int32 seals [B, 3];
    float64 rules [B, 5]; int32 block tables [B, blocks]."""

    def __init__(self, data: torch.Tensor, layout: _Layout) -> None:
        batch = layout.batch

        def part(index: int, dtype: torch.dtype, columns: int = 1) -> torch.Tensor:
            start = layout.offsets[index]
            return data[start : start + columns * dtype.itemsize * batch].view(dtype)

        self.tokens = part(0, torch.int64)
        self.positions = part(1, torch.int64)
        self.slots = part(2, torch.int64)
        self.contexts = part(3, torch.int32)
        self.valid = part(4, torch.bool)
        self.open_rows = part(5, torch.int64)
        self.open_pages = part(6, torch.int32).view(batch, 1)
        self.seals = part(7, torch.int32, 3).view(batch, 3)
        self.rules = part(8, torch.float64, 5).view(batch, 5)
        columns = layout.row_nbytes // 4
        self.tables = part(9, torch.int32, columns).view(batch, columns)


class _HostRows:
    """The host's views as NumPy arrays, which are quick to write to."""

    def __init__(self, views: _Views) -> None:
        self.tokens, self.positions = views.tokens.numpy(), views.positions.numpy()
        self.slots, self.contexts = views.slots.numpy(), views.contexts.numpy()
        self.valid, self.tables = views.valid.numpy(), views.tables.numpy()
        self.open_rows, self.open_pages = views.open_rows.numpy(), views.open_pages.numpy()
        self.seals, self.rules = views.seals.numpy(), views.rules.numpy()

    def fill_padding(self, rows: slice, block: int, block_tokens: int) -> None:
        """Rows that stand for nobody: token 0 at position 0, alone in a block of nobody's."""
        self.tokens[rows] = 0
        self.positions[rows] = 0
        self.slots[rows] = block * block_tokens
        self.contexts[rows] = 1
        self.valid[rows] = False
        self.tables[rows, 0] = block
        self.open_rows[rows] = SCRATCH_OPEN_SLOT * block_tokens
        self.open_pages[rows] = SCRATCH_OPEN_SLOT
        self.seals[rows] = _NO_SEAL
        self.rules[rows] = NO_RULE


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
