"""Corpus, tokenization, scripted texts, the n-gram baseline, traces and their statistics."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing.statistics import skew, token_gaps
from headrace.core.trace import RoutingTrace, RoutingTraceMeta
from training import ngram, synthetic
from training.corpus import Document, clean, deduplicate
from training.prepare import encode, train_tokenizer
from training.texts import split_parts
from training.traces import trace_of

LONG = "A paragraph that is long enough to be compared with what was there before it."


def document(source: str, text: str) -> Document:
    return Document("prose", source, "CC0-1.0", text)


def test_a_paragraph_appears_once_in_the_corpus() -> None:
    filler = "\n\n".join(
        f"Paragraph {i} says something that no other one says: {i}." for i in range(4)
    )
    first = document("a", f"{LONG}\n\nshort\n\n{filler}")
    other = "\n\n".join(
        f"Number {i} is another line that nobody else has written." for i in range(5)
    )
    again = document("b", f"{LONG.replace(' ', '  ')}\n\nshort\n\n{other}")
    kept = list(deduplicate(iter((first, again, document("c", first.text)))))
    assert [d.source for d in kept] == ["a", "b"]  # nothing is left of c but "short"
    assert kept[0].text == first.text
    assert kept[1].text == f"short\n\n{other}"  # short paragraphs are not compared


def test_clean() -> None:
    assert clean(" a \r\nb\u00a0c¶\n\n\n\nd  ") == "a\nb c\n\nd"


def test_tokens_carry_any_text_and_end_documents() -> None:
    tokenizer = train_tokenizer({"prose": ["some words and some more words"] * 50}, 300)
    ids = encode(tokenizer, ["some words", "Zürich \u2603"])
    assert ids.dtype == np.uint16
    assert ids.tolist().count(0) == 2
    assert ids[-1] == 0
    first, second = (part for part in np.split(ids, np.flatnonzero(ids == 0) + 1) if part.size)
    assert tokenizer.decode(first[:-1].tolist()) == "some words"
    assert tokenizer.decode(second[:-1].tolist()) == "Zürich \u2603"


def test_parts_share_no_document() -> None:
    docs = [{"source": f"{p}/{i}"} for p in "ab" for i in range(5)]
    parts = split_parts(docs)
    names = {part: {d["source"] for d in found} for part, found in parts.items()}
    assert not names["tune"] & names["test"]
    assert len(names["tune"] | names["test"]) == 10
    assert {len(v) for v in names.values()} == {4, 6}


WORDS = synthetic.Words(
    ("One sentence here.", "Another one there."),
    tuple("alpha beta gamma delta epsilon".split()),
    ("read_file", "Parser"),
    ("def f(x):\n    return x",),
)


@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_scripted_texts_are_functions_of_their_seed(kind: str) -> None:
    one = synthetic.document(kind, "1", WORDS)
    assert one == synthetic.document(kind, "1", WORDS)
    assert one != synthetic.document(kind, "2", WORDS)
    assert len(one) > 200


def test_words_come_from_the_texts() -> None:
    prose = ["Start. The cache keeps what was used lately by anybody. " + "cache keeps " * 3 + "."]
    words = synthetic.words_of(prose, ["def open_file():\n    pass\n\nx"])
    assert words.sentences == ("The cache keeps what was used lately by anybody.",)
    assert set(words.terms) == {"cache", "keeps"}  # three times or more
    assert words.identifiers == ("open_file",)
    assert words.code == ()  # runs have at least three lines


def brute_force(train: list[int], history: tuple[int, ...], word: int, vocab: int) -> float:
    """Interpolated modified Kneser-Ney from its definition, by counting tuples."""
    grams = [tuple(train[i : i + 5]) for i in range(len(train) - 4)]
    counts = {5: Counter(grams)}
    for order in range(4, 0, -1):
        counts[order] = Counter(g[1:] for g in counts[order + 1])  # distinct left neighbours
    p = 1.0 / vocab
    for order in range(1, 6):
        table = counts[order]
        n = [sum(1 for c in table.values() if c == k) for k in (1, 2, 3, 4)]
        y = n[0] / (n[0] + 2 * n[1])
        discount = [0, *(k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3))]
        context = history[len(history) - order + 1 :]
        followers = {g[-1]: c for g, c in table.items() if g[:-1] == context}
        if followers:
            total = sum(followers.values())
            left = sum(discount[min(c, 3)] for c in followers.values()) / total
            c = followers.get(word, 0)
            p = (c - discount[min(c, 3)]) / total + left * p
    return p


def test_kneser_ney_equals_its_definition() -> None:
    # a heavy tail, so that every order has n-grams that were seen once, twice and three times
    rng = np.random.default_rng(2)
    train = rng.zipf(1.5, 1500).clip(max=199).astype(np.uint16)
    held = rng.zipf(1.5, 12).clip(max=199).astype(np.uint16)
    levels = ngram.fit(train)
    got = ngram.log_probs(levels, held, 200)
    for at in range(4, 12):
        history = tuple(held[at - 4 : at].tolist())
        want = brute_force(train.tolist(), history, int(held[at]), 200)
        assert got[at - 4] == pytest.approx(math.log(want), rel=1e-9)
    # and it is a distribution
    every = [
        ngram.log_probs(levels, np.array([*held[:4], w], np.uint16), 200)[0] for w in range(200)
    ]
    assert sum(map(math.exp, every)) == pytest.approx(1.0)


def test_trace_round_trip(tmp_path: Path) -> None:
    routes = np.array(list(itertools.permutations(range(3), 2)), np.uint8)[None].repeat(2, 0)
    texts = [
        {"ids": [1, 2, 3, 4], "licence": "MIT", "source": "a"},
        {"ids": [5, 6], "licence": "CC0-1.0", "source": "b"},
    ]
    trace = trace_of(routes, texts, ("small", "code", "tune"), 3)
    trace.save(tmp_path / "t.npz")
    back = RoutingTrace.load(tmp_path / "t.npz")
    assert np.array_equal(back.ids, routes)
    assert back.meta.documents == (4, 2)
    assert back.meta.licence == "CC0-1.0; MIT"
    with pytest.raises(ValueError, match="6 routed tokens, 4 of text"):
        trace_of(routes, texts[:1], ("small", "code", "tune"), 3)


def test_gaps_stay_inside_documents() -> None:
    ids = np.array([[[0], [1], [0], [0], [0]]])
    assert token_gaps(ids, (3, 2)).tolist() == [0, 0, 2, 0, 1]


def test_skew_by_hand() -> None:
    ids = np.zeros((1, 8, 1), np.int16)
    ids[0, 6:, 0] = (1, 2)
    meta = RoutingTraceMeta("m", "t", "CC0-1.0", 4, (0,))
    found = skew(RoutingTrace(ids, meta))
    assert found["curve"] == [0.75, 0.875, 1.0, 1.0]
    assert found["top"]["0.250"] == 0.75
