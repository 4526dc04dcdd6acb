"""The table of published figures: its bars, its honesty, and that the stored copy is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.explain.against_the_world import compare, left_out, markdown, rows, summary
from benchmarks.explain.world_rows import SOURCES

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "explain" / "against_the_world.json"


@pytest.fixture(scope="module")
def found():
    return [compare(row) for row in rows()]


def test_bars(found):
    total = summary(found)
    assert total["within_20_percent"] >= 12
    assert total["share"] >= 0.6
    assert total["median_error"] <= 0.15


def test_speeds_alone_hold_them_too(found):
    speeds = summary([one for one in found if one["kind"] == "speed"])
    assert speeds["within_20_percent"] >= 12
    assert speeds["share"] >= 0.6
    assert speeds["median_error"] <= 0.15


def test_figures_that_have_to_be_there(found):
    published = {one["published"] for one in found}
    assert {
        42.42,
        24.20,
        11.14,
        39.3,
        14.9,
        7.3,
        800,
        42.4,
        6.5,
        53.8,
        9.5,
        94.8,
        61.0,
    } <= published
    ranges = [one["published_range"] for one in found]
    assert [77, 83] in ranges
    assert [22, 25] in ranges


def test_failures_have_a_reason(found):
    for one in found:
        assert one["within_20_percent"] or one["why"], one["what"]
    assert all(o["source"] in SOURCES and o["figure"] and o["why"] for o in left_out())


def test_the_stored_table_is_current(found):
    stored = json.loads(RESULT.read_text("utf-8"))
    for then, now in zip(stored["rows"], found, strict=True):
        assert then["what"] == now["what"]
        assert then["predicted"] == pytest.approx(now["predicted"], rel=1e-9)
    text = RESULT.with_suffix(".md").read_text("utf-8")
    assert text == markdown(found, stored["totals"])
