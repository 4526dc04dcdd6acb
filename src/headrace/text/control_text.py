"""Control tokens that a message merely spells out: kept apart from those that the template writes.

A chat prompt is rendered as text and then tokenised with control tokens recognised, so that a user
who writes ``<|im_end|>`` would end the turn. Before rendering, each control token's spelling inside
a message is put between two characters that occur nowhere else; after rendering, what is between
them is text. Only conversations that contain such a spelling take this path: all others are
tokenised as one string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.core.errors import RequestError
from headrace.text.messages import map_strings
from headrace.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0xE000, 0xF900)  # Unicode's private-use area of the basic plane


def unused_characters(values: Sequence[Any], count: int) -> str:
    """Return ``count`` private-use characters that no string inside ``values`` contains.

    Raises:
        RequestError: the strings use up the whole private-use area.
    """
    used: set[str] = set()

    def collect(text: str) -> str:
        used.update(text)
        return text

    map_strings(values, collect)
    free = [c for c in map(chr, _PRIVATE_USE) if c not in used][:count]
    if len(free) < count:
        raise RequestError(
            "the messages use every private-use character of Unicode; some must be free",
            param="messages",
        )
    return "".join(free)


def mark_control_tokens(value: Any, pattern: re.Pattern[str], marks: str) -> Any:
    """Put each match of ``pattern`` inside the strings of ``value`` between the two ``marks``."""
    opening, closing = marks
    return map_strings(value, lambda text: pattern.sub(rf"{opening}\g<0>{closing}", text))


def encode_marked(tokenizer: Tokenizer, text: str, marks: str) -> list[int]:
    """Return the ids of ``text``, in which control tokens between ``marks`` are plain text.

    The text between two real control tokens is encoded at once, as the tokenizer itself does, so
    that the ids are those of plain tokenisation wherever nothing is marked. A template may have cut
    a marked spelling in two; lone marks are removed.
    """
    opening, closing = marks
    control = tokenizer.special_pattern.pattern
    scanner = re.compile(f"{opening}(?:{control}){closing}|({control})")
    lone = re.compile(f"[{opening}{closing}]")
    ids: list[int] = []
    start, swallow = 0, False

    def plain(end: int, *, cut_end: bool) -> None:
        piece = lone.sub("", text[start:end])
        piece = piece.lstrip() if swallow else piece
        piece = piece.rstrip() if cut_end else piece
        if piece and start:
            ids.extend(tokenizer.encode_behind(piece))
        elif piece:
            ids.extend(tokenizer.encode(piece, add_special=False, parse_special=False))

    for match in scanner.finditer(text):
        if match.group(1) is None:
            continue
        token_id = tokenizer.special_tokens[match.group(1)]
        added = tokenizer.added_piece(token_id)
        assert added is not None
        plain(match.start(), cut_end=added.lstrip)
        ids.append(token_id)
        start, swallow = match.end(), added.rstrip
    plain(len(text), cut_end=False)
    return ids
