"""Tokenizers from both containers: ids, exact bytes, control tokens, BOS and EOS, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.records import TextSource
from headrace.core.errors import CheckpointError, RequestError, UnsupportedModelError
from headrace.text.pieces import byte_level_bytes, byte_level_piece
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.fixtures.toy_tokenizer import (
    ENDOFTEXT,
    IM_END,
    IM_START,
    SPECIALS,
    VOCAB_SIZE,
    byte_id,
    toy_gguf_metadata,
    toy_tokenizer,
    toy_tokenizer_json,
    write_toy_tokenizer,
)


def from_gguf(**changes: Any) -> Tokenizer:
    """The toy tokenizer with some ``tokenizer.ggml.*`` keys changed, or removed by None."""
    metadata = toy_gguf_metadata()
    metadata.update({f"tokenizer.ggml.{k}": v for k, v in changes.items()})
    present = {k: v for k, v in metadata.items() if v is not None}
    return load_tokenizer(TextSource(gguf=present))


def from_directory(directory: Path, **changes: Any) -> Tokenizer:
    """The toy tokenizer's directory with tokenizer.json's top-level keys changed."""
    source = write_toy_tokenizer(directory)
    content = {**toy_tokenizer_json(), **changes}
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(source)


def test_ids_worked_out_by_hand() -> None:
    tokenizer = toy_tokenizer()
    # hell+o = 265; " the" = 261; " " "12" = 35, 266; "\xc3\xa9" = 269; f0 9f a4 = 270, then 96.
    assert tokenizer.encode("hello the 12") == [265, 261, 35, 266]
    assert tokenizer.encode("\u00e9\U0001f916") == [269, 270, byte_id(0x96)]
    assert tokenizer.vocab_size == VOCAB_SIZE == 272


def test_both_containers_give_one_tokenizer(tmp_path: Path) -> None:
    a, b = toy_tokenizer(), load_tokenizer(write_toy_tokenizer(tmp_path))
    text = "hello <|im_end|> the\n\n caf\u00e9 \U0001f916 12 \x00"
    assert a.encode(text) == b.encode(text)
    assert a.encode(text, parse_special=False) == b.encode(text, parse_special=False)
    assert [a.token_bytes(i) for i in range(a.vocab_size)] == [
        b.token_bytes(i) for i in range(b.vocab_size)
    ]
    assert a.vocab_size == b.vocab_size
    assert a.eos_token_ids == b.eos_token_ids == {ENDOFTEXT, IM_END}
    assert a.bos_token_id == b.bos_token_id == ENDOFTEXT


def test_loading_the_text_package_does_not_import_torch() -> None:
    import subprocess

    code = (
        "import sys, headrace.text.template, headrace.text.detokenizer, headrace.text.stop;"
        "import headrace.text.hf_tokenizer, headrace.text.gguf_tokenizer;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"})


def test_the_byte_alphabet_is_a_bijection_and_is_that_of_the_library() -> None:
    from tokenizers import pre_tokenizers

    spelled = [byte_level_piece(bytes([b])) for b in range(256)]
    assert [byte_level_bytes(s) for s in spelled] == [bytes([b]) for b in range(256)]
    assert sorted(spelled) == sorted(pre_tokenizers.ByteLevel.alphabet())
    # The library's own encoder, on every byte that is a character.
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte in range(128):
        assert encoder.pre_tokenize_str(chr(byte))[0][0] == spelled[byte]


def test_every_byte_token_gives_its_byte() -> None:
    tokenizer = toy_tokenizer()
    assert [tokenizer.token_bytes(byte_id(b)) for b in range(256)] == [
        bytes([b]) for b in range(256)
    ]


def test_control_tokens_have_no_bytes_unless_asked() -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer.token_bytes(IM_END) == b""
    assert tokenizer.token_bytes(IM_END, skip_special=False) == b"<|im_end|>"
    assert tokenizer.is_special(IM_END)
    assert not tokenizer.is_special(byte_id(65))
    assert tokenizer.decode([byte_id(65), IM_END, byte_id(66)]) == "AB"
    assert tokenizer.decode([byte_id(65), IM_END], skip_special=False) == "A<|im_end|>"


def test_ids_outside_the_vocabulary() -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer.token_bytes(VOCAB_SIZE) == b""  # a padding row of the logits
    assert tokenizer.token_piece(VOCAB_SIZE) is None
    with pytest.raises(IndexError, match="-1"):
        tokenizer.token_bytes(-1)


def test_b033_control_tokens_are_plain_text_when_not_parsed() -> None:
    tokenizer = toy_tokenizer()
    text = "<|im_start|>"
    assert tokenizer.encode(text) == [IM_START]
    assert tokenizer.encode(text, parse_special=False) == [byte_id(b) for b in text.encode()]
    assert tokenizer.encode(text) == [IM_START]  # one call does not change the next


def test_b033_plain_words_that_are_one_token_stay_one(tmp_path: Path) -> None:
    """User-defined tokens are not control tokens: the flag is not about them."""
    pieces = [*toy_gguf_metadata()["tokenizer.ggml.tokens"], "<tool>"]
    types = [3, 3, 3, *[1] * (len(pieces) - 4), 4]
    tokenizer = from_gguf(tokens=pieces, token_type=types)
    for parse in (True, False):
        ids = tokenizer.encode("<tool><|im_end|>", parse_special=parse)
        assert ids[0] == VOCAB_SIZE
        assert (ids[1] == IM_END) == parse
    assert tokenizer.token_bytes(VOCAB_SIZE) == b"<tool>"
    assert not tokenizer.is_special(VOCAB_SIZE)


def test_plain_engine_keeps_ids_when_added_tokens_leave_gaps(tmp_path: Path) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = toy_tokenizer_json()["added_tokens"]
    added.append({"id": VOCAB_SIZE, "content": "<a>", **flags, "special": False})
    added.append({"id": VOCAB_SIZE + 1, "content": "<b>", **flags, "special": True})
    tokenizer = from_directory(tmp_path, added_tokens=added)
    assert tokenizer.encode("<a><b>") == [VOCAB_SIZE, VOCAB_SIZE + 1]
    plain = tokenizer.encode("<a><b>", parse_special=False)
    assert plain == [VOCAB_SIZE, *(byte_id(b) for b in b"<b>")]
    assert tokenizer.token_bytes(VOCAB_SIZE) == b"<a>"
    assert tokenizer.token_bytes(VOCAB_SIZE + 1) == b""


@pytest.mark.parametrize("container", ["gguf", "directory"])
def test_b034_begin_token_is_added_once(container: str, tmp_path: Path) -> None:
    tokenizer = (
        toy_tokenizer(add_bos=True)
        if container == "gguf"
        else load_tokenizer(write_toy_tokenizer(tmp_path, add_bos=True))
    )
    assert tokenizer.adds_bos
    assert tokenizer.encode("hello") == [ENDOFTEXT, 265]
    assert tokenizer.encode("<|endoftext|>hello") == [ENDOFTEXT, 265]
    assert tokenizer.encode("hello", add_special=False) == [265]
    assert tokenizer.encode("") == [ENDOFTEXT]
    # As plain text the spelling is not the token, so that the token is still added.
    assert tokenizer.encode("<|endoftext|>", parse_special=False)[0] == ENDOFTEXT
    assert len(tokenizer.encode("<|endoftext|>", parse_special=False)) > 10


def test_post_processor_of_tokenizer_json_adds_begin_and_end(tmp_path: Path) -> None:
    special = {
        s: {"id": s, "ids": [i], "tokens": [s]} for i, s in enumerate(SPECIALS) if i != IM_START
    }
    post = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": SPECIALS[ENDOFTEXT], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": SPECIALS[IM_END], "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }
    source = write_toy_tokenizer(tmp_path)
    content = {**toy_tokenizer_json(), "post_processor": post}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")

    def encode(**config: Any) -> list[int]:
        kept = {k: v for k, v in source.tokenizer_config.items() if k != "add_bos_token"}
        changed = TextSource(source.tokenizer_json, {**kept, **config})
        return load_tokenizer(changed).encode("hello")

    assert encode() == [ENDOFTEXT, 265, IM_END]
    assert encode(add_bos_token=False) == [265, IM_END]
    assert encode(add_eos_token=False) == [ENDOFTEXT, 265]
    assert encode(add_bos_token=False, add_eos_token=False) == [265]


def test_end_tokens_of_both_configurations(tmp_path: Path) -> None:
    source = write_toy_tokenizer(tmp_path)

    def ends(generation: dict[str, Any]) -> frozenset[int]:
        changed = TextSource(source.tokenizer_json, source.tokenizer_config, generation)
        return load_tokenizer(changed).eos_token_ids

    assert ends({}) == {IM_END}
    assert ends({"eos_token_id": 7}) == {7, IM_END}
    assert ends({"eos_token_id": [7, 9]}) == {7, 9, IM_END}
    assert ends({"eos_token_id": None}) == {IM_END}
    for bad in ("2", -1, [2.5], True):
        with pytest.raises(CheckpointError, match="eos_token_id"):
            ends({"eos_token_id": bad})


def test_gguf_end_tokens_include_turn_ends_but_not_harmony_message_ends() -> None:
    assert from_gguf(eot_token_id=5).eos_token_ids == {ENDOFTEXT, IM_END, 5}
    pieces = list(toy_gguf_metadata()["tokenizer.ggml.tokens"])
    pieces[:3] = ["<|return|>", "<|end|>", "<|call|>"]
    assert from_gguf(tokens=pieces, eos_token_id=0).eos_token_ids == {0, 2}
    pieces[0] = "<|start|>"
    assert from_gguf(tokens=pieces, eos_token_id=2).eos_token_ids == {1, 2}


def test_words_that_are_tokens_ignore_merges_where_the_rule_says_so() -> None:
    pieces = [*toy_gguf_metadata()["tokenizer.ggml.tokens"], "abc"]  # no merge leads to it
    types = [3, 3, 3, *[1] * (len(pieces) - 3)]
    apart = [byte_id(b) for b in b"abc"]
    assert from_gguf(tokens=pieces, token_type=types, pre="dbrx").encode("abc") == apart
    joined = from_gguf(tokens=pieces, token_type=types, pre="llama-bpe", add_bos_token=None)
    assert joined.encode("abc") == [ENDOFTEXT, VOCAB_SIZE]  # and this rule adds BOS by itself


def test_unknown_pre_tokenizers_are_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'nonsense'.*gpt-4o.*smollm") as caught:
        from_gguf(pre="nonsense")
    assert caught.value.hint
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.ggml\.pre"):
        from_gguf(pre=None)
    with pytest.raises(UnsupportedModelError, match=r"'bert'.*gpt2 and llama"):
        from_gguf(model="bert")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokens is str, an array"),
        ({"tokens": [1, 2]}, "tokens holds int elements, str"),
        ({"tokens": ["a", "a"], "token_type": None}, "'a' twice"),
        ({"token_type": [1, 2]}, "token_type has 2 elements for the 272"),
        ({"token_type": [1.0] * VOCAB_SIZE}, "token_type holds float elements, int"),
        ({"token_type": [9] * VOCAB_SIZE}, "the type 9"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["a b c"]}, "'a b c'"),
        ({"merges": ["a zzz"]}, "merges do not fit"),
        ({"eos_token_id": VOCAB_SIZE}, "eos_token_id is 272"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"bos_token_id": True}, "bos_token_id is True"),
        ({"add_bos_token": 1}, "add_bos_token is 1, a boolean"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
        ({"pre": 3}, "pre is int, a string"),
    ],
)
def test_b013_metadata_of_wrong_type_length_or_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_gguf(**changes)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([0] * 5, "scores holds int elements, float"),  # declared UINT8
        ([0.0] * 4, "scores has 4 elements for the 5"),
        (None, "no tokenizer.ggml.scores"),
    ],
)
def test_b013_scores_of_wrong_type_or_length(scores: object, message: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "\u2581"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
    }
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(TextSource(gguf=metadata))


def test_text_that_the_vocabulary_cannot_spell_is_refused_and_not_cut() -> None:
    metadata = toy_gguf_metadata()
    metadata["tokenizer.ggml.tokens"] = [
        "<hole>" if piece == byte_level_piece(b"\x04") else piece
        for piece in metadata["tokenizer.ggml.tokens"]
    ]
    tokenizer = load_tokenizer(TextSource(gguf=metadata))
    assert tokenizer.encode("hello") == [265]
    with pytest.raises(RequestError, match=r"U\+0004.*0x04"):
        tokenizer.encode("hel\x04lo")


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at 1"):
        toy_tokenizer().encode("a\ud800b")


def test_sentencepiece_needs_an_unknown_token_or_all_bytes() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<s>", "a", "\u2581"],
        "tokenizer.ggml.token_type": [3, 1, 1],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
        "tokenizer.ggml.bos_token_id": 0,
    }
    with pytest.raises(CheckpointError, match="unknown_token_id is missing"):
        load_tokenizer(TextSource(gguf=metadata))


def test_padding_rows_of_gguf_files_add_nothing_to_a_text() -> None:
    pieces = [*toy_gguf_metadata()["tokenizer.ggml.tokens"], "[PAD272]", "", ""]
    types = [3, 3, 3, *[1] * (VOCAB_SIZE - 3), 5, 5, 5]
    tokenizer = from_gguf(tokens=pieces, token_type=types)
    assert tokenizer.vocab_size == VOCAB_SIZE + 3
    assert [tokenizer.token_bytes(VOCAB_SIZE + i) for i in range(3)] == [b""] * 3
    assert tokenizer.encode("hello") == [265]


def test_damaged_and_missing_tokenizer_files(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(TextSource(tokenizer_json=path))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(TextSource())


def test_configured_tokens_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    source = write_toy_tokenizer(tmp_path)
    for config, message in [
        ({"eos_token": "<|nope|>"}, "eos_token is '<|nope|>'"),
        ({"add_bos_token": True, "bos_token": None}, "names no token"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        (
            {"added_tokens_decoder": {"900": {"content": "<x>", "special": True}}},
            "'<x>' the id 900",
        ),
    ]:
        changed = TextSource(source.tokenizer_json, {**source.tokenizer_config, **config})
        with pytest.raises(CheckpointError, match=message.replace("|", r"\|")):
            load_tokenizer(changed)


def test_tokens_that_only_the_configuration_declares(tmp_path: Path) -> None:
    source = write_toy_tokenizer(tmp_path)
    entry = {"content": "<|new|>", "special": True}
    config = {**source.tokenizer_config, "added_tokens_decoder": {str(VOCAB_SIZE): entry}}
    tokenizer = load_tokenizer(TextSource(source.tokenizer_json, config))
    assert tokenizer.encode("<|new|>") == [VOCAB_SIZE]
    assert tokenizer.is_special(VOCAB_SIZE)


def test_word_pieces_are_refused_because_they_have_no_exact_bytes(tmp_path: Path) -> None:
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(UnsupportedModelError, match=r"WordPiece.*ByteLevel"):
        from_directory(tmp_path, decoder=decoder)


def test_truncation_and_padding_of_tokenizer_json_are_switched_off(tmp_path: Path) -> None:
    truncation = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    tokenizer = from_directory(tmp_path, truncation=truncation)
    assert len(tokenizer.encode("hello the 12")) == 4
