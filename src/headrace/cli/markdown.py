"""Answers as they stream: plain text, or Markdown redrawn while its last block grows.

A terminal cannot redraw what has scrolled away. So finished blocks are printed once and for all,
and only the block that still grows is redrawn in place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

# Redraws a second: rich's own default is 4, which looks like stuttering at 70 tokens a second.
REDRAWS_PER_S = 12


def split_finished(text: str) -> tuple[str, str]:
    """Split Markdown into blocks that no later text can change, and the rest.

    A blank line outside of a fenced code block ends a block, unless what follows is indented or a
    list item: those may belong to a list that began before.
    """
    fence: str | None = None
    cut = position = 0
    previous_blank = False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        continues = line[:1] in (" ", "\t") or re.match(r"([-*+]|\d+[.)])(\s|$)", bare) is not None
        if fence is None and previous_blank and bare and not continues:
            cut = position
        marker = re.match(r"(`{3,}|~{3,})", bare)
        if marker is not None:
            if fence is None:
                fence = marker[1]
            elif bare.startswith(fence) and not bare.strip(fence[0]):
                fence = None
        previous_blank = not bare and fence is None
        position += len(line)
    return text[:cut], text[cut:]


class AnswerPrinter(Protocol):
    """Prints one answer; used as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def add(self, text: str) -> None: ...


class PlainPrinter:
    """Writes text as it comes, and ends the line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    def add(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class GrowingBlock:
    """Markdown that is still being written: its last lines, as many as the screen has.

    A block taller than the screen is printed whole once it has ended.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.markdown import Markdown
        from rich.segment import Segment

        lines = console.render_lines(Markdown(self.text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:  # two lines of air for the cursor
            yield from line
            yield Segment.line()


class MarkdownPrinter:
    """Draws Markdown: finished blocks stay, the growing one is redrawn."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self._console = console
        self._text = ""
        self._begun = False
        self._live = Live(
            console=console,
            refresh_per_second=REDRAWS_PER_S,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()
        self._print(self._text)
        self._text = ""

    def add(self, text: str) -> None:
        self._text += text
        finished, rest = split_finished(self._text)
        if finished:
            self._print(finished)
            self._text = rest
        self._live.update(GrowingBlock(self._text))

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        if text.strip():
            if self._begun:
                self._console.print()
            self._begun = True
            self._console.print(Markdown(text))


def answer_printer(*, plain: bool) -> Callable[[], AnswerPrinter]:
    """What makes a printer for each answer."""
    if plain:
        return PlainPrinter
    from rich.console import Console

    console = Console()
    return lambda: MarkdownPrinter(console)
