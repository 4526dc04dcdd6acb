"""The formula language: what it takes, what it refuses, and its units."""

import math

import pytest

from headrace.core.errors import InternalError
from headrace.explain.catalogue.expression import evaluate, parse, symbols_of, unit_of
from headrace.explain.catalogue.functions import (
    acceptance_for,
    distinct,
    pairs,
    round_tokens,
    window_pairs,
)
from headrace.explain.catalogue.units import parse_unit

UNITS = {
    "b": parse_unit("byte"),
    "f": parse_unit("flop"),
    "n": parse_unit("layer"),
    "t": parse_unit("s"),
}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "x.real",
        "(lambda: 1)()",
        "[i for i in x]",
        "open('f')",
        "f'{x}'",
        "min(*x)",
        "min(a, key=b)",
        "1j",
        "x := 1",
        "1 +",
    ],
)
def test_what_is_no_formula_is_refused_before_it_runs(text: str):
    with pytest.raises(InternalError, match="formula"):
        parse(text)


def test_values():
    values = {"x": 3, "s": "a"}
    assert evaluate("2*x**2 - x/2", values) == 16.5
    assert evaluate("max(x, 5) if x > 2 and not x == 4 else 0", values) == 5
    assert evaluate("s in ['a', 'b'] or 1 < x <= 3", values) is True
    assert evaluate("{'a': [1, 2]}[s]", values) == [1, 2]
    assert symbols_of("min(a, b)*c") == {"a", "b", "c"}


def test_missing_symbols_and_division_by_zero_name_the_formula():
    with pytest.raises(InternalError, match="'y' has no value"):
        evaluate("y + 1", {})
    with pytest.raises(InternalError, match="divides by zero"):
        evaluate("1/x", {"x": 0})


def test_units_multiply_and_divide():
    assert str(unit_of("f/b*n", UNITS)) == "flop/byte"
    assert str(unit_of("2*b**2/t", UNITS)) == "byte^2/s"
    assert unit_of("b/b", UNITS).plain
    assert unit_of("0 + b", UNITS) == parse_unit("byte")
    assert unit_of("b if n > 2 else 0", UNITS) == parse_unit("byte")


@pytest.mark.parametrize(
    "text", ["b + f", "min(b, n)", "b > t", "ceil(b)", "b**n", "2**b", "b and 1"]
)
def test_units_that_do_not_go_together_are_refused(text: str):
    with pytest.raises(InternalError):
        unit_of(text, UNITS)


def test_pairs_by_counting():
    for cached, new, window in [(0, 5, 3), (4, 6, 3), (0, 3, 10), (2, 7, 4), (9, 1, 4)]:
        seen = [cached + i + 1 for i in range(new)]
        assert pairs(new, cached) == sum(seen)
        assert window_pairs(new, cached, window) == sum(min(s, window) for s in seen)


def test_distinct_experts_of_two_tokens_by_inclusion():
    # Each of 8 experts is missed by a token with 3/4, by both with 9/16: 8 * 7/16 are touched.
    assert distinct(8, 2, 2) == pytest.approx(3.5)
    assert distinct(0, 0, 5) == 0


def test_tokens_of_a_round_and_back():
    assert round_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert round_tokens(1, 4) == 5
    assert acceptance_for(1.875, 3) == pytest.approx(0.5)
    assert acceptance_for(0.9, 3) == 0
    assert acceptance_for(4.1, 3) == math.inf
