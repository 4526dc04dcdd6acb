"""Generated pages are fresh, and every row of the list of cases has its test."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_cases, gen_docs, readme_table

ROOT = Path(__file__).parents[2]


def test_generated_pages_are_fresh() -> None:
    assert gen_docs.stale_pages(gen_docs.all_pages()) == [], "run `make docs`"


def test_every_case_has_a_test_or_a_reason() -> None:
    rows, problems = check_cases.load()
    assert problems == []
    assert len(rows) == len({row.id for row in rows})


def test_cases_without_tests_and_tests_without_cases_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "cases.toml").write_text(
        '[[section]]\ntitle = "S"\n[section.rows]\nB001 = "one"\nB002 = "two"\nB003 = "three"\n'
        '[later]\nB003 = "not yet"\n',
        encoding="utf-8",
    )
    # Built from parts, so that this file itself names no such row.
    source = "\n".join(f"def test_{row}_x(): ..." for row in ("b001", "b" + "999"))
    (folder / "test_x.py").write_text(source, encoding="utf-8")
    rows, problems = check_cases.load(tmp_path)
    assert [row.state for row in rows] == ["tested", "MISSING", "later"]
    assert len(problems) == 2
    assert problems[0].startswith("B002")
    assert "B999" in problems[1]


def test_the_pages_of_figures_are_what_the_results_say() -> None:
    if not readme_table.RESULTS.exists():
        pytest.skip("no results are committed yet")
    for path, text in readme_table.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run scripts/readme_table.py"
