"""Requests that are being served, as the engine sees them: their text, counts and last words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.errors import DoesNotFitError, HeadraceError, InternalError
from headrace.core.request import (
    FinishReason,
    GenerationRequest,
    OutputDelta,
    RequestFailed,
    TokenLogprob,
    Usage,
)
from headrace.core.step import PromptLogprobs, SampledToken
from headrace.engine.sampler import SamplingState
from headrace.engine.text_stream import Piece, TextStream


@dataclass(eq=False)
class LiveSequence:
    """One unfinished sequence: how it samples and what it says."""

    live: LiveRequest
    index: int
    sampling: SamplingState
    text: TextStream


@dataclass(eq=False)
class LiveRequest:
    """A request and its unfinished sequences by id.

    prompt_logprobs: by position, None until computed; None as a whole once there is nothing to give
    """

    request: GenerationRequest
    sequences: dict[int, LiveSequence] = field(default_factory=dict[int, LiveSequence])
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self) -> None:
        if self.request.sampling.prompt_logprobs is not None:
            empty: list[TokenLogprob | None] = [None for _ in self.request.prompt_token_ids]
            self.prompt_logprobs = empty

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )

    def take_scores(self, scores: PromptLogprobs) -> None:
        """Store a chunk's prompt log-probabilities; computed again, they replace the old ones."""
        if self.prompt_logprobs is not None:
            end = scores.start + len(scores.entries)
            self.prompt_logprobs[scores.start : end] = scores.entries

    def delta(self, seq_id: int, item: SampledToken, piece: Piece, text: str) -> OutputDelta:
        """The delta of a token that has just been taken in, without its end."""
        live = self.sequences[seq_id]
        prompt_logprobs = None
        if live.index == 0 and self.prompt_logprobs is not None:
            prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), None
        return OutputDelta(
            request_id=self.request.request_id,
            index=live.index,
            text=text,
            token_ids=(item.token_id,),
            logprobs=() if item.logprob is None else (item.logprob,),
            prompt_logprobs=prompt_logprobs,
            stop_reason=piece.reason,
        )

    def cancelled(self) -> list[OutputDelta]:
        """The last deltas of the sequences that a cancel ended."""
        open_ones: Sequence[LiveSequence] = list(self.sequences.values())
        return [
            OutputDelta(
                self.request.request_id,
                live.index,
                live.text.finish(),
                finish_reason=FinishReason.CANCELLED,
                usage=self.usage if live is open_ones[-1] else None,
            )
            for live in open_ones
        ]


def failure(request_id: str, error: BaseException, out_of_memory: bool) -> RequestFailed:
    """Say why a request failed, in the terms of the error tree."""
    if isinstance(error, HeadraceError):
        shown: HeadraceError = error
    elif out_of_memory:
        first = str(error).strip().splitlines() or ["out of memory"]
        shown = DoesNotFitError(
            f"memory ran out while this request was computed: {first[0]}",
            hint="send a shorter prompt, or start with a smaller --context or larger --ram-budget",
        )
    else:
        shown = InternalError(
            f"computing this request failed: {type(error).__name__}: {error}",
            hint="the server's log has the traceback; please report it",
        )
    return RequestFailed(
        request_id,
        shown.message,
        hint=shown.hint,
        param=shown.param,
        code=shown.code,
        error_class=type(shown).__name__,
    )
