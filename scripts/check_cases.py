"""docs/reference/cases.md from tests/cases.toml and the names of tests; and whether rows lack one.

A test covers row B012 when it is called ``test_b012_...``. Run alone, this prints rows that have
neither a test nor a reason to wait, and names of tests whose row is unknown.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/reference/cases.md")
HEAD = """\
# Faults of other engines, and what is right here

<!-- Written by scripts/check_cases.py from tests/cases.toml and the tests' names: `make docs`. -->

Each row began as a public report about another engine. `tested` names the tests that hold the right
behaviour here; `later` says what a row waits for.
"""


@dataclass(frozen=True)
class Row:
    """One case: where it belongs, what is right, its tests as (file, name), why it waits."""

    id: str
    section: str
    right: str
    tests: tuple[tuple[str, str], ...]
    later: str | None

    @property
    def state(self) -> str:
        if self.tests:
            return "tested"
        return "later" if self.later else "MISSING"


def find_tests(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Row id -> tests, from every ``def test_bNNN_`` below ``folder``."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^\s*(?:async )?def (test_b(\d{3})_\w+)", text, re.MULTILINE):
            name = path.relative_to(folder.parent).as_posix()
            found.setdefault(f"B{match[2]}", []).append((name, match[1]))
    return found


def read_rows(cases: Path, tests: dict[str, list[tuple[str, str]]]) -> list[Row]:
    """Every row of the file with its tests."""
    data = tomllib.loads(cases.read_text(encoding="utf-8"))
    rows: list[Row] = []
    for section in data["section"]:
        for id_, right in section["rows"].items():
            later = data["later"].get(id_) or section.get("later")
            rows.append(Row(id_, section["title"], right, tuple(tests.get(id_, ())), later))
    return rows


def problems(rows: list[Row], tests: dict[str, list[tuple[str, str]]]) -> list[str]:
    """What is wrong, one line each; empty when all is well."""
    known = {row.id for row in rows}
    found = [
        f"{row.id} has no test (a function test_{row.id.lower()}_...): {row.right}"
        for row in rows
        if row.state == "MISSING"
    ]
    found += [
        f"{file}: {name} names {id_}, which tests/cases.toml does not have"
        for id_, named in tests.items()
        if id_ not in known
        for file, name in named
    ]
    return found


def page(rows: list[Row]) -> str:
    """The reference page."""
    parts = [HEAD]
    for title in dict.fromkeys(row.section for row in rows):
        parts += [f"\n## {title}\n", "| row | right | state | test or reason |"]
        parts.append("| --- | --- | --- | --- |")
        for row in rows:
            if row.section != title:
                continue
            named = ", ".join(f"`{file.removeprefix('tests/')}`: {n}" for file, n in row.tests)
            parts.append(f"| {row.id} | {row.right} | {row.state} | {named or row.later or ''} |")
    return "\n".join(parts) + "\n"


def load(root: Path = ROOT) -> tuple[list[Row], list[str]]:
    """Rows and problems of a checkout."""
    tests = find_tests(root / "tests")
    rows = read_rows(root / "tests/cases.toml", tests)
    return rows, problems(rows, tests)


def pages() -> dict[Path, str]:
    return {PAGE: page(load()[0])}


def main() -> int:
    _, found = load()
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
