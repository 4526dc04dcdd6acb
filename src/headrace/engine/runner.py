"""Executes a step plan: copies blocks, runs the decoder, samples the rows that want a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import InternalError
from headrace.core.model_spec import ModelSpec
from headrace.core.request import TokenLogprob
from headrace.core.step import (
    ClassStats,
    MovedBytes,
    PromptLogprobs,
    SampledToken,
    ScheduledChunk,
    StepOutput,
    StepPlan,
)
from headrace.engine.batch import build_batch
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.engine.device_choice import TokenChooser, is_chosen_on_device, rule_of
from headrace.engine.sampler import SamplingState, checked_best, choose, logprob_of
from headrace.kv.storage import copy_block, open_pages_of
from headrace.layers.moe import RoutingObserver
from headrace.ops.records import AttentionBatch, LayerCache


class DecoderLike(Protocol):
    """What the engine needs of ``models.decoder.Decoder``; tests put toys here."""

    @property
    def on_routing(self) -> RoutingObserver | None: ...

    @on_routing.setter
    def on_routing(self, observer: RoutingObserver | None, /) -> None: ...

    @property
    def spec(self) -> ModelSpec: ...

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[LayerCache], /
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor: ...


class Ranges:
    """Seconds by named range of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Generator[None, None, None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def stats(self) -> tuple[ClassStats, ...]:
        """Coarse ranges, with measured seconds only: operations and bytes are not counted here."""
        return tuple(ClassStats(n, 1, 0, MovedBytes(), s) for n, s in self.seconds.items())


class Runner:
    """Runs chunks on one decoder and its KV cache.

    Args:
        decoder: the model.
        kv: one cache for each layer.
        logits_rows: rows whose logits are computed at once; bounds the memory that logits take.
        device: where the decoder's tensors are.
        graphs: serve the decoding steps that they can.
        is_owned: whether a sequence refers to a block; for caches whose pages are sealed.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        kv: Sequence[LayerCache],
        logits_rows: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        is_owned: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._block_tokens = kv[0].block_tokens
        self._logits_rows = logits_rows
        self._device = device
        self._graphs = graphs
        self._open = open_pages_of(kv, is_owned)
        self._begun = -1
        self._chooser = None
        if device.type == "cuda":
            self._chooser = TokenChooser(decoder, ("triton", "reference"), device, logits_rows)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> None:
        """Copy the plan's (source, target) blocks one after the other; a target may be a later source.

        Called for each step before it is computed; again for one that could not be launched ahead.
        """
        if self._open is not None and plan.step != self._begun:
            self._open.next_step()
        self._begun = plan.step
        for source, target in plan.block_copies:
            copy_block(self._kv, source, target, self._open)

    def take_back(self) -> None:
        """The step of the last ``begin`` is not computed: another one of its number takes its place."""
        if self._open is not None:
            self._open.take_back()

    @torch.inference_mode()
    def compute(
        self,
        step: int,
        chunks: Sequence[ScheduledChunk],
        states: Mapping[int, SamplingState],
        ranges: Ranges,
    ) -> StepOutput:
        """Run the chunks and sample. Running the same chunks again gives the same result.

        Args:
            step: the plan's number.
            chunks: all of a plan's chunks, or some of them.
            states: sampling state by sequence id; not changed.
            ranges: takes the measured seconds.
        """
        if self._captured(chunks, states):
            return self._replay(step, chunks, states, ranges)
        with ranges.timed("batch"):
            tokens, batch = build_batch(chunks, self._block_tokens, self._device, self._open)
        with ranges.timed("decoder"):
            hidden = self._decoder.forward(tokens, batch, self._kv)
        scores: list[PromptLogprobs] = []
        sampled: list[SampledToken] = []
        rows: list[tuple[int, ScheduledChunk]] = []
        first = 0
        for chunk in chunks:
            state = states[chunk.seq_id]
            if _scores(chunk, state):
                with ranges.timed("prompt_logprobs"):
                    scores.append(self._score_prompt(chunk, state, hidden[first:]))
            first += len(chunk.token_ids)
            if chunk.sample:
                rows.append((first - 1, chunk))
        for part in range(0, len(rows), self._logits_rows):
            some = rows[part : part + self._logits_rows]
            wanting = [chunk for _, chunk in some]
            with ranges.timed("logits"):
                logits = self._logits(hidden, [row for row, _ in some])
            with ranges.timed("sampler"):
                picked = self._pick(logits, wanting, states)
                sampled.extend(_choose(logits, picked, range(len(some)), wanting, states))
        return StepOutput(step, tuple(sampled), tuple(scores))

    def can_launch(
        self, chunks: Sequence[ScheduledChunk], states: Mapping[int, SamplingState]
    ) -> bool:
        """Whether a graph computes these chunks and chooses every row's token, the host none."""
        return self._captured(chunks, states) and all(
            c.sample and is_chosen_on_device(states[c.seq_id]) for c in chunks
        )

    def launch(self, plan: StepPlan, states: Mapping[int, SamplingState]) -> None:
        """Begin a step that ``can_launch``; ``land`` waits for it. One may be on its way already."""
        assert self._graphs is not None
        rules = [rule_of(chunk, states[chunk.seq_id]) for chunk in plan.chunks]
        self._graphs.launch(plan.chunks, self._open, rules, ahead=plan.ahead)

    def land(self, plan: StepPlan) -> list[SampledToken | InternalError]:
        """Wait for the oldest launched step, whose plan this is: for each chunk its token, or why it has
        none."""
        assert self._graphs is not None
        found = self._graphs.picked()
        return [_chosen(found[:, row], chunk) for row, chunk in enumerate(plan.chunks)]

    def _captured(
        self, chunks: Sequence[ScheduledChunk], states: Mapping[int, SamplingState]
    ) -> bool:
        """Whether a graph serves these chunks: decoding only, and nobody looks inside."""
        graphs = self._graphs
        if graphs is None or len(chunks) > graphs.max_batch or self._decoder.on_routing is not None:
            return False
        return all(len(c.token_ids) == 1 and not _scores(c, states[c.seq_id]) for c in chunks)

    def _replay(
        self,
        step: int,
        chunks: Sequence[ScheduledChunk],
        states: Mapping[int, SamplingState],
        ranges: Ranges,
    ) -> StepOutput:
        assert self._graphs is not None
        with ranges.timed("decoder"):
            rules = [rule_of(chunk, states[chunk.seq_id]) for chunk in chunks]
            result = self._graphs.run(chunks, self._open, rules)
        rows = [row for row, chunk in enumerate(chunks) if chunk.sample]
        wanting = [chunks[row] for row in rows]
        with ranges.timed("sampler"):
            sampled = _choose(result.logits, result.picked, rows, wanting, states)
        return StepOutput(step, tuple(sampled))

    def _pick(
        self,
        logits: torch.Tensor,
        chunks: Sequence[ScheduledChunk],
        states: Mapping[int, SamplingState],
    ) -> torch.Tensor | None:
        """``decode_graphs.StepResult.picked`` of the chunks' logits, where the device chooses any."""
        if self._chooser is None or not any(is_chosen_on_device(states[c.seq_id]) for c in chunks):
            return None
        return self._chooser.choose_by(logits, [rule_of(c, states[c.seq_id]) for c in chunks])

    def _logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """float32 [len(rows), vocab], where the decoder is."""
        if len(rows) == hidden.shape[0]:
            picked = hidden
        else:
            picked = hidden[torch.tensor(rows, device=hidden.device)]
        return self._decoder.logits(picked)

    def _score_prompt(
        self, chunk: ScheduledChunk, state: SamplingState, hidden: torch.Tensor
    ) -> PromptLogprobs:
        """Log-probabilities of the prompt tokens that follow the chunk's tokens.

        hidden: float32 [>= len(chunk.token_ids), D], the chunk's rows first.
        """
        targets = state.prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
        top = state.params.prompt_logprobs or 0
        entries: list[TokenLogprob] = []
        for part in range(0, len(targets), self._logits_rows):
            some = targets[part : part + self._logits_rows]
            logits = self._logits(hidden, range(part, part + len(some))).cpu().numpy()
            entries.extend(logprob_of(v, t, top) for v, t in zip(logits, some))
        return PromptLogprobs(chunk.seq_id, chunk.start + 1, tuple(entries))


def _chosen(picked: npt.NDArray[np.int32], chunk: ScheduledChunk) -> SampledToken | InternalError:
    """The token of a row of ``StepResult.picked``, its id and the bits of its largest logit."""
    token, largest = picked.tolist()
    try:
        checked_best(
            float(np.int32(largest).view(np.float32)), token, chunk.start + len(chunk.token_ids)
        )
    except InternalError as error:
        return error
    return SampledToken(chunk.seq_id, token)


def _scores(chunk: ScheduledChunk, state: SamplingState) -> bool:
    """Whether the log-probabilities of prompt tokens after the chunk's are wanted."""
    return state.scores_prompt and chunk.start + 1 < len(state.prompt)


def _choose(
    logits: torch.Tensor,
    picked: torch.Tensor | None,
    rows: Sequence[int],
    chunks: Sequence[ScheduledChunk],
    states: Mapping[int, SamplingState],
) -> list[SampledToken]:
    """The next token of each chunk, whose logits are in the row of the same place in ``rows``.

    Where the device has ``picked`` tokens (``decode_graphs.StepResult``), rows that have a rule leave
    their logits where they are.

    Raises:
        InternalError: a row's largest logit is not finite.
    """
    found = None if picked is None else picked.cpu().numpy()
    rest = [
        row
        for row, chunk in zip(rows, chunks)
        if found is None or not is_chosen_on_device(states[chunk.seq_id])
    ]
    values = dict(zip(rest, _to_host(logits, rest)))
    sampled: list[SampledToken] = []
    for row, chunk in zip(rows, chunks):
        if row in values:
            sampled.append(_sample(values[row], chunk, states[chunk.seq_id]))
            continue
        assert found is not None
        token = _chosen(found[:, row], chunk)
        if isinstance(token, InternalError):
            raise token
        sampled.append(token)
    return sampled


def _to_host(logits: torch.Tensor, rows: Sequence[int]) -> npt.NDArray[np.float32]:
    if not rows:
        return np.empty((0, 0), np.float32)
    if len(rows) < logits.shape[0]:
        logits = logits[torch.tensor(rows, device=logits.device)]
    return logits.cpu().numpy()


def _sample(
    logits: npt.NDArray[np.float32], chunk: ScheduledChunk, state: SamplingState
) -> SampledToken:
    token_id = choose(logits, state, chunk.start + len(chunk.token_ids))
    wanted = state.params.logprobs
    logprob = None if wanted is None else logprob_of(logits, token_id, wanted)
    return SampledToken(chunk.seq_id, token_id, logprob)
