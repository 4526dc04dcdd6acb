"""Decoding steps as captured graphs: one for each batch size, fed through fixed tensors.

A step of fewer sequences than the next captured size is padded: rows of padding write into a block
that belongs to nobody, see themselves only, and no expert is computed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.core.step import ScheduledChunk
from headrace.machine.device import Device, Graph
from headrace.ops.records import AttentionBatch, LayerKV

BATCH_SIZES = (1, 2, 4, 8, 16)
Work = Callable[[], tuple[torch.Tensor, ...]]


class ForwardLogits(Protocol):
    """The part of ``models.decoder.Decoder`` that a decoding step runs."""

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[LayerKV], /
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device, valid until the next one.

    logits: float32 [B, vocab]; best: float32 [2, B], each row's largest logit and its token id (the
    smallest among equals, exact below 2^24). Rows beyond the step's own are padding.
    """

    logits: torch.Tensor
    best: torch.Tensor


def best_of(logits: torch.Tensor) -> torch.Tensor:
    """``StepResult.best`` of logits [R, vocab]; a row with a NaN has NaN as its largest."""
    ids = logits.argmax(-1, keepdim=True)  # the first of equals, and a NaN before anything
    return torch.stack((logits.gather(-1, ids).squeeze(-1), ids.squeeze(-1).float()))


class DecodeInputs:
    """The fixed tensors that graphs read, and their image in pinned host memory.

    One block of bytes each, so that a step's inputs travel in one copy: int64 tokens, positions and
    slots [B], int32 context lengths [B], a byte for each row that counts [B], then int32 block tables
    [B, max_blocks], of which only the rows in use are copied.
    """

    def __init__(self, device: Device, batch: int, max_blocks: int, scratch_slot: int) -> None:
        self._rows = batch
        self._max_blocks = max_blocks
        self._scratch = scratch_slot
        # Parts start at multiples of 16 bytes, which kernels may rely on.
        self._row_nbytes = -(-4 * max_blocks // 16) * 16
        wide, narrow = -(-8 * batch // 16) * 16, -(-4 * batch // 16) * 16
        self._offsets = (0, wide, 2 * wide, 3 * wide, 3 * wide + narrow, 3 * wide + 2 * narrow)
        nbytes = self._offsets[-1] + batch * self._row_nbytes
        self._host_bytes = device.pinned(nbytes, dtype=torch.uint8)
        self._host_bytes.zero_()
        self._device_bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
        self._host = _Views(self._host_bytes, self._offsets, batch, self._row_nbytes)
        self._views = _Views(self._device_bytes, self._offsets, batch, self._row_nbytes)
        self._query_start = torch.arange(batch + 1, dtype=torch.int32, device=device.torch_device)
        self._host.fill_padding(0, self._rows, scratch_slot, 0)

    def batch(self, size: int) -> tuple[torch.Tensor, AttentionBatch]:
        """Token ids and batch of the first ``size`` rows, as views of the fixed tensors."""
        views = self._views
        return views.tokens[:size], AttentionBatch(
            query_start=self._query_start[: size + 1],
            context_lens=views.contexts[:size],
            block_tables=views.tables[:size, : self._max_blocks],
            positions=views.positions[:size],
            slots=views.slots[:size],
            decode=True,
            valid=views.valid[:size] if size > 1 else None,
        )

    def fill(self, chunks: Sequence[ScheduledChunk], size: int, block_tokens: int) -> None:
        """Send a step's inputs: one row for each chunk, padding up to ``size``."""
        host = self._host
        for row, chunk in enumerate(chunks):
            host.token_list[row] = chunk.token_ids[0]
            host.position_list[row] = chunk.start
            used = chunk.start // block_tokens + 1
            host.table_rows[row][:used] = chunk.block_ids[:used]
            last = chunk.block_ids[used - 1]
            host.slot_list[row] = last * block_tokens + chunk.start % block_tokens
            host.context_list[row] = chunk.start + 1
            host.valid_list[row] = True
        host.fill_padding(len(chunks), size, self._scratch, self._scratch // block_tokens)
        end = self._offsets[-1] + size * self._row_nbytes
        self._device_bytes[:end].copy_(self._host_bytes[:end], non_blocking=True)


class _Views:
    """Typed views of one block of inputs; those of the host as NumPy arrays, too."""

    def __init__(
        self, data: torch.Tensor, offsets: tuple[int, ...], batch: int, row_nbytes: int
    ) -> None:
        def part(index: int, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
            return data[offsets[index] : offsets[index] + nbytes].view(dtype)

        self.tokens = part(0, torch.int64, 8 * batch)
        self.positions = part(1, torch.int64, 8 * batch)
        self.slots = part(2, torch.int64, 8 * batch)
        self.contexts = part(3, torch.int32, 4 * batch)
        self.valid = part(4, torch.bool, batch)
        self.tables = part(5, torch.int32, batch * row_nbytes).view(batch, row_nbytes // 4)
        if data.device.type == "cpu":
            self.token_list, self.position_list = self.tokens.numpy(), self.positions.numpy()
            self.slot_list, self.context_list = self.slots.numpy(), self.contexts.numpy()
            self.valid_list, self.table_rows = self.valid.numpy(), self.tables.numpy()

    def fill_padding(self, start: int, stop: int, slot: int, block: int) -> None:
        """Rows that stand for nobody: token 0 at position 0, alone in a block of nobody's."""
        rows = slice(start, stop)
        self.token_list[rows] = 0
        self.position_list[rows] = 0
        self.slot_list[rows] = slot
        self.context_list[rows] = 1
        self.valid_list[rows] = False
        self.table_rows[rows, 0] = block


class DecodeGraphs:
    """One captured graph for each batch size up to ``max_batch``.

    Args:
        kv: every layer's cache, whose last block belongs to nobody.
        max_batch: sequences of a step at most.
        context: tokens of a sequence at most.
    """

    def __init__(
        self,
        decoder: ForwardLogits,
        kv: Sequence[LayerKV],
        device: Device,
        *,
        max_batch: int,
        context: int,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._block_tokens = kv[0].block_tokens
        largest = min(max_batch, BATCH_SIZES[-1])
        self._sizes = (*(s for s in BATCH_SIZES if s < largest), largest)
        scratch = (kv[0].keys.shape[0] - 1) * self._block_tokens
        blocks = -(-context // self._block_tokens)
        self._inputs = DecodeInputs(device, largest, blocks, scratch)
        self._graphs: dict[int, tuple[Graph, StepResult]] = {}

    @property
    def max_batch(self) -> int:
        """Sequences of the largest step that is served."""
        return self._sizes[-1]

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, float], None] | None = None) -> None:
        """Capture every size, the largest first, so that the others fit into its memory."""
        for done, size in enumerate(reversed(self._sizes)):
            self._graphs[size] = self.record(size)
            if progress is not None:
                progress("graphs", (done + 1) / len(self._sizes))
        self._device.synchronize()

    @torch.inference_mode()
    def record(
        self, size: int, around: Callable[[Work], Work] | None = None
    ) -> tuple[Graph, StepResult]:
        """Capture a step of ``size`` rows, with something around it if asked for."""
        self._inputs.fill((), size, self._block_tokens)
        tokens, batch = self._inputs.batch(size)

        def work() -> tuple[torch.Tensor, ...]:
            logits = self._decoder.logits(self._decoder.forward(tokens, batch, self._kv))
            return logits, best_of(logits)

        graph = self._device.graph()
        logits, best = graph.capture(work if around is None else around(work))
        return graph, StepResult(logits, best)

    def size_of(self, rows: int) -> int:
        """Rows of the graph that serves a step of ``rows`` rows."""
        return next(s for s in self._sizes if s >= rows)

    def swap(self, size: int, recorded: tuple[Graph, StepResult]) -> tuple[Graph, StepResult]:
        """Serve steps of ``size`` rows by another recording from now on; the one before is returned."""
        before, self._graphs[size] = self._graphs[size], recorded
        return before

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> StepResult:
        """Compute one token for each chunk. The results are on their way when this returns."""
        size = self.size_of(len(chunks))
        self._inputs.fill(chunks, size, self._block_tokens)
        graph, result = self._graphs[size]
        graph.replay()
        return result
