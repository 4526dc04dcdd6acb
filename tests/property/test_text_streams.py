"""However a stream is cut, its text is the same; and every text survives encoding."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.control_text import encode_marked, mark_control_tokens, unused_characters
from headrace.text.detokenizer import Detokenizer
from headrace.text.stop import StopMatcher
from tests.fixtures.toy_tokenizer import SPECIALS, VOCAB_SIZE, byte_id, toy_tokenizer

TOKENIZER = toy_tokenizer()
BEGINNING = toy_tokenizer(add_bos=True)
# Few letters, so that overlaps and near misses are frequent.
letters = st.text(alphabet="ab\n\u00e9", max_size=24)
stop_sets = st.lists(st.text(alphabet="ab\n\u00e9", min_size=1, max_size=4), max_size=4)
utf8 = st.text().filter(lambda t: t.isascii() or t.encode("utf-8", "replace").decode() == t)


@st.composite
def chunked(draw: st.DrawFn) -> list[str]:
    text = draw(letters)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: of all matches in the text the first to end, the longest of those."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


@settings(max_examples=400, deadline=None)
@given(chunks=chunked(), stops=stop_sets, include=st.booleans())
def test_stop_matcher_equals_a_search_of_the_whole_text(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(tuple(stops), include)
    out = "".join(matcher.push(c)[0] for c in chunks) + matcher.finish()
    assert (out, matcher.matched) == expected("".join(chunks), stops, include)


@settings(max_examples=200, deadline=None)
@given(chunks=chunked(), stops=stop_sets)
def test_stop_matcher_never_holds_back_more_than_a_stop_could_need(
    chunks: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(tuple(stops))
    seen = sent = 0
    longest = max((len(s) for s in stops), default=1)
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        seen, sent = seen + len(chunk), sent + len(text)
        if matched is None:
            assert seen - sent < longest


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24), prompt=st.binary(max_size=6))
def test_b069_detokenized_bytes_equal_a_decode_of_the_whole(data: bytes, prompt: bytes) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    text = "".join(detokenizer.push([byte_id(b)]) for b in data) + detokenizer.finish()
    assert text == data.decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(prompt=st.text(max_size=5), output=st.text(max_size=5), cut=st.integers(0, 40))
def test_b068_prompt_and_output_cut_anywhere_give_the_new_text(
    prompt: str, output: str, cut: int
) -> None:
    whole = (prompt + output).encode("utf-8", "surrogatepass")
    head, tail = whole[:cut], whole[cut:]
    detokenizer = Detokenizer(TOKENIZER, [byte_id(b) for b in head])
    text = "".join(detokenizer.push([byte_id(b)]) for b in tail) + detokenizer.finish()
    # What a decode of everything has beyond the characters that the prompt had completed.
    complete = head.decode("utf-8", "ignore")
    assert text == whole.decode("utf-8", "replace")[len(complete) :]


@settings(max_examples=300, deadline=None)
@given(text=utf8, parse=st.booleans(), sep=st.sampled_from(["", *SPECIALS]))
def test_encoding_loses_nothing(text: str, parse: bool, sep: str) -> None:
    text = text + sep + text
    ids = TOKENIZER.encode(text, parse_special=parse)
    assert all(0 <= i < VOCAB_SIZE for i in ids)
    assert TOKENIZER.decode(ids, skip_special=False) == text
    if not parse:
        assert not any(TOKENIZER.is_special(i) for i in ids)


@settings(max_examples=100, deadline=None)
@given(text=utf8)
def test_b034_the_begin_token_stands_once(text: str) -> None:
    bos = BEGINNING.bos_token_id
    for whole in (text, "<|endoftext|>" + text):
        ids = BEGINNING.encode(whole)
        assert ids[0] == bos
        assert ids[1:2] != [bos] or whole.startswith("<|endoftext|><|endoftext|>")


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(["\n", " ", *SPECIALS]), utf8), max_size=6))
def test_text_without_marks_is_encoded_as_ever(parts: list[str]) -> None:
    text = "".join(parts)
    marks = unused_characters([text], 2)
    assert encode_marked(TOKENIZER, text, marks) == TOKENIZER.encode(text)
    marked = mark_control_tokens(text, TOKENIZER.special_pattern, marks)
    assert encode_marked(TOKENIZER, marked, marks) == TOKENIZER.encode(text, parse_special=False)
