"""The tokenizer that a GGUF file carries in its metadata (keys ``tokenizer.ggml.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from headrace.core.errors import CheckpointError, UnsupportedModelError
from headrace.core.words import counted
from headrace.text.pieces import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    SENTENCEPIECE_NO_PREFIX,
    SPACE_MARK,
    PieceRule,
)
from headrace.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from headrace.text.tokenizer import AddedPiece, Tokenizer, TokenizerParts

# ``tokenizer.ggml.token_type``, from the GGUF specification.
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = TOKEN_TYPES = range(7)

# Files name one EOS, models end an answer in more ways. A control token of one of these spellings
# ends an answer too; llama.cpp recognises them by spelling as well.
_TURN_ENDS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
        "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]", "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip
# In gpt-oss's vocabulary ``<|end|>`` closes a message, and the answer may go on with the next one.
_HARMONY_MARK, _HARMONY_MESSAGE_END = "<|return|>", "<|end|>"

_PREFIX = "tokenizer.ggml."


class GgufVocabulary:
    """Typed, checked access to the ``tokenizer.ggml.*`` keys of one file.

    Raises:
        CheckpointError: from every accessor, when a key has the wrong type, length or range.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        tokens = cast(list[str], self._array("tokens", str, required=True))
        # Some converters write padding rows as empty strings; each needs a spelling of its own.
        self.tokens = (
            [t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)] if "" in tokens else tokens
        )
        self.size = len(self.tokens)
        self.types = cast("list[int] | None", self._array("token_type", int, length=self.size))
        if self.types is not None and (bad := set(self.types) - set(TOKEN_TYPES)):
            raise CheckpointError(
                f"{_PREFIX}token_type holds the type {min(bad)}; types are 0 to {BYTE}"
            )
        self.vocab = dict(zip(self.tokens, range(self.size), strict=True))
        if len(self.vocab) != self.size:
            twice = next(t for i, t in enumerate(self.tokens) if self.vocab[t] != i)
            raise CheckpointError(f"{_PREFIX}tokens holds the token {twice!r} twice")

    def _array(
        self, name: str, kind: type, *, required: bool = False, length: int | None = None
    ) -> list[Any] | None:
        key = _PREFIX + name
        value = self._metadata.get(key)
        if value is None:
            if required:
                raise CheckpointError(f"the GGUF metadata has no {key}")
            return None
        if not isinstance(value, list):
            raise CheckpointError(f"{key} is {type(value).__name__}, an array is expected")
        array = cast(list[Any], value)
        if wrong := set(map(type, array)) - {kind}:
            found = min(w.__name__ for w in wrong)
            raise CheckpointError(f"{key} holds {found} elements, {kind.__name__} is expected")
        if length is not None and len(array) != length:
            raise CheckpointError(
                f"{key} has {counted(len(array), 'element')} for the {length} of {_PREFIX}tokens"
            )
        return array

    def merges(self) -> list[tuple[str, str]]:
        """Return the merge rules, most frequent first; both sides and their sum are tokens."""
        key = _PREFIX + "merges"
        lines = cast(list[str], self._array("merges", str, required=True))
        # The sides are byte-level spelled, where a space is never itself: one space, between them.
        pairs = [tuple(line.split(" ")) for line in lines]
        for line, pair in zip(lines, pairs, strict=True):
            if len(pair) != 2:
                raise CheckpointError(f"{key} holds {line!r}, two pieces and a space are expected")
        return cast(list[tuple[str, str]], pairs)

    def scores(self) -> list[float]:
        """Return the log-probability of each token."""
        return cast(list[float], self._array("scores", float, required=True, length=self.size))

    def text(self, name: str) -> str | None:
        value = self._metadata.get(_PREFIX + name)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(
                f"{_PREFIX}{name} is {type(value).__name__}, a string is expected"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{_PREFIX}{name} is {value!r}, a boolean is expected")
        return value

    def token_id(self, name: str) -> int | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.size:
            raise CheckpointError(
                f"{_PREFIX}{name} is {value!r}, a token id below {self.size} is expected"
            )
        return value

    def pieces(self) -> list[str | None]:
        """Return each token's spelling, None for padding rows, which add nothing to a text."""
        if self.types is None or UNUSED not in self.types:
            return list(self.tokens)
        return [
            None if kind == UNUSED else token
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]

    def added(self) -> dict[int, AddedPiece]:
        """Return the tokens that are matched as a whole: control, unknown and user-defined ones."""
        if self.types is None:
            return {}
        return {
            i: AddedPiece(self.tokens[i], special=kind != USER_DEFINED)
            for i, kind in enumerate(self.types)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        }

    def eos_token_ids(self, added: Mapping[int, AddedPiece]) -> frozenset[int]:
        """Return every token that ends an answer: those the file names, and known turn ends."""
        named = [self.token_id(f"{n}_token_id") for n in ("eos", "eot", "eom")]
        ends = {i for i in named if i is not None}
        ends |= {i for i, a in added.items() if a.special and a.content in _TURN_ENDS}
        if _HARMONY_MARK in self.vocab and _HARMONY_MESSAGE_END in self.vocab:
            ends.discard(self.vocab[_HARMONY_MESSAGE_END])
        return frozenset(ends)


def load_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from GGUF metadata: key -> Python value, arrays as lists.

    Raises:
        CheckpointError: a key is missing or has the wrong type, length or range.
        UnsupportedModelError: the tokenizer's model or its pre-tokenizer is not implemented.
    """
    vocabulary = GgufVocabulary(metadata)
    model = vocabulary.text("model")
    if model == "gpt2":
        return _byte_level(vocabulary)
    if model == "llama":
        return _sentencepiece(vocabulary)
    raise UnsupportedModelError(
        f"{_PREFIX}model is {model!r}; supported are gpt2 and llama",
        hint="use the model's Hugging Face directory, whose tokenizer.json is read as it is",
    )


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    rule = _pre_tokenizer(vocabulary.text("pre"))
    merges = vocabulary.merges()
    try:
        engine = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary.vocab, merges=merges, ignore_merges=rule.ignore_merges)
        )
    except Exception as error:  # the library raises bare exceptions: a merge of unknown tokens
        raise CheckpointError(f"{_PREFIX}merges do not fit {_PREFIX}tokens: {error}") from error
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _finish(engine, vocabulary, BYTE_LEVEL, adds_bos=rule.adds_bos)


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build SentencePiece's BPE: the adjacent pair whose sum has the best score merges first.

    Such files have scores and no merges. Every way to cut a piece into two pieces is a merge of the
    piece's score; characters that no piece covers become ``<0xNN>`` tokens.
    """
    prefix = vocabulary.flag("add_space_prefix", True)
    unknown = _unknown_id(vocabulary)
    try:
        engine = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocabulary.vocab,
                merges=_merges_of_scores(vocabulary),
                unk_token=None if unknown is None else vocabulary.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{_PREFIX}tokens are no vocabulary: {error}") from error
    replace = normalizers.Replace(" ", SPACE_MARK)
    engine.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), replace]) if prefix else replace
    )
    rule = SENTENCEPIECE if prefix else SENTENCEPIECE_NO_PREFIX
    return _finish(engine, vocabulary, rule, adds_bos=True)


def _unknown_id(vocabulary: GgufVocabulary) -> int | None:
    """Return the token of what no piece covers; needed unless every byte has a token."""
    unknown = vocabulary.token_id("unknown_token_id")
    if unknown is None and vocabulary.types is not None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(UNKNOWN)
    if unknown is None and any(f"<0x{b:02X}>" not in vocabulary.vocab for b in range(256)):
        raise CheckpointError(
            f"{_PREFIX}unknown_token_id is missing, and not every byte has a token"
        )
    return unknown


def _merges_of_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    vocab, scores = vocabulary.vocab, vocabulary.scores()
    types = vocabulary.types or [NORMAL] * vocabulary.size
    ranked: list[tuple[float, int, int, str, str]] = []
    for token_id, piece in enumerate(vocabulary.tokens):
        if types[token_id] not in (NORMAL, UNDEFINED, UNUSED):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _pre_tokenizer(name: str | None) -> PreTokenizer:
    if name is None:
        raise UnsupportedModelError(
            f"the GGUF metadata has no {_PREFIX}pre, so its pre-tokenizer is not known",
            hint="convert the model again with a current converter, which writes the key",
        )
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"{_PREFIX}pre is {name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}",
            hint="use the model's Hugging Face directory, whose tokenizer.json is read as it is",
        )
    return rule


def _finish(
    engine: tokenizers.Tokenizer, vocabulary: GgufVocabulary, rule: PieceRule, *, adds_bos: bool
) -> Tokenizer:
    """Add the whole-matched tokens and the file's BOS and EOS settings to a built engine."""
    added = vocabulary.added()
    whole = [AddedToken(a.content, special=a.special, normalized=False) for a in added.values()]
    engine.add_tokens(whole)  # pyright: ignore[reportUnknownMemberType]
    bos = vocabulary.token_id("bos_token_id")
    eos = vocabulary.token_id("eos_token_id")
    add_bos = vocabulary.flag("add_bos_token", adds_bos)
    add_eos = vocabulary.flag("add_eos_token", False)
    parts = TokenizerParts(
        pieces=vocabulary.pieces(),
        added=added,
        rule=rule,
        prefix_ids=_wanted("bos", bos) if add_bos else (),
        suffix_ids=_wanted("eos", eos) if add_eos else (),
        bos_token_id=bos,
        eos_token_ids=vocabulary.eos_token_ids(added),
    )
    return Tokenizer(engine, parts)


def _wanted(name: str, token_id: int | None) -> tuple[int, ...]:
    if token_id is None:
        raise CheckpointError(
            f"the tokenizer adds {name.upper()} to every text, but {_PREFIX}{name}_token_id is "
            "missing"
        )
    return (token_id,)
