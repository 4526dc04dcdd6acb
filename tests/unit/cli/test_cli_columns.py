"""Lines for terminals: wrapped by hand below, whole where nobody looks."""

from __future__ import annotations

import os

import pytest

from headrace.cli import columns
from headrace.cli.columns import fitted, show, table, terminal_width, wants_color

LONG = "label       first text  " + "word " * 12


def test_what_goes_to_a_file_is_whole():
    assert fitted([LONG, ""], None) == [LONG, ""]
    rows = [("A", "B"), ("x" * 60, "y" * 60)]
    assert table(rows, None) == ["A" + " " * 61 + "B", "x" * 60 + "  " + "y" * 60]


def test_a_line_goes_on_below_its_last_column():
    assert fitted(["label       one two three four five six seven eight nine ten"], 50) == [
        "label       one two three four five six seven",
        "            eight nine ten",
    ]
    # the second column begins at 30, which leaves 20 of 50: the line goes on below the first
    assert fitted(["label       one two three     four five six seven eight nine ten"], 50) == [
        "label       one two three     four five six seven",
        "            eight nine ten",
    ]
    assert fitted(["  a paragraph that is longer than its line is"], 34) == [
        "  a paragraph that is longer than",
        "  its line is",
    ]
    assert fitted(["x" * 30], 20) == ["x" * 20, "x" * 10]


def test_lines_that_fit_stay_and_no_word_is_lost():
    for width in range(33, 90):
        found = fitted([LONG, "short"], width)
        assert max(map(len, found)) <= width
        assert " ".join(" ".join(found).split()) == " ".join((LONG + "short").split())


def test_a_table_whose_text_has_no_room_puts_each_first_cell_on_a_line():
    rows = [("NAME", "SIZE", "TEXT"), ("n" * 40, "12 GB", "one two three four five six seven")]
    assert table(rows, 81) == [
        "NAME" + " " * 38 + "SIZE   TEXT",
        "n" * 40 + "  12 GB  one two three four five six",
        " " * 49 + "seven",
    ]
    assert table(rows, 60) == [
        "NAME",
        "    SIZE   TEXT",
        "n" * 40,
        "    12 GB  one two three four five six seven",
    ]


def test_the_width_is_the_terminal_s_or_none(monkeypatch: pytest.MonkeyPatch, capsys):
    assert terminal_width() is None  # captured
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(columns.shutil, "get_terminal_size", lambda: os.terminal_size((40, 9)))
    assert terminal_width() == 40
    show(["a  " + "word " * 10])
    assert capsys.readouterr().out == "a  " + "word " * 6 + "word\n   word word word\n"


def test_colours_are_for_terminals_whose_users_want_them(monkeypatch: pytest.MonkeyPatch):
    for value, there, wanted in (("", True, True), ("1", True, False), ("", False, False)):
        monkeypatch.setenv("NO_COLOR", value)
        monkeypatch.setattr("sys.stdout.isatty", lambda there=there: there, raising=False)
        assert wants_color() is wanted
