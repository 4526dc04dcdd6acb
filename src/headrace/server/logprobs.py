"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.core.request import TokenLogprob
from headrace.server.frontend import TextFrontend


def chat_entries(entries: Sequence[TokenLogprob], text: TextFrontend, top: int) -> list[Any]:
    """Return one object per token for ``choices[].logprobs.content``, with ``top`` alternatives."""
    return [
        {
            **_chat_token(e.token_id, e.logprob, text),
            "top_logprobs": [_chat_token(i, value, text) for i, value in e.top[:top]],
        }
        for e in entries
    ]


def _chat_token(token_id: int, logprob: float, text: TextFrontend) -> dict[str, Any]:
    raw = text.token_bytes(token_id, skip_special=False)
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": logprob,
        "bytes": list(raw),
    }


class CompletionLogprobs:
    """Builds ``logprobs`` of ``/v1/completions`` for one choice; offsets run on between chunks.

    ``text_offset`` counts characters from the start of the choice's text (the echoed prompt
    included). A token that is not whole UTF-8 is written as ``bytes:\\xe2\\x82``, and its offset is
    that of the character it belongs to. Control tokens have a name and no width.
    """

    def __init__(self, text: TextFrontend, top: int) -> None:
        self._text = text
        self._top = top
        self._offset = 0
        self._pending = b""  # the start of a character whose other bytes are in later tokens

    def prompt(
        self, ids: Sequence[int], entries: Sequence[TokenLogprob | None] | None
    ) -> dict[str, Any]:
        """Return the entries of an echoed prompt; where a token has no prediction, null."""
        return self._entries(ids, entries if entries is not None else [None] * len(ids))

    def generated(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the entries of generated tokens."""
        return self._entries([e.token_id for e in entries], entries)

    def _entries(
        self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id in ids:
            tokens.append(self._name(token_id))
            offsets.append(self._offset)
            self._advance(self._text.token_bytes(token_id))
        tops = [None if e is None else self._alternatives(e) for e in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [None if e is None else e.logprob for e in entries],
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        return token_name(self._text.token_bytes(token_id, skip_special=False))

    def _advance(self, raw: bytes) -> None:
        """Count the characters that are whole after ``raw``."""
        data = self._pending + raw
        whole = len(data) - incomplete_suffix(data)
        self._offset += len(data[:whole].decode("utf-8", errors="replace"))
        self._pending = data[whole:]

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Return name -> log-probability of the best tokens and the chosen one, most likely first.

        Two tokens of the same name cannot both be keys: the likelier one stays.
        """
        pairs = list(entry.top[: self._top])
        if all(token_id != entry.token_id for token_id, _ in pairs):
            pairs.append((entry.token_id, entry.logprob))
        named: dict[str, float] = {}
        for token_id, value in pairs:
            name = self._name(token_id)
            named[name] = max(value, named.get(name, value))
        return named


def token_name(raw: bytes) -> str:
    """Return a token's text, or OpenAI's ``bytes:\\x..`` when it is not whole UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def incomplete_suffix(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` begin a character that is not complete."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:  # a continuation byte: look further left
            continue
        need = (
            2
            if byte >> 5 == 0b110
            else 3
            if byte >> 4 == 0b1110
            else 4
            if byte >> 3 == 0b11110
            else 1
        )
        return back if need > back else 0
    return 0
