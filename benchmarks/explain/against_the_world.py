"""Predictions against every end-to-end figure of the background texts: Markdown and JSON.

python -m benchmarks.explain.against_the_world [--out FOLDER]

The efficiencies are those of src/headrace/explain/engines.toml, one set for an engine. A range is
compared by its middle. Bars: at least 12 rows within 20%, at least 60% of all, median error of all at
most 15%.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.explain.world_desktop import desktop
from benchmarks.explain.world_freetoken import freetoken_paper
from benchmarks.explain.world_memory import memory
from benchmarks.explain.world_mpfa import mpfa_ratios, mpfa_shares, mpfa_times
from benchmarks.explain.world_rows import SOURCES, Row

WITHIN, MIN_ROWS, MIN_SHARE, MEDIAN = 0.20, 12, 0.60, 0.15
OUT = Path("benchmarks/results/explain")
LEFT_OUT = Path(__file__).with_name("left_out.toml")


def rows() -> list[Row]:
    """Every figure with a prediction."""
    return [
        *desktop(),
        *freetoken_paper(),
        *memory(),
        *mpfa_times(),
        *mpfa_ratios(),
        *mpfa_shares(),
    ]


def left_out() -> list[dict[str, str]]:
    """Figures without one: source, figure, why."""
    return tomllib.loads(LEFT_OUT.read_text(encoding="utf-8"))["figure"]


def compare(row: Row) -> dict[str, Any]:
    predicted = row.predict()
    return {
        "source": SOURCES[row.source],
        "kind": row.kind,
        "what": row.what,
        "machine": row.machine,
        "setting": row.setting,
        "unit": row.unit,
        "published": row.published,
        "published_range": None if row.low is None else [row.low, row.high],
        "predicted": predicted,
        "error": predicted / row.published - 1,
        "within_20_percent": abs(predicted / row.published - 1) <= WITHIN,
        "why": row.why,
    }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(one["error"]) for one in found]
    inside = sum(one["within_20_percent"] for one in found)
    return {
        "rows": len(found),
        "within_20_percent": inside,
        "share": inside / len(found),
        "median_error": median(errors),
        "holds": inside >= MIN_ROWS
        and inside / len(found) >= MIN_SHARE
        and median(errors) <= MEDIAN,
    }


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(found: list[dict[str, Any]], totals: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Predictions against the world",
        "",
        "Written by `python -m benchmarks.explain.against_the_world`. Every end-to-end figure of the texts",
        "that the project started from, failures included. Efficiencies are one set for an engine, none for",
        "a row (`src/headrace/explain/engines.toml`); conditions: `benchmarks/explain/world_conditions.py`.",
        "",
        "| rows | number | within 20% | share | median error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, one in totals.items():
        lines.append(
            f"| {name} | {one['rows']} | {one['within_20_percent']} | {one['share']:.0%} | "
            f"{one['median_error']:.1%} |"
        )
    lines += [
        "",
        "| kind | figure | machine | engine, placement | published | predicted | error | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        given = number(one["published"])
        if one["published_range"]:
            given = " to ".join(number(v) for v in one["published_range"])
        mark = "" if one["within_20_percent"] else " **off**"
        lines.append(
            f"| {one['kind']} | {one['what']} | {one['machine']} | {one['setting']} | {given} "
            f"{one['unit']} | "
            f"{number(one['predicted'])} | {one['error']:+.1%}{mark} | {one['source']} |"
        )
    lines += ["", "## Where it is off, and why", ""]
    for one in found:
        if not one["within_20_percent"]:
            why = one["why"] or "not understood"
            lines.append(f"- {one['what']}, {one['setting']} ({one['error']:+.0%}): {why}.")
    lines += [
        "",
        "## Figures without a prediction",
        "",
        "| figure | why | source |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {o['figure']} | {o['why']} | {SOURCES[o['source']]} |" for o in left_out()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    found = [compare(row) for row in rows()]
    totals = {"all": summary(found)}
    for kind in ("speed", "memory", "ratio", "share"):
        totals[kind] = summary([one for one in found if one["kind"] == kind])
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"totals": totals, "rows": found, "left_out": left_out()}, indent=2)
    (out / "against_the_world.json").write_text(text + "\n", encoding="utf-8")
    (out / "against_the_world.md").write_text(markdown(found, totals), encoding="utf-8")
    print(json.dumps(totals, indent=2))
    return 0 if totals["all"]["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
