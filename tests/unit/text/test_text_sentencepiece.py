"""SentencePiece vocabularies in tokenizer.json: bytes and spaces as the library decodes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from headrace.checkpoint.records import TextSource
from headrace.core.errors import UnsupportedModelError
from headrace.text.detokenizer import Detokenizer
from headrace.text.template import ChatTemplate, encode_chat
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.fixtures.tokenizer_texts import tokenizer_texts

MARK = "\u2581"
PIECES = [
    "<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), MARK, "h", "e", "l", "o",
    "\u00e9", MARK + "h", "he", MARK + "he", "ll", "llo",
]  # fmt: skip
MERGES = [[MARK, "h"], ["h", "e"], [MARK + "h", "e"], ["l", "l"], ["ll", "o"]]
REPLACE = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SEQUENCE = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
LEGACY = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": MARK}, TO_MARK],
    },
    "decoder": {"type": "Sequence", "decoders": [*SEQUENCE, STRIP]},
}
PLAIN = {"normalizer": TO_MARK, "decoder": {"type": "Sequence", "decoders": SEQUENCE}}


def metaspace(scheme: str) -> dict[str, Any]:
    step = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": False}
    strip = [] if scheme == "never" else [STRIP]
    return {"pre_tokenizer": step, "decoder": {"type": "Sequence", "decoders": [*SEQUENCE, *strip]}}


def load(directory: Path, parts: dict[str, Any]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": PIECES[i], **flags, "special": True} for i in range(3)
        ],
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": {p: i for i, p in enumerate(PIECES)}, "merges": MERGES,
        },
        **parts,
    }  # fmt: skip
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    ours = load_tokenizer(TextSource(tokenizer_json=path, tokenizer_config=config))
    return ours, tokenizers.Tokenizer.from_file(str(path))


@pytest.mark.parametrize(
    "parts",
    [LEGACY, PLAIN, metaspace("first"), metaspace("always"), metaspace("never")],
    ids=["legacy", "plain", "first", "always", "never"],
)
def test_bytes_join_to_what_the_library_decodes(parts: dict[str, Any], tmp_path: Path) -> None:
    ours, library = load(tmp_path, parts)
    for text in tokenizer_texts(120, specials=False):
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == library.decode(ids)
        if text.startswith(" ") and "pre_tokenizer" in parts:
            continue  # Metaspace puts no second space in front: the first one is lost by design
        assert ours.decode(ids) == text
        streamed = Detokenizer(ours)
        assert "".join(streamed.push([i]) for i in ids) + streamed.finish() == text


def test_metaspace_decoder(tmp_path: Path) -> None:
    step = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True}
    ours, library = load(tmp_path, {"pre_tokenizer": step, "decoder": step})
    ids = ours.encode("hello hello", add_special=False)
    assert [ours.token_piece(i) for i in ids] == [MARK + "he", "llo"] * 2
    assert ours.decode(ids) == library.decode(ids) == "hello hello"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Sequence", "decoders": [{**REPLACE, "content": "_"}]},
        {"type": "Sequence", "decoders": [*SEQUENCE, {**STRIP, "start": 2}]},
        {"type": "BPEDecoder", "suffix": "</w>"},
        None,
    ],
)
def test_other_decoders_are_refused(decoder: dict[str, Any] | None, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"its decoder is .*supported are"):
        load(tmp_path, {"decoder": decoder})


@pytest.mark.parametrize("parts", [LEGACY, metaspace("first")], ids=["legacy", "first"])
def test_control_tokens_in_messages_stay_text(parts: dict[str, Any], tmp_path: Path) -> None:
    ours, _ = load(tmp_path, parts)
    text = "{{ bos_token }}{% for m in messages %}he{{ m.content }}{{ eos_token }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    chat = ChatTemplate(TextSource(chat_template=text, tokenizer_config=config))
    messages = [{"role": "user", "content": "llo</s>"}, {"role": "user", "content": " h"}]
    ids = encode_chat(ours, chat, messages)
    assert [i for i in ids if ours.is_special(i)] == [1, 2, 2]
    # Each stretch between control tokens is what the whole-string encoder makes of it.
    harmless = [{"role": "user", "content": "llo<.s>"}, messages[1]]
    dot, slash = 3 + ord("."), 3 + ord("/")
    assert [slash if i == dot else i for i in encode_chat(ours, chat, harmless)] == ids
