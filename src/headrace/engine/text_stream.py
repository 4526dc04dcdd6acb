"""The text side of one sequence: whole characters, stop tokens, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.request import SamplingParams
from headrace.text.detokenizer import Detokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one token adds. ``stopped``: it ended the sequence; ``reason`` is the stop string, or
    the stop token id that the request named (None for the model's own end tokens)."""

    text: str
    stopped: bool = False
    reason: str | int | None = None


class TextStream:
    """Turns one sequence's tokens into text and notices its end.

    The text of an end token, stop token or stop string is left out unless ``include_stop``.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(params.stop, params.include_stop)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._end_ids: frozenset[int] = (
            frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
        )
        self._include = params.include_stop

    def push(self, token_id: int) -> Piece:
        """Take the next token. The piece that stops is the last one; it holds all text left."""
        ends = token_id in self._stop_ids or token_id in self._end_ids
        text, matched = "", None
        if not ends or self._include:
            text, matched = self._matcher.push(self._detokenizer.push([token_id]))
        if matched is not None:
            return Piece(text, True, matched)
        if ends:
            reason = token_id if token_id in self._stop_ids else None
            rest, matched = self._rest()
            return Piece(text + rest, True, reason if matched is None else matched)
        return Piece(text)

    def finish(self) -> str:
        """Return the text that is held back, where a limit or a cancel ended the sequence."""
        return self._rest()[0]

    def _rest(self) -> tuple[str, str | None]:
        text, matched = self._matcher.push(self._detokenizer.finish())
        return (text, matched) if matched is not None else (text + self._matcher.finish(), None)
