"""Scripted text of the kinds that the corpus lacks: dialogue, lists and tables, agent transcripts.

Slot-filled grammars over words and sentences of held-out documents. A document is a function of its
seed and of those words alone. What comes out is marked synthetic wherever it is kept: its shape is
ours, only its vocabulary is anybody's language.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAMES = (
    "Ada Bela Chen Dara Emil Farah Goran Hana Ivo Jun Kofi Lena Mira Nadir Olga Pia Ravi".split()
)
UNITS = "ms GB tokens requests rows bytes percent pages errors connections".split()
MONTHS = "January March April June July September October December".split()


@dataclass(frozen=True)
class Words:
    """What the slots are filled with."""

    sentences: tuple[str, ...]
    terms: tuple[str, ...]
    identifiers: tuple[str, ...]
    code: tuple[str, ...]  # runs of three to thirteen lines


def words_of(prose: Sequence[str], code: Sequence[str]) -> Words:
    """Sentences and terms of prose; identifiers and short runs of lines of code."""
    sentences: dict[str, None] = {}
    terms: Counter[str] = Counter()
    for text in prose:
        flat = " ".join(text.split())
        for sentence in re.findall(r"(?<=[.!?] )[A-Z][^.!?]{30,160}[.!?](?= )", flat):
            sentences[sentence] = None
        terms.update(re.findall(r"\b[a-z]{4,14}\b", flat))
    identifiers: Counter[str] = Counter()
    runs: dict[str, None] = {}
    for text in code:
        identifiers.update(re.findall(r"\b(?:def|class) (\w{4,30})", text))
        for run in text.split("\n\n"):
            if 2 <= run.count("\n") <= 12 and len(run) < 600:
                runs[run.strip("\n")] = None
    common = [w for w, n in terms.most_common() if n >= 3]
    return Words(tuple(sentences), tuple(common), tuple(identifiers), tuple(runs))


class Script:
    """One document being written: a seeded source of choices and the words."""

    def __init__(self, seed: str, words: Words) -> None:
        self.rng, self.words = random.Random(seed), words

    def of(self, options: Sequence[str]) -> str:
        return self.rng.choice(options)

    def sentence(self) -> str:
        return self.of(self.words.sentences)

    def term(self) -> str:
        # common words more often, as in language
        at = int(len(self.words.terms) * self.rng.random() ** 2)
        return self.words.terms[at]

    def identifier(self) -> str:
        return self.of(self.words.identifiers)

    def number(self) -> str:
        value = self.rng.randint(0, 10 ** self.rng.randint(1, 5))
        return self.of((str(value), f"{value / 10:.1f}", f"{value:,}"))

    def date(self) -> str:
        return f"{self.rng.randint(1, 28)} {self.of(MONTHS)} {self.rng.randint(1990, 2026)}"

    def path(self) -> str:
        folder = "/".join(self.of(self.words.terms[:800]) for _ in range(self.rng.randint(1, 3)))
        return f"{folder}/{self.identifier().lower()}.{self.of(('py', 'md', 'json', 'c', 'txt'))}"

    def slug(self) -> str:
        return f"{self.rng.getrandbits(32):08x}"

    def times(self, low: int, high: int, make: Callable[[], str]) -> list[str]:
        return [make() for _ in range(self.rng.randint(low, high))]


def _question(s: Script) -> str:
    a, b, name = s.term(), s.term(), s.identifier()
    return s.of(
        (
            f"What does {name} do when the {a} is missing?",
            f"Could you explain the difference between {a} and {b}?",
            f"How do I change the {a} of a {b}?",
            f"Why is {s.number()} {s.of(UNITS)} the limit for {a}?",
            f"Did you see what happened on {s.date()} with the {a}?",
            f"Is there a way to {a} without {b}?",
            f'I read this: "{s.sentence()}" Is it still true?',
            f"Which {a} would you choose, and why?",
        )
    )


def _answer(s: Script) -> str:
    opening = s.of(
        ("Yes.", "No, not quite.", "It depends.", "Sure.", "Good question.", "I think so.", "", "")
    )
    body = " ".join(s.times(1, 4, s.sentence))
    closing = s.of(
        ("", "", f"Try {s.identifier()} first.", "Does that help?", f"See {s.path()}.",
         f"In short: {s.term()} before {s.term()}.")
    )  # fmt: skip
    if s.rng.random() < 0.2:
        body += f"\n\n    {s.of(s.words.code)}"
    return " ".join(p for p in (opening, body, closing) if p)


def _reaction(s: Script) -> str:
    return s.of(
        ("Thanks!", "I see.", "Hm, are you sure?", "That is not what I meant.", "Go on.",
         f"And the {s.term()}?", "OK, then I will try that.", f"It says {s.number()} here.")
    )  # fmt: skip


def dialogue(s: Script) -> str:
    """People, or a user and an assistant, taking turns; three ways of setting them."""
    style = s.rng.randint(0, 2)
    a, b = s.rng.sample(NAMES, 2) if style else ("User", "Assistant")
    lines: list[str] = []
    for _ in range(s.rng.randint(4, 12)):
        asked = f"{_reaction(s)} {_question(s)}" if lines and s.rng.random() < 0.5 else _question(s)
        if style == 2:
            verb = s.of(("asked", "said", "wondered", "wrote"))
            lines.append(
                f'"{asked}" {verb} {a}.\n\n"{_answer(s)}" {b} {s.of(("answered", "said"))}.'
            )
        else:
            lines.append(f"{a}: {asked}\n\n{b}: {_answer(s)}")
    return "\n\n".join(lines)


def _bullets(s: Script) -> str:
    mark = s.of(("- ", "* ", "1. ", "[ ] "))
    items = s.times(
        4,
        12,
        lambda: s.of(
            (
                f"{s.term()}: {s.sentence()}",
                f"{s.term()} and {s.term()}",
                f"{s.identifier()}() - {s.term()} {s.term()} of the {s.term()}",
                f"{s.number()} {s.of(UNITS)} of {s.term()} ({s.date()})",
            )
        ),
    )
    lines = [(f"{i}. " if mark == "1. " else mark) + item for i, item in enumerate(items, start=1)]
    return f"{s.term().capitalize()} {s.of(('list', 'notes', 'steps', 'checklist'))}:\n\n" + (
        "\n".join(lines)
    )


def _cells(s: Script) -> list[list[str]]:
    width = s.rng.randint(3, 6)
    makers = [s.rng.choice((s.term, s.number, s.identifier, s.date, s.slug)) for _ in range(width)]
    head = [s.term() for _ in range(width)]
    return [head, *([make() for make in makers] for _ in range(s.rng.randint(4, 14)))]


def _grid(s: Script) -> str:
    rows = _cells(s)
    style = s.rng.randint(0, 3)
    if style == 0:  # Markdown
        rule = "|" + "|".join(" --- " for _ in rows[0]) + "|"
        body = ["| " + " | ".join(r) + " |" for r in rows]
        return "\n".join([body[0], rule, *body[1:]])
    if style == 1:  # comma-separated
        return "\n".join(",".join(c.replace(",", "") for c in r) for r in rows)
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    if style == 2:  # aligned
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip() for r in rows)
    rule = "+" + "+".join("-" * (w + 2) for w in widths) + "+"
    body = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths)) + " |" for r in rows]
    return "\n".join([rule, body[0], rule, *body[1:], rule])


def table(s: Script) -> str:
    """Lists and tables with a line of text between them."""
    parts: list[str] = []
    for _ in range(s.rng.randint(3, 7)):
        parts.append(_bullets(s) if s.rng.random() < 0.45 else _grid(s))
        if s.rng.random() < 0.4:
            parts.append(s.sentence())
    return "\n\n".join(parts)


def _diff(s: Script) -> str:
    path = s.path()
    lines = [f"--- a/{path}", f"+++ b/{path}",
             f"@@ -{s.rng.randint(1, 400)},7 +{s.rng.randint(1, 400)},8 @@"]  # fmt: skip
    for line in s.of(s.words.code).split("\n"):
        if s.rng.random() < 0.3:
            lines.append("-" + line)
            lines.append("+" + line.replace(s.of(("self", "value", "None")), s.term()))
        else:
            lines.append(" " + line)
    return "\n".join(lines)


def _shell(s: Script) -> tuple[str, str]:
    """A command and what it printed."""
    name = s.identifier()
    listing = [
        f"-rw-r--r-- 1 user user {s.rng.randint(90, 99_999):6d} {s.of(MONTHS)[:3]} "
        f"{s.rng.randint(1, 28):2d} {s.path().rsplit('/', 1)[-1]}"
        for _ in range(s.rng.randint(3, 9))
    ]
    found = [f"{s.path()}:{s.rng.randint(1, 900)}:def {name}(self):" for _ in range(4)]
    failed, passed = s.rng.randint(0, 3), s.rng.randint(1, 90)
    tests = [f"FAILED tests/test_{s.term()}.py::test_{s.term()} - {s.of(('AssertionError', 'KeyError', 'ValueError'))}: {s.term()}"
             for _ in range(failed)]  # fmt: skip
    tests.append(f"{failed} failed, {passed} passed in {s.rng.random() * 20:.2f}s")
    options = (
        ("ls -l " + s.of(s.words.terms[:800]), "\n".join(listing)),
        (f'grep -rn "def {name}" .', "\n".join(found)),
        ("python -m pytest -q", "\n".join(tests)),
        ("git log --oneline | head", "\n".join(f"{s.slug()[:7]} {s.of(('Fix', 'Add', 'Remove'))} {s.term()} {s.term()}"
                                                for _ in range(5))),
        (f"cat {s.path()}", s.of(s.words.code)),
        ("git diff", _diff(s)),
    )  # fmt: skip
    return s.rng.choice(options)


def _value(s: Script, depth: int) -> object:
    if depth and s.rng.random() < 0.35:
        return {s.term(): _value(s, depth - 1) for _ in range(s.rng.randint(1, 4))}
    if depth and s.rng.random() < 0.2:
        return [_value(s, 0) for _ in range(s.rng.randint(1, 5))]
    return s.rng.choice(
        (s.term(), s.rng.randint(0, 9999), s.rng.random() < 0.5, None, s.slug(), s.path())
    )


def transcript(s: Script) -> str:
    """An agent at work: task, thoughts, tool calls as JSON, their output, diffs, a summary."""
    call = s.of(("Tool call", "Action", "assistant to=functions", ">>> tool"))
    lines = [f"Task: {_question(s)} Look into {s.path()}."]
    for _ in range(s.rng.randint(4, 10)):
        thought = f"I will look at the {s.term()} in {s.identifier()}."
        lines.append(f"Thought: {s.of((thought, s.sentence()))}")
        kind = s.rng.random()
        if kind < 0.5:
            command, output = _shell(s)
            body = json.dumps(
                {"name": s.of(("shell", "bash", "run")), "arguments": {"command": command}}
            )
            lines += [f"{call}: {body}", f"Output:\n{output}"]
        elif kind < 0.75:
            arguments = {s.term(): _value(s, 1) for _ in range(s.rng.randint(1, 4))}
            indent = s.rng.choice((None, 2))
            body = json.dumps({"name": s.identifier(), "arguments": arguments}, indent=indent)
            result = json.dumps({"status": "ok", "result": _value(s, 2)}, indent=indent)
            lines += [f"{call}: {body}", f"Output:\n{result}"]
        else:
            lines += [f"{call}: apply_patch", _diff(s), "Output:\nDone!"]
    lines.append(f"Summary: {' '.join(s.times(1, 3, s.sentence))}")
    return "\n\n".join(lines)


KINDS: dict[str, Callable[[Script], str]] = {
    "dialogue": dialogue,
    "tables": table,
    "agent": transcript,
}


def document(kind: str, seed: str, words: Words) -> str:
    """The document of this kind and seed."""
    return KINDS[kind](Script(f"{kind} {seed}", words))
