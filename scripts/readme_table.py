"""Writes the README's table of measured figures, and docs/measured.md, from bars.json.

Nothing in either is typed by hand: `make bench` measures, writes that file and runs this. The README
has a line for each figure; how it was measured, the peer and what limits it are in docs/measured.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MEASURED = ROOT / "docs/measured.md"
RESULTS = ROOT / "benchmarks/results/bars.json"
START, END = "<!-- measured: start -->", "<!-- measured: end -->"
NONE_YET = "No figures have been measured yet: `make bench` measures them here."
# By the first two digits of a bar's name.
SUBJECTS = {
    "01": "Foundation: dense models on the CPU",
    "02": "Experts in host memory",
    "03": "KV cache and attention",
    "04": "Plan and explain",
    "07": "Demo mixtures",
}

Bars = dict[str, dict[str, Any]]


def result(bar: dict[str, Any]) -> str:
    return f"{bar['value']} {bar.get('unit', '')}".strip()


def machines(bars: Bars) -> dict[str, str]:
    """A letter for each machine that a figure comes from."""
    found = dict.fromkeys(bar["machine"] for bar in bars.values())
    return {name: chr(ord("A") + number) for number, name in enumerate(found)}


def table(bars: Bars) -> str:
    """A line for each figure, with the machine as a letter."""
    if not bars:
        return NONE_YET
    letters = machines(bars)
    lines = ["| bar | result | beside | on | date |", "| --- | --- | --- | --- | --- |"]
    for name, bar in sorted(bars.items()):
        link = f"[{name}](docs/measured.md#{name.replace('.', '')})"
        peer = bar.get("peer") or ""
        row = (link, result(bar), peer, letters[bar["machine"]], bar["date"])
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", *(f"{letter}: {name}.  " for name, letter in letters.items())]
    return "\n".join(lines).rstrip()


def page(bars: Bars) -> str:
    """docs/measured.md: everything that is known about each figure."""
    parts = [
        "# What was measured\n",
        "Written by `scripts/readme_table.py` from "
        "[bars.json](../benchmarks/results/bars.json): do not edit by hand.",
    ]
    subject = ""
    for name, bar in sorted(bars.items()):
        if SUBJECTS[name[:2]] != subject:
            subject = SUBJECTS[name[:2]]
            parts.append(f"\n## {subject}")
        parts.append(f"\n### {name}\n\n**{result(bar)}**")
        if bar.get("peer"):
            figure = bar.get("peer_value")
            parts.append(f"\nBeside: {bar['peer']}" + ("" if figure is None else f" ({figure})"))
        if bar.get("note"):
            parts.append(f"\n{bar['note']}")
        parts.append(
            f"\n{bar['machine']}, {bar['date']}, commit {bar['commit']}: `{bar['command']}`"
        )
    return "\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """What each file should hold."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    bars = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return {README: f"{before}{START}\n{table(bars)}\n{END}{after}", MEASURED: page(bars)}


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
