"""Writes the README's table of measured figures from benchmarks/results/bars.json.

Nothing in the table is typed by hand: `make bench` measures, writes that file and runs this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results/bars.json"
START, END = "<!-- measured: start -->", "<!-- measured: end -->"
NONE_YET = "No figures have been measured yet: `make bench` measures them here."


def cell(value: Any, unit: str) -> str:
    return "" if value is None else f"{value} {unit}".strip()


def table(bars: dict[str, dict[str, Any]]) -> str:
    """The table, and a line with machine, date and commit for each set of them that occurs."""
    if not bars:
        return NONE_YET
    lines = ["| bar | result | beside | in detail |", "| --- | --- | --- | --- |"]
    for name, bar in sorted(bars.items()):
        # The peer's own figure stands in the note with its unit: the result is often a ratio.
        peer = str(bar.get("peer") or "")
        note = str(bar.get("note", "")).replace("|", "/")
        lines.append(
            f"| {name} | {cell(bar.get('value'), bar.get('unit', ''))} | {peer} | {note} |"
        )
    runs = dict.fromkeys((b["machine"], b["date"], b["commit"]) for b in bars.values())
    lines += ["", *(f"Measured on {m}, {d}, commit {c}." for m, d, c in runs)]
    return "\n".join(lines)


def updated() -> str:
    """The README with its table renewed."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    bars = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return f"{before}{START}\n{table(bars)}\n{END}{after}"


def main() -> None:
    README.write_text(updated(), encoding="utf-8")


if __name__ == "__main__":
    main()
