"""Decoding steps as captured graphs: one for each batch size, fed through fixed tensors.

A step of fewer sequences than the next captured size is padded: rows of padding write into a block
(or an open page) that belongs to nobody, see themselves only, and no expert is computed for them.

Whether a page becomes full is data, too: where pages are sealed, the append kernel finds it out from the
context lengths, so the same graph serves steps that seal and steps that do not.

A graph leaves the tokens that it chose where the next step reads its own, so that this one can be launched
before the host knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.step import ScheduledChunk
from headrace.engine.batch import open_chunks
from headrace.engine.decode_inputs import IMAGES, DecodeInputs
from headrace.engine.device_choice import TokenChooser
from headrace.kv.open_pages import OpenPages
from headrace.kv.storage import num_blocks_of
from headrace.machine.device import Device, Graph
from headrace.machine.readback import ReadBack
from headrace.ops.records import AttentionBatch, LayerCache, Rule, SealedKV

BATCH_SIZES = (1, 2, 4, 8, 16)
Work = Callable[[], tuple[torch.Tensor, ...]]


class ForwardLogits(Protocol):
    """The part of ``models.decoder.Decoder`` that a decoding step runs."""

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[LayerCache], /
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device, valid until the next one.

    logits: float32 [B, vocab]; picked: int32 [2, B], the token ids of the rows that have a rule
    (``engine.device_choice``), and the bits of the float32 that is each such row's largest logit: NaN if
    it holds one. Rows without a rule and those of padding have zeros.
    """

    logits: torch.Tensor
    picked: torch.Tensor


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
        kv: Sequence[LayerCache],
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
        self._inputs = DecodeInputs(
            device,
            largest,
            -(-context // self._block_tokens),
            scratch_block=num_blocks_of(kv[0]) - 1,
            block_tokens=self._block_tokens,
            sealed=isinstance(kv[0], SealedKV),
        )
        self._graphs: dict[int, tuple[Graph, StepResult]] = {}
        self._chooser = TokenChooser(decoder, device.backends, device.torch_device, largest)
        self._read = ReadBack(device, 2 * largest, torch.int32, IMAGES)

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
        self._inputs.fill((), size)
        tokens, batch = self._inputs.batch(size)

        def work() -> tuple[torch.Tensor, ...]:
            logits = self._decoder.logits(self._decoder.forward(tokens, batch, self._kv))
            return logits, self._chooser.choose(logits, self._inputs.rules(size), tokens)

        graph = self._device.graph()
        logits, picked = graph.capture(work if around is None else around(work))
        return graph, StepResult(logits, picked)

    def size_of(self, rows: int) -> int:
        """Rows of the graph that serves a step of ``rows`` rows."""
        return next(s for s in self._sizes if s >= rows)

    def swap(self, size: int, recorded: tuple[Graph, StepResult]) -> tuple[Graph, StepResult]:
        """Serve steps of ``size`` rows by another recording from now on; the one before is returned."""
        before, self._graphs[size] = self._graphs[size], recorded
        return before

    @torch.inference_mode()
    def run(
        self,
        chunks: Sequence[ScheduledChunk],
        open_pages: OpenPages | None = None,
        rules: Sequence[Rule] | None = None,
        *,
        ahead: bool = False,
    ) -> StepResult:
        """Compute one token for each chunk. The results are on their way when this returns.

        At most one step before this one may still be on its way.

        open_pages: hands out the open pages of a cache whose pages are sealed.
        rules: how to choose each chunk's token; None: greedily.
        ahead: the tokens are those that the step before, of as many chunks, chose.
        """
        size = self.size_of(len(chunks))
        opened = () if open_pages is None else open_chunks(chunks, open_pages)
        self._inputs.fill(chunks, size, opened, rules, ahead=ahead)
        graph, result = self._graphs[size]
        graph.replay()
        return result

    @torch.inference_mode()
    def launch(
        self,
        chunks: Sequence[ScheduledChunk],
        open_pages: OpenPages | None = None,
        rules: Sequence[Rule] | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """``run``, and send what was chosen to the host, for ``picked`` to read."""
        self._read.post(self.run(chunks, open_pages, rules, ahead=ahead).picked)

    def picked(self) -> npt.NDArray[np.int32]:
        """Wait for the oldest launched step: ``StepResult.picked``, valid until the next but one launch."""
        return self._read.take().numpy()
