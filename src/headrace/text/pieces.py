"""From a token's piece, as a vocabulary spells it, to the exact bytes that it stands for.

Vocabularies spell bytes in one of two ways. *Byte-level* ones (GPT-2 and everything after it) write
each byte as one printable character. *SentencePiece* ones write text as it is, with U+2581 for a
space and ``<0xNN>`` for a byte that no piece covers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes spell themselves, the others take U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_level_alphabet()
CHAR_OF_BYTE = {b: c for c, b in BYTE_OF_CHAR.items()}


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; text outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHAR[c] for c in piece])
    except KeyError:
        return piece.encode("utf-8", "surrogatepass")


def byte_level_piece(data: bytes) -> str:
    """Spell bytes in the byte-level alphabet; the inverse of :func:`byte_level_bytes`."""
    return "".join([CHAR_OF_BYTE[b] for b in data])


def sentencepiece_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece: U+2581 is a space, ``<0xNN>`` one byte."""
    if match := _BYTE_PIECE.match(piece):
        return bytes([int(match.group(1), 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class PieceRule:
    """How pieces become bytes, and whether a text's first space was put there by the encoder."""

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool


BYTE_LEVEL = PieceRule(byte_level_bytes, strips_leading_space=False)
SENTENCEPIECE = PieceRule(sentencepiece_bytes, strips_leading_space=True)
SENTENCEPIECE_NO_PREFIX = PieceRule(sentencepiece_bytes, strips_leading_space=False)
