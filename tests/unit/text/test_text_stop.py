"""Stop strings: validation, hold-back, ties."""

from __future__ import annotations

import pytest

from headrace.core.errors import RequestError
from headrace.text.stop import StopMatcher, validate_stops


def run(
    stops: tuple[str, ...], chunks: list[str], include: bool = False
) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    out = [matcher.push(c)[0] for c in chunks]
    return [*out, matcher.finish()], matcher.matched


def test_text_without_a_stop_passes_at_once() -> None:
    assert run(("END",), ["hello", " world"]) == (["hello", " world", ""], None)
    assert run((), ["hello"]) == (["hello", ""], None)


def test_possible_start_is_held_back_and_released() -> None:
    assert run(("END",), ["a E", "N", "x"]) == (["a ", "", "ENx", ""], None)
    assert run(("END",), ["a EN"]) == (["a ", "EN"], None)


def test_stop_over_several_chunks_is_cut_out() -> None:
    assert run(("END",), ["a E", "N", "D rest"]) == (["a ", "", "", ""], "END")


def test_b072_stop_string_is_kept_only_when_asked_for() -> None:
    assert run(("END",), ["aEND", "more"], include=True) == (["aEND", "", ""], "END")
    assert run(("END",), ["aE", "NDb"], include=True) == (["a", "END", ""], "END")
    assert run(("END",), ["aENDb"]) == (["a", ""], "END")


def test_after_a_match_everything_is_dropped() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("c") == ("", "x")
    assert matcher.finish() == ""


def test_the_match_that_ends_first_wins_and_then_the_longest() -> None:
    assert run(("abc", "b"), ["zabc"]) == (["za", ""], "b")
    assert run(("bc", "abc"), ["zabc"]) == (["z", ""], "abc")  # both end at c
    assert run(("abc", "bc"), ["zabc"]) == (["z", ""], "abc")  # in any order
    assert run(("\n\n", "\n"), ["a\n\n"]) == (["a", ""], "\n")


def test_the_longest_hold_back_over_overlapping_stops() -> None:
    assert run(("aab", "ab"), ["xaa", "b"]) == (["x", "", ""], "aab")
    assert run(("abab",), ["aba", "c"]) == (["", "abac", ""], None)
    assert run(("abab",), ["ababab"]) == (["", ""], "abab")
    assert run(("aab",), ["aaa", "b"]) == (["a", "", ""], "aab")  # no restart is missed


def test_emoji_and_newline_stops() -> None:
    assert run(("\U0001f6d1", "\n\nHuman:"), ["ok\n", "\nHum", "an", ": x"]) == (
        ["ok", "", "", "", ""], "\n\nHuman:",
    )  # fmt: skip


def test_stops_as_clients_send_them() -> None:
    assert validate_stops(None) == ()
    assert validate_stops([]) == ()
    assert validate_stops("x") == ("x",)
    assert validate_stops(["x", "yy", "x"]) == ("x", "yy")
    assert validate_stops(("x",)) == ("x",)


@pytest.mark.parametrize(
    ("value", "where"),
    [("", "stop is an empty"), ([""], r"stop\[0\]"), (["a", ""], r"stop\[1\]"), ([3], r"stop\[0\]"),
     (5, "stop is int"), ([None], r"stop\[0\]"), ({"a": 1}, "stop is dict")],
)  # fmt: skip
def test_b073_empty_stops_and_wrong_types_are_refused(value: object, where: str) -> None:
    with pytest.raises(RequestError, match=where) as caught:
        validate_stops(value)
    assert caught.value.param == "stop"


def test_refusal_names_another_field() -> None:
    with pytest.raises(RequestError, match="stop_sequences is an empty") as caught:
        validate_stops("", param="stop_sequences")
    assert caught.value.param == "stop_sequences"
