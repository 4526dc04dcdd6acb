"""Numbers with the word they count, as every message and table here has them: ``1 thread``, ``2 threads``."""

from __future__ import annotations


def plural(count: float, one: str, many: str = "") -> str:
    """The word for so many: ``one`` for exactly 1, else ``many`` (default: ``one`` with an s).

    A verb can go along: ``plural(n, "byte is", "bytes are")``.
    """
    return one if count == 1 else many or f"{one}s"


def counted(count: float, one: str, many: str = "", *, form: str = "") -> str:
    """The number and its word. ``form``: the number's format, such as ``","`` for 12,345.

    What is printed decides, not what is behind it: 0.98 with the form ".0f" is ``1 day``.
    """
    shown = format(count, form)
    return f"{shown} {plural(1 if shown == '1' else 0, one, many)}"
