"""Prints what pyproject.toml asks for, one requirement a line, without torch.

scripts/setup.sh installs torch first (or keeps the one that is there), then these. A torch build
that brings its own Triton keeps it: the pinned Triton of the ``dev`` extra would break it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirement_name(requirement: str) -> str:
    """``"torch>=2.11,<2.14"`` -> ``"torch"``, in the normal form of package names."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def torch_brings_triton() -> bool:
    """Whether the installed torch names Triton among its requirements and it is installed."""
    try:
        wanted = importlib.metadata.requires("torch") or []
        importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    # "triton==3.6.0; platform_system == 'Linux'"; one for an extra does not count.
    return any(requirement_name(r) == "triton" and "extra ==" not in r for r in wanted)


def requirements(extras: list[str], *, base: bool = True) -> list[str]:
    """The project's requirements (``base``) and those of ``extras``, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted: list[str] = list(project["dependencies"]) if base else []
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    skip = {"torch"} | ({"triton"} if torch_brings_triton() else set())
    return [r for r in wanted if requirement_name(r) not in skip]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="with those of this extra")
    parser.add_argument("--only", help="this extra's alone")
    args = parser.parse_args()
    for line in requirements([args.only], base=False) if args.only else requirements(args.extra):
        print(line)


if __name__ == "__main__":
    main()
