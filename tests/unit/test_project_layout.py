"""The repository itself: packages, versions, scripts, and what must not stand in it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

import headrace
from scripts import requirements

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"])


def tracked() -> list[Path]:
    """Text files under version control; all that look like it where git is not there."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [name for name in done.stdout.split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_every_package_folder_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "src/headrace").rglob("*.py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_one_version() -> None:
    assert headrace.__version__ == PROJECT["project"]["version"]


def test_source_files_stay_readable() -> None:
    """About 400 lines; 450 is where "about" ends."""
    long = {
        path.relative_to(ROOT).as_posix(): count
        for path in (ROOT / "src").rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert long == {}


def test_no_registry_is_named() -> None:
    """Mirrors differ from place to place: a client's own settings say which one is used."""
    # In parts, so that this file does not name them.
    hosts = re.compile(
        "|".join((r"pypi\." + "org", "python" + "hosted", r"download\." + "pytorch"))
    )
    found = [
        path.relative_to(ROOT).as_posix()
        for path in tracked()
        if path.suffix in {".py", ".sh", ".toml", ".md", ".yaml", ".yml", ".txt", ""}
        and hosts.search(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert found == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shell_scripts_parse_and_can_be_run(path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    assert subprocess.run([bash, "-n", str(path)], check=False).returncode == 0
    assert path.stat().st_mode & stat.S_IXUSR


def test_requirements_leave_torch_to_the_setup() -> None:
    names = [requirements.requirement_name(r) for r in requirements.requirements(["dev"])]
    assert "torch" not in names
    assert {"numpy", "huggingface-hub", "pytest", "ruff"} <= set(names)


@pytest.mark.parametrize(
    ("requires", "brings"),
    [
        (["triton==3.7.1; platform_system == 'Linux'", "numpy"], True),
        (["numpy", 'triton; extra == "opt"'], False),
        ([], False),
    ],
)
def test_a_torch_that_brings_its_triton_keeps_it(
    monkeypatch: pytest.MonkeyPatch, requires: list[str], brings: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.7.1")
    names = [requirements.requirement_name(r) for r in requirements.requirements(["dev"])]
    assert ("triton" in names) is not brings


def test_dependency_ranges_have_an_upper_end() -> None:
    """A new major version is tried before it is allowed; ``cuda`` takes torch's own Triton."""
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["build"]]
    assert [r for r in wanted if "<" not in r and "==" not in r] == []
    assert extras["cuda"] == ["triton"]
