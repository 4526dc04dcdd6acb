"""Files that flags name: what cannot be written is the user's to mend, and is said before the work."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from headrace.cli import bench
from headrace.cli.main import main
from headrace.cli.outputs import check_output, writing
from headrace.core.errors import ConfigError
from headrace.explain import report_png

PLAN = ["plan", "gpt-oss-20b", "--machine", "h200", "--picture"]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("measured before the flags were looked at")

    monkeypatch.setattr(bench, "measure", fail)
    monkeypatch.setattr(report_png, "require_matplotlib", lambda: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*PLAN, "{}/none/a.svg"], "there is no folder"),
        ([*PLAN, "{}/file/a.svg"], "there is no folder"),
        ([*PLAN, "{}/folder.svg"], "it is a folder"),
        ([*PLAN, "{}/a.png"], "has to end in .svg"),
        (["flops", "site", "{}/file/pages"], "cannot be written"),
        (["flops", "site", "{}/file"], "is a file"),
        (["flops", "site", "{}/other"], "did not write"),
        (["explain", "tiny", "--png", "{}/none/a.png"], "there is no folder"),
        (["explain", "tiny", "--png", "{}/a.xyz"], "has to end in .png"),
        (["bench", "machine", "--png", "{}/a.xyz"], "has to end in .png"),
        (["bench", "machine", "--png", "{}/none/a.png"], "there is no folder"),
        (["bench", "machine", "--output", "{}/none/a.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    words: list[str],
    message: str,
    tmp_path: Path,
    no_work: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("mine", "utf-8")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text("mine", "utf-8")
    assert main([word.format(tmp_path) for word in words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "hint:" in said.err
    assert said.out == ""
    assert (tmp_path / "other" / "index.html").read_text("utf-8") == "mine"


def test_a_cache_that_cannot_be_written_is_refused_first(
    tmp_path: Path,
    no_work: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("HEADRACE_PROFILES", str(tmp_path / "file" / "machines"))
    assert main(["bench", "machine"]) == 2
    assert "--output FILE" in capsys.readouterr().err


def test_the_site_can_be_written_again(tmp_path: Path) -> None:
    assert main(["flops", "site", str(tmp_path / "pages")]) == 0
    assert main(["flops", "site", str(tmp_path / "pages")]) == 0


def test_a_file_that_can_be_written_passes_and_a_full_disk_stays_one(tmp_path: Path) -> None:
    check_output(tmp_path / "a.SVG", "--picture", ".svg")
    with pytest.raises(OSError, match="full"), writing(tmp_path / "a", "--picture"):
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(ConfigError, match="gone"), writing(tmp_path / "a", "--picture"):
        raise OSError(errno.EROFS, "gone")
