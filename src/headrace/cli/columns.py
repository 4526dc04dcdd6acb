"""Lines that fit a terminal: whole ones for files and pipes, wrapped ones for a screen."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

_GAP, _INDENT = 2, 4
# Below this a column of text is a tower of words: then it goes on lines of its own.
_LEAST = 32
# Where a line goes on: below the last of its columns, which begin after two blanks or more.
_COLUMN = re.compile(r"\S {2,}(?=\S)")


def terminal_width() -> int | None:
    """Columns of the terminal that standard output goes to; None if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wants_color() -> bool:
    """Whether standard output is a terminal whose user wants colours (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def show(lines: Iterable[str], width: int | None = None) -> None:
    """Print lines, those that are too long wrapped. width: None for the terminal's, if there is one."""
    for line in fitted(lines, width or terminal_width()):
        print(line)


def fitted(lines: Iterable[str], width: int | None) -> list[str]:
    """The lines, each in as many as ``width`` columns need; as they are where it is None.

    A line goes on below the beginning of its last column, or of its text where that leaves too little room.
    """
    if width is None:
        return list(lines)
    found: list[str] = []
    for line in lines:
        if len(line) <= width:
            found.append(line)
            continue
        begun = len(line) - len(line.lstrip())
        places = [begun, *(match.end() for match in _COLUMN.finditer(line))]
        hang = max(place for place in places if place == begun or place <= width - _LEAST)
        found += _hung(line[:hang], line[hang:], width)
    return found


def _hung(before: str, text: str, width: int) -> list[str]:
    """``before`` and the text beside it, which goes on below its beginning."""
    room = max(width - len(before), 1)
    lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    return [(before + lines[0]).rstrip(), *(" " * len(before) + more for more in lines[1:])]


def table(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Rows, the heads first, as aligned columns of which the last one is text.

    Where the width leaves the text too little room beside the others, each row's first cell has a line of
    its own, and the others follow below it; where that is not enough either, the text has its own, too.
    """
    last = len(rows[0]) - 1
    widths = [max(len(row[i]) for row in rows) for i in range(last)]
    least = min(_LEAST, max(len(row[last]) for row in rows))
    if width is None or sum(widths) + _GAP * last + least <= width:
        wide = sys.maxsize if width is None else width
        return [line for row in rows for line in _hung(_cells(row, widths), row[last], wide)]
    apart = " " * _INDENT
    found: list[str] = []
    for row in rows:
        cells = apart + _cells(row[1:], widths[1:])
        found += fitted([row[0]], width)
        if len(cells) + min(least, _LEAST * 3 // 4) <= width:
            found += _hung(cells, row[last], width)
        else:
            found += fitted([cells.rstrip()], width)
            found += _hung(apart, row[last], width) if row[last] else []
    return found


def _cells(row: Sequence[str], widths: Sequence[int]) -> str:
    """The columns before the text, with the gap behind each."""
    return "".join(cell.ljust(size + _GAP) for cell, size in zip(row, widths))
