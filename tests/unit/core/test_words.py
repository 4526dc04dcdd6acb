"""Numbers and their words, and that no message counts by hand."""

import ast
import re
from pathlib import Path

import pytest

from headrace.core.words import counted, plural

SOURCES = Path(__file__).parents[3] / "src" / "headrace"
# What people see with a number in front of it.
NOUNS = "byte core day draft expert head layer page part row sequence slice slot step tensor thread token"
# Faults of Headrace itself and arguments of its own calls: written for who mends it.
INTERNAL = {"InternalError", "ValueError", "TypeError", "RuntimeError"}
# Never 1, by what they are or by what was asked before.
MANY = (  # drafts are four, flags asked for more than one
    r"[A-Z_]+(\[\d\])?(:,)?|CONTEXT - MANY|_count\(spec.total_weights, 4\)|cores|"
    r"figures\(report.tokens_per_s\)|"
    r"len\(found\)|block_tokens|needed|(args|report|workload|work|best|spec|plan|self)\.\w+(:,|:.2f| \+ 1)?"
)
# Steps, sources of rates and placements that say how something was measured on many; engine limits.
ELSEWHERE = ("engine/", "experts/", "kv/", "ops/")


def test_one_thing_is_one_and_everything_else_is_many() -> None:
    assert [counted(n, "thread") for n in (0, 1, 2, 12345)] == [
        "0 threads",
        "1 thread",
        "2 threads",
        "12345 threads",
    ]
    assert counted(12345, "token", form=",") == "12,345 tokens"
    assert counted(1, "entry", "entries") == "1 entry"
    assert counted(3, "entry", "entries") == "3 entries"
    assert plural(1, "byte is", "bytes are") == "byte is"
    assert plural(0, "byte is", "bytes are") == "bytes are"


@pytest.mark.parametrize(("days", "said"), [(0.4, "0 days"), (0.98, "1 day"), (1.6, "2 days")])
def test_a_rounded_number_is_counted_as_it_is_printed(days: float, said: str) -> None:
    assert counted(days, "day", form=".0f") == said


def _counts_by_hand(tree: ast.Module) -> list[str]:
    """Formatted values with a plural behind them, outside of faults of Headrace itself."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        name = getattr(getattr(node, "func", None), "id", "")
        if name in INTERNAL:
            inside |= {id(child) for child in ast.walk(node)}
    found: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr) or id(node) in inside:
            continue
        for value, text in zip(node.values, node.values[1:]):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                word = re.match(rf" (\w+ )?({'|'.join(NOUNS.split())})s\b", str(text.value))
                shown = ast.unparse(value)[1:-1]
                if word is not None and re.fullmatch(MANY, shown) is None:
                    found.append(f"{{{shown}}}{word[0]}")
    return found


def test_every_message_counts_with_the_one_helper() -> None:
    wrong = {
        str(file.relative_to(SOURCES)): found
        for file in sorted(SOURCES.rglob("*.py"))
        if not str(file.relative_to(SOURCES)).startswith(ELSEWHERE)
        and (found := _counts_by_hand(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert wrong == {}


def test_the_search_finds_what_is_counted_by_hand() -> None:
    tree = ast.parse("print(f'{n} threads, {m} idle cores'); InternalError(f'{n} threads')")
    assert _counts_by_hand(tree) == ["{n} threads", "{m} idle cores"]
