"""Whole characters only, whatever the tokens cut, and only what is new."""

from __future__ import annotations

import pytest

from headrace.checkpoint.records import TextSource
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.fixtures.toy_tokenizer import IM_END, byte_id, toy_tokenizer

MARK = "\ufffd"


def tokens(data: bytes) -> list[int]:
    return [byte_id(b) for b in data]


def deltas(data: bytes, prompt: bytes = b"") -> list[str]:
    """Push one byte at a time; the last entry is the final flush."""
    detokenizer = Detokenizer(toy_tokenizer(), tokens(prompt))
    return [*(detokenizer.push([i]) for i in tokens(data)), detokenizer.finish()]


def sentencepiece(prefix: bool = True) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "\u2581h", "\u2581", "a", "h"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0] * 5 + [-1.0, -2.0, -3.0, -4.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return load_tokenizer(TextSource(gguf=metadata))


def test_b069_two_byte_character_over_two_tokens() -> None:
    assert deltas(b"\xc4\x8f") == ["", "\u010f", ""]


def test_b069_four_byte_emoji_over_four_tokens() -> None:
    assert deltas("\U0001f916".encode()) == ["", "", "", "\U0001f916", ""]


def test_b069_invalid_byte_at_the_end_gives_one_mark_at_the_flush() -> None:
    assert deltas(b"ok\xc4") == ["o", "k", "", MARK]
    assert deltas(b"ok\xf0\x9f\xa4") == ["o", "k", "", "", "", MARK]


def test_b069_token_with_the_end_of_one_character_and_the_start_of_the_next() -> None:
    detokenizer = Detokenizer(toy_tokenizer())
    assert detokenizer.push(tokens(b"\xc4")) == ""
    assert detokenizer.push(tokens(b"\x8f\xf0\x9f")) == "\u010f"
    assert detokenizer.push(tokens(b"\xa4\x96!")) == "\U0001f916!"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    "data",
    [
        b"\x80", b"a\xffb", b"\xc4a", b"\xf0\x9fa", b"\xe2\x82", b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xf0\x9f\xa4\xc4\x8f", b"\xe2\x28\xa1",
        b"\xef\xbf\xbd", b"\xef\xbb\xbfx",
    ],
)  # fmt: skip
def test_b069_invalid_bytes_are_replaced_as_in_a_decode_of_the_whole(data: bytes) -> None:
    assert "".join(deltas(data)) == data.decode("utf-8", "replace")


def test_b068_prompt_ending_inside_a_character() -> None:
    """The first delta is the completed character alone: nothing of the prompt comes back."""
    emoji = "\U0001f916".encode()
    assert deltas(emoji[2:] + b"!", prompt=b"prompt " + emoji[:2]) == ["", "\U0001f916", "!", ""]
    assert deltas(b"\x8f", prompt=b"\xc4") == ["\u010f", ""]


def test_b068_prompt_character_that_is_never_completed_is_no_new_text() -> None:
    # decode(prompt) ends with the mark already, so the output must not bring it again.
    assert deltas(b"abc", prompt=b"x\xf0\x9f") == ["a", "b", "c", ""]
    assert deltas(b"\xa4z", prompt=b"x\xf0\x9f") == ["", "z", ""]
    assert deltas(b"", prompt=b"x\xf0\x9f") == [""]
    assert deltas(b"\xa4", prompt=b"x\xf0\x9f") == ["", ""]


def test_b068_real_replacement_characters_are_kept() -> None:
    assert "".join(deltas(b"\xbd!", prompt=b"\xef\xbf")) == MARK + "!"
    assert "".join(deltas(b"\xef\xbf\xbd", prompt=b"x\xf0\x9f")) == MARK
    assert "".join(deltas(b"\xffa", prompt=b"x\xf0\x9f")) == MARK + "a"


def test_control_tokens_are_left_out_or_shown() -> None:
    hidden = Detokenizer(toy_tokenizer())
    assert hidden.push([byte_id(97), IM_END, byte_id(98)]) == "ab"
    shown = Detokenizer(toy_tokenizer(), skip_special=False)
    assert shown.push([byte_id(97), IM_END]) == "a<|im_end|>"


def test_ids_of_padding_rows_add_nothing() -> None:
    assert Detokenizer(toy_tokenizer()).push([100_000]) == ""


def test_sentencepiece_first_space_belongs_to_the_encoder_only_at_a_text_s_start() -> None:
    tokenizer = sentencepiece()
    word, space, a = 5, 6, 7
    assert tokenizer.encode("h h", add_special=False) == [word, word]
    assert tokenizer.decode([word, word]) == "h h"
    alone = Detokenizer(tokenizer)
    assert alone.push([word]) + alone.push([word]) == "h h"
    behind_a_prompt = Detokenizer(tokenizer, [1, a])
    assert behind_a_prompt.push([word]) == " h"
    one_only = Detokenizer(tokenizer)
    assert one_only.push([space]) == ""
    assert one_only.push([space]) == " "
    without = sentencepiece(prefix=False)
    assert Detokenizer(without).push([word]) == " h"
    assert without.decode([word]) == " h"


def test_sentencepiece_byte_tokens_join_to_characters() -> None:
    detokenizer = Detokenizer(sentencepiece(), [1])
    assert [detokenizer.push([i]) for i in (3, 4, 7)] == ["", "\u00e9", "a"]
