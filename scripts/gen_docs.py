"""Writes the generated reference pages; with ``--check`` fails where one is stale.

A page module beside this file has ``pages() -> {path below the repository: text}``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PAGE_MODULES = (
    "gen_schemas",
    "gen_cli",
    "gen_config",
    "check_cases",
    "docs_formats",
    "gen_flops",
    "gen_machines",
)


def all_pages() -> dict[Path, str]:
    """Every generated page."""
    found: dict[Path, str] = {}
    for name in PAGE_MODULES:
        found.update(importlib.import_module(f"scripts.{name}").pages())
    return found


def stale_pages(pages: dict[Path, str]) -> list[Path]:
    """Pages whose file is missing or differs."""
    return [
        path
        for path, text in pages.items()
        if not (ROOT / path).exists() or (ROOT / path).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check: bool = parser.parse_args().check
    pages = all_pages()
    stale = stale_pages(pages)
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path}", file=sys.stderr)
        if not check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(pages[path], encoding="utf-8")
    if check and stale:
        print("hint: run `make docs` and commit what it writes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
