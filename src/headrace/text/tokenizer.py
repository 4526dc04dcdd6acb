"""Text to token ids and back. The ``tokenizers`` library merges; this says what its ids mean.

:func:`load_tokenizer` reads a Hugging Face directory or GGUF metadata; both give one
:class:`Tokenizer`, which is immutable in use and may be shared between threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from headrace.checkpoint.records import TextSource
from headrace.core.errors import CheckpointError, RequestError
from headrace.text.pieces import BYTE_LEVEL, CHAR_OF_BYTE, PieceRule

_JOINT = "\ufdd0\ufdd1"  # two of Unicode's noncharacters


@dataclass(frozen=True)
class AddedPiece:
    """A token that is matched in text as a whole, before any merging.

    ``special``: a control token (never shown); else a plain word that happens to be one token.
    ``lstrip``/``rstrip``: the match swallows whitespace on that side.
    """

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class TokenizerParts:
    """What a source says beside the merging engine itself.

    ``pieces[id]`` is the spelling of a token, None where the vocabulary has a hole. ``prefix_ids``
    and ``suffix_ids`` are what the tokenizer's own settings put around a text (BOS, EOS).
    """

    pieces: Sequence[str | None]
    added: Mapping[int, AddedPiece]
    rule: PieceRule
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    bos_token_id: int | None
    eos_token_ids: frozenset[int]


class Tokenizer:
    """A vocabulary: ids, their exact bytes, and the encoder.

    Attributes:
        vocab_size: the largest token id plus one. A model's logits may be wider (padding rows).
        bos_token_id: the begin-of-text token, added or not.
        eos_token_ids: every token that ends an answer.
    """

    def __init__(self, engine: tokenizers.Tokenizer, parts: TokenizerParts) -> None:
        self._engine = engine
        self._parts = parts
        self.vocab_size = len(parts.pieces)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self._special_ids = frozenset(i for i, a in parts.added.items() if a.special)

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first space of a decoded text belongs to the encoder and not to the text."""
        return self._parts.rule.strips_leading_space

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer's own settings put BOS in front of a text."""
        return self.bos_token_id is not None and self.bos_token_id in self._parts.prefix_ids

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Spelling of each control token -> id."""
        return {a.content: i for i, a in self._parts.added.items() if a.special}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any control token's spelling, the longest first."""
        spellings = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    def added_piece(self, token_id: int) -> AddedPiece | None:
        """Return how a token is matched in text as a whole, None for a merged one."""
        return self._parts.added.get(token_id)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: any string of Unicode characters.
            add_special: put BOS and EOS around it as the tokenizer's own settings say. A text that
                already starts with BOS does not get a second one.
            parse_special: read control tokens' spellings (``<|im_end|>``) as those tokens; False
                reads them as the plain text that they are.

        Raises:
            RequestError: the text has a lone surrogate, which is no character, or a byte that the
                vocabulary has no token for (the merging engine would silently leave it out).
        """
        _check_text(text, self._covered_bytes)
        engine = self._engine
        if not parse_special and self.special_pattern.search(text):
            engine = self._plain_engine
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        return self.with_special(ids) if add_special else ids

    def encode_behind(self, text: str) -> list[int]:
        """Return the ids of ``text`` as plain text that stands behind a control token.

        Some vocabularies treat a text's first word differently from one behind a control token.
        """
        _check_text(text, self._covered_bytes)
        if _JOINT in text:  # noncharacters: never in text that is meant to be read
            return self._plain_engine.encode(text, add_special_tokens=False).ids
        return self._plain_engine.encode(_JOINT + text, add_special_tokens=False).ids[1:]

    def with_special(self, ids: list[int]) -> list[int]:
        """Put BOS and EOS around ``ids`` as the tokenizer's settings say, never BOS twice."""
        return [*self.with_bos(ids), *self._parts.suffix_ids]

    def with_bos(self, ids: list[int]) -> list[int]:
        """Put what the tokenizer's settings say in front of ``ids``, unless it is there already."""
        prefix = self._parts.prefix_ids
        if not prefix or tuple(ids[: len(prefix)]) == prefix:
            return list(ids)
        if ids and ids[0] == self.bos_token_id:
            return list(ids)
        return [*prefix, *ids]

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the exact bytes that a token adds to the output.

        Bytes need not be whole characters. Control tokens give ``b""`` unless ``skip_special`` is
        False. An id at or above ``vocab_size`` gives ``b""``: models pad their logits.

        Raises:
            IndexError: the id is negative.
        """
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        if token_id >= self.vocab_size:
            return b""
        added = self._parts.added.get(token_id)
        if added is not None:
            return b"" if added.special and skip_special else added.content.encode("utf-8")
        piece = self._parts.pieces[token_id]
        return b"" if piece is None else self._parts.rule.to_bytes(piece)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is never shown as text."""
        return token_id in self._special_ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join([self.token_bytes(i, skip_special=skip_special) for i in ids])
        text = data.decode("utf-8", "replace")
        if self.strips_leading_space and text.startswith(" "):
            return text[1:]
        return text

    def token_id(self, piece: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, None when there is none."""
        return self._engine.token_to_id(piece)

    def token_piece(self, token_id: int) -> str | None:
        """Return a token's spelling in the vocabulary, None for a hole or an id outside it."""
        if 0 <= token_id < self.vocab_size:
            return self._parts.pieces[token_id]
        return None

    @cached_property
    def _covered_bytes(self) -> bytes | None:
        """The bytes that have a token, None where every text can be encoded."""
        if self._parts.rule is not BYTE_LEVEL or getattr(self._engine.model, "unk_token", None):
            return None
        covered = [b for b, c in CHAR_OF_BYTE.items() if self._engine.token_to_id(c) is not None]
        return None if len(covered) == len(CHAR_OF_BYTE) else bytes(covered)

    @cached_property
    def _plain_engine(self) -> tokenizers.Tokenizer:
        """A second engine that reads control tokens as plain text.

        The switch is state of the engine, and ``encode`` runs outside the interpreter's lock, so
        one engine cannot be switched to and fro. The vocabulary itself is shared, not copied.
        It has one token more, for ``encode_behind``.
        """
        engine = self._engine
        twin = tokenizers.Tokenizer(engine.model)
        if engine.normalizer is not None:
            twin.normalizer = engine.normalizer
        if engine.pre_tokenizer is not None:
            twin.pre_tokenizer = engine.pre_tokenizer
        added = engine.get_added_tokens_decoder()
        tokens = [added[i] for i in sorted(added)]
        twin.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
        if twin.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps between them
            twin = tokenizers.Tokenizer.from_str(engine.to_str())
        twin.encode_special_tokens = True
        joint = [tokenizers.AddedToken(_JOINT, normalized=False)]
        twin.add_tokens(joint)  # pyright: ignore[reportUnknownMemberType]
        return twin


def _check_text(text: str, covered: bytes | None) -> None:
    """Refuse lone surrogates, and bytes outside ``covered`` (SmolLM2 lacks 0x04, for one)."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at {error.start}",
            hint="send valid Unicode: a JSON escape of a surrogate needs its other half",
        ) from error
    if covered is None or not data.translate(None, covered):
        return
    for character in text:
        if rest := character.encode("utf-8").translate(None, covered):
            raise RequestError(
                f"the text has the character U+{ord(character):04X}, and the model's vocabulary "
                f"has no token for its byte 0x{rest[0]:02X}",
                hint="take the character out: the model cannot read it",
            )


def load_tokenizer(source: TextSource) -> Tokenizer:
    """Build the tokenizer of a checkpoint: tokenizer.json first, GGUF metadata otherwise.

    Raises:
        CheckpointError: there is none, or it is damaged or inconsistent.
        UnsupportedModelError: it is of a kind that is not implemented; the message lists those
            that are.
    """
    if source.tokenizer_json is not None:
        from headrace.text.hf_tokenizer import load_hf_tokenizer

        return load_hf_tokenizer(source)
    if source.gguf is not None:
        from headrace.text.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(source.gguf)
    raise CheckpointError(
        "the checkpoint has no tokenizer: neither tokenizer.json nor GGUF metadata was found",
        hint="put the model's tokenizer.json beside its weights; transformers' "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one",
    )
