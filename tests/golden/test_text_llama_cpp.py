"""Token ids against llama.cpp's, recorded by make_llama_cpp_tokens.py."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex  # a dependency of transformers, which the dev extra has

from headrace.checkpoint.records import TextSource
from headrace.text.pretokenizers import PRE_TOKENIZERS
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.fixtures.smollm2_text import smollm2_metadata

GOLDEN = json.loads((Path(__file__).parent / "data" / "llama_cpp_tokens.json").read_text())
TOY = GOLDEN["toy"]
SPM = GOLDEN["sentencepiece"]
# llama.cpp writes these rules without Unicode's category M (combining marks), which the models' own
# tokenizer.json has; there the published pattern is right and is checked against `regex` below.
WITHOUT_MARKS = ("gpt-4o", "tekken")
# llama.cpp takes spaces out of the range U+0800 to U+4E00 of this rule; the published one has them.
WIDE_SPACES = {"deepseek-coder": "\u2003\u3000"}


def toy_tokenizer(pre: str) -> Tokenizer:
    pieces = TOY["pieces"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(pieces) - 2)],
        "tokenizer.ggml.merges": TOY["merges"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return load_tokenizer(TextSource(gguf=metadata))


def comparable(pre: str, text: str) -> bool:
    if pre in WITHOUT_MARKS and any(unicodedata.category(c)[0] == "M" for c in text):
        return False
    return not any(c in text for c in WIDE_SPACES.get(pre, ""))


@pytest.mark.parametrize("pre", sorted(TOY["ids"]))
def test_each_pre_tokenizer_gives_the_ids_of_llama_cpp(pre: str) -> None:
    tokenizer = toy_tokenizer(pre)
    pairs = list(zip(TOY["texts"], TOY["ids"][pre], strict=True))
    compared = [(text, ids) for text, ids in pairs if comparable(pre, text)]
    assert len(compared) >= 200
    for text, ids in compared:
        assert tokenizer.encode(text) == ids, text


def test_the_texts_tell_the_rules_apart() -> None:
    """Negative control: a wrong rule would not have passed."""
    same_rule = [{"gpt-2", "olmo"}, {"smollm", "starcoder"}, {"dbrx", "llama-bpe"}]
    rules = sorted(TOY["ids"])
    for i, a in enumerate(rules):
        for b in rules[i + 1 :]:
            differ = sum(
                [x for x in p if x > 1] != [x for x in q if x > 1]
                for p, q in zip(TOY["ids"][a], TOY["ids"][b], strict=True)
            )
            assert ({a, b} in same_rule) == (differ == 0), (a, b, differ)


@pytest.mark.parametrize("pre", WITHOUT_MARKS)
def test_combining_marks_are_cut_as_the_published_pattern_says(pre: str) -> None:
    """The cut is right where merging each of ``regex``'s words alone gives the ids of the text."""
    tokenizer = toy_tokenizer(pre)
    (pattern,) = PRE_TOKENIZERS[pre].patterns
    marked = [t for t in TOY["texts"] if not comparable(pre, t)]
    assert len(marked) > 10
    for text in marked:
        words = [m.group() for m in regex.finditer(pattern, text)]
        assert "".join(words) == text
        alone = [i for w in words for i in tokenizer.encode(w, add_special=False)]
        assert tokenizer.encode(text, add_special=False) == alone, text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gives_the_ids_of_llama_cpp(prefix: bool) -> None:
    renamed = {"unk_token_id": "unknown_token_id"}
    metadata: dict[str, Any] = {
        f"tokenizer.ggml.{renamed.get(k, k)}": v for k, v in SPM["metadata"].items()
    }
    metadata["tokenizer.ggml.add_space_prefix"] = prefix
    tokenizer = load_tokenizer(TextSource(gguf=metadata))
    recorded = SPM["ids"]["true" if prefix else "false"]
    for text, ids in zip(SPM["texts"], recorded, strict=True):
        if text.startswith("<s>"):
            ids = ids[1:]  # llama.cpp puts a second BOS before one that is there: B034
        assert tokenizer.encode(text) == ids, text
        if "<s>" not in text and "</s>" not in text:
            assert tokenizer.decode(ids) == text


@pytest.mark.smollm2
def test_b033_smollm2_gives_the_ids_of_llama_cpp_with_and_without_control_tokens() -> None:
    tokenizer = load_tokenizer(TextSource(gguf=smollm2_metadata()))
    golden = GOLDEN["smollm2"]
    assert len(golden["texts"]) >= 200
    for text, parsed, plain in zip(golden["texts"], golden["parsed"], golden["plain"], strict=True):
        assert tokenizer.encode(text, add_special=False) == parsed, text
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, text
        assert tokenizer.decode(plain) == text
        assert tokenizer.decode(parsed, skip_special=False) == text
