"""The tokenizer of a Hugging Face directory: tokenizer.json and the settings beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken

from headrace.checkpoint.records import TextSource
from headrace.core.errors import CheckpointError, UnsupportedModelError
from headrace.text.pieces import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    SENTENCEPIECE_NO_PREFIX,
    PieceRule,
)
from headrace.text.tokenizer import AddedPiece, Tokenizer, TokenizerParts

_SUPPORTED_DECODERS = "ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip"


def load_hf_tokenizer(source: TextSource) -> Tokenizer:
    """Build a tokenizer from ``source.tokenizer_json`` and the parsed configurations.

    BOS and EOS are added as tokenizer_config.json's ``add_bos_token`` and ``add_eos_token`` say
    and, where it is silent, as tokenizer.json's own post-processor does. The tokens that end an
    answer are generation_config.json's ``eos_token_id`` (one or a list) and the tokenizer's EOS.

    Raises:
        CheckpointError: a file is damaged or names a token that the vocabulary does not have.
        UnsupportedModelError: tokens of this kind cannot be turned into exact bytes.
    """
    path = source.tokenizer_json
    assert path is not None
    try:
        engine = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions for all that can be wrong
        raise CheckpointError(
            f"{path} is no tokenizer: {error}", hint="download the file again"
        ) from error
    engine.no_truncation()
    engine.no_padding()
    config = source.tokenizer_config
    _add_configured(engine, config)
    added = {
        i: AddedPiece(t.content, t.special, t.lstrip, t.rstrip)
        for i, t in engine.get_added_tokens_decoder().items()
    }
    bos = _configured_id(engine, config, "bos_token")
    eos = _configured_id(engine, config, "eos_token")
    prefix, suffix = _post_processor_ids(engine)
    parts = TokenizerParts(
        pieces=_pieces(engine),
        added=added,
        rule=_piece_rule(engine, str(path)),
        prefix_ids=_override(config, "add_bos_token", prefix, bos),
        suffix_ids=_override(config, "add_eos_token", suffix, eos),
        bos_token_id=bos,
        eos_token_ids=_eos_ids(source.generation_config, eos, engine.get_vocab_size()),
    )
    return Tokenizer(engine, parts)


def _pieces(engine: tokenizers.Tokenizer) -> list[str | None]:
    vocabulary = engine.get_vocab(with_added_tokens=True)
    pieces: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in vocabulary.items():
        pieces[token_id] = piece
    return pieces


def _token_text(value: object) -> str | None:
    """Read a token's spelling in tokenizer_config.json: a string, or an object with ``content``."""
    if isinstance(value, Mapping):
        value = cast(Mapping[str, Any], value).get("content")
    return value if isinstance(value, str) else None


def _add_configured(engine: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Make tokens special that only tokenizer_config.json declares, as transformers does."""
    known = engine.get_added_tokens_decoder()
    declared = cast(Mapping[str, Mapping[str, Any]], config.get("added_tokens_decoder") or {})
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if int(key) in known:
            continue
        flags = {k: bool(entry.get(k)) for k in ("special", "lstrip", "rstrip", "single_word")}
        token = AddedToken(entry["content"], normalized=bool(entry.get("normalized")), **flags)
        engine.add_tokens([token])  # pyright: ignore[reportUnknownMemberType]
        if engine.token_to_id(entry["content"]) != int(key):
            raise CheckpointError(
                f"tokenizer_config.json gives the token {entry['content']!r} the id {key}; "
                f"tokenizer.json makes it {engine.token_to_id(entry['content'])}"
            )


def _configured_id(
    engine: tokenizers.Tokenizer, config: Mapping[str, Any], name: str
) -> int | None:
    text = _token_text(config.get(name))
    if text is None:
        return None
    token_id = engine.token_to_id(text)
    if token_id is None:
        raise CheckpointError(
            f"tokenizer_config.json says {name} is {text!r}, which tokenizer.json does not have",
            hint="the two files belong to different models; download both again",
        )
    return token_id


def _post_processor_ids(engine: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what tokenizer.json's post-processor puts before and after a text."""
    probe = "a"
    body: list[int] = engine.encode(probe, add_special_tokens=False).ids
    whole: list[int] = engine.encode(probe, add_special_tokens=True).ids
    if not body:
        return (), ()
    for start in range(len(whole) - len(body) + 1):
        if whole[start : start + len(body)] == body:
            return tuple(whole[:start]), tuple(whole[start + len(body) :])
    return (), ()


def _override(
    config: Mapping[str, Any], name: str, ids: tuple[int, ...], token_id: int | None
) -> tuple[int, ...]:
    wanted = config.get(name)
    if wanted is None:
        return ids
    if not isinstance(wanted, bool):
        raise CheckpointError(f"tokenizer_config.json: {name} is {wanted!r}; true or false")
    if not wanted:
        return tuple(i for i in ids if i != token_id)
    if token_id is None:
        raise CheckpointError(f"tokenizer_config.json sets {name}, but names no token for it")
    return ids if token_id in ids else (token_id,)


def _eos_ids(generation: Mapping[str, Any], eos: int | None, vocab_size: int) -> frozenset[int]:
    value = generation.get("eos_token_id")
    ids = cast(Sequence[Any], value if isinstance(value, list) else [value])
    ids = [i for i in ids if i is not None]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise CheckpointError(
                f"generation_config.json: eos_token_id is {value!r}; token ids below "
                f"{vocab_size} are expected"
            )
    return frozenset([*cast(Sequence[int], ids), *([] if eos is None else [eos])])


def _piece_rule(engine: tokenizers.Tokenizer, path: str) -> PieceRule:
    """Find how this vocabulary spells bytes, from the decoder that tokenizer.json describes."""
    decoder = engine.decoder
    # A component's pickled state is its JSON; writing out the whole tokenizer takes a second.
    description = None if decoder is None else json.loads(decoder.__getstate__())
    steps = list(_flatten(description))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return BYTE_LEVEL
    if kinds == ["Metaspace"]:
        scheme = steps[0].get("prepend_scheme", "always")
        return SENTENCEPIECE_NO_PREFIX if scheme == "never" else SENTENCEPIECE
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strips = [s for s in steps if s["type"] == "Strip"]
        replaces = [s for s in steps if s["type"] == "Replace"]
        plain = all(s["pattern"] == {"String": "\u2581"} and s["content"] == " " for s in replaces)
        space = all(s["content"] == " " and s["start"] == 1 and s["stop"] == 0 for s in strips)
        if plain and space and len(strips) <= 1:
            return SENTENCEPIECE if strips else SENTENCEPIECE_NO_PREFIX
    raise UnsupportedModelError(
        f"{path}: its decoder is {description!r:.200}; supported are {_SUPPORTED_DECODERS}",
        hint="byte-level and SentencePiece vocabularies are supported, WordPiece ones are not",
    )


def _flatten(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step["decoders"]:
            yield from _flatten(inner)
    else:
        yield step
