"""Token ids to text, a few at a time, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from headrace.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_NBYTES = 4  # of UTF-8


class Detokenizer:
    """Turns one sequence's tokens into text as they come.

    Everything that ``push`` and ``finish`` return, joined, equals the whole output's bytes decoded
    at once with U+FFFD for what is no UTF-8 (one per maximal invalid part, as in Unicode's
    recommendation and Python's ``errors="replace"``). A character is held back until its last byte.

    Args:
        tokenizer: the vocabulary.
        prompt_ids: the prompt. Only its end matters: a character that the prompt left unfinished
            belongs to the output once the output completes it; and where there is a prompt, the
            output's first space is its own.
        skip_special: leave control tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_leading_space and not prompt_ids
        self._decoder.decode(self._tail(prompt_ids))
        # Bytes of the prompt's unfinished character, if there is one. Should the output not
        # complete it, its replacement mark is the prompt's text and not the output's.
        self._from_prompt = self._decoder.getstate()[0]

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; return the characters that are complete now."""
        token_bytes = self._tokenizer.token_bytes
        skip = self._skip_special
        data = b"".join([token_bytes(i, skip_special=skip) for i in ids])
        return self._own(self._decoder.decode(data), data)

    def finish(self) -> str:
        """Return what is left: at most one U+FFFD, for a character that never ended."""
        return self._own(self._decoder.decode(b"", final=True), b"")

    def _own(self, text: str, data: bytes) -> str:
        """Take away what belongs to the prompt or to the encoder."""
        if not text:
            self._from_prompt = self._from_prompt and self._from_prompt + data
            return text
        if self._from_prompt:
            completed = (self._from_prompt + data).startswith(_REPLACEMENT.encode())
            self._from_prompt = b""
            if text[0] == _REPLACEMENT and not completed:
                text = text[1:]
        if self._strip_space and text:
            self._strip_space = False
            if text[0] == " ":
                text = text[1:]
        return text

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the prompt's last bytes, enough to know where a character starts."""
        parts: list[bytes] = []
        length = 0
        for token_id in reversed(prompt_ids):
            part = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
            parts.append(part)
            length += len(part)
            if length >= _LONGEST_CHARACTER_NBYTES:
                break
        return b"".join(reversed(parts))
