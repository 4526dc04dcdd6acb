"""Print docs/routing.md's tables and ranges from ``benchmarks/results/routing/small.json``.

python -m benchmarks.routing.tables
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.routing.statistics import KINDS, OUT, PUBLISHED

Row = dict[str, Any]
AT_ONE = ("lru", "decayed", "static_hindsight", "static_same_kind", "static_all_kinds", "belady")
BY_RESIDENCY = ("lru", "decayed", "static_hindsight", "belady")


def percents(row: Row, names: tuple[str, ...]) -> str:
    return " | ".join(f"{100 * row[name]:.1f}" for name in names)


def span(values: Iterable[float]) -> str:
    """Smallest and largest of some shares, in percent."""
    found = [100 * v for v in values]
    return f"{min(found):.1f} to {max(found):.1f}"


def hit_tables(kinds: dict[str, Any]) -> None:
    print("| text |", " | ".join(AT_ONE), "|")
    for kind in (*KINDS, "mixed"):
        row = at_published(kinds[kind])
        print(f"| {kind} | {percents(row, AT_ONE)} |")
    print("\n| resident |", " | ".join(BY_RESIDENCY), "|")
    for row in kinds["mixed"]["hits"]:
        print(f"| {100 * row['residency']:.4g}% | {percents(row, BY_RESIDENCY)} |")


def at_published(kind: dict[str, Any]) -> Row:
    return next(r for r in kind["hits"] if r["residency"] == PUBLISHED["residency"])


def look_ups(kinds: dict[str, Any]) -> None:
    """What the page says of favourites and of reuse."""
    each = [kinds[kind] for kind in KINDS]
    for part in ("0.100", "0.250"):
        print(f"top {part} of a layer's experts:", span(k["skew"]["top"][part] for k in each))
    layers = [k["skew"]["top_quarter_by_layer"] for k in each]
    print("first layer's top quarter:", span(found[0] for found in layers))
    print("the most skewed layer of each kind:", [found.index(max(found)) for found in layers])
    for tokens in ("1", "4", "16", "32", "64"):
        even = kinds["prose"]["reuse"]["if_even"][tokens]
        within = span(k["reuse"]["within_tokens"][tokens] for k in each)
        print(f"within {tokens} tokens: {within} (even: {100 * even:.1f})")


def policies(kinds: dict[str, Any]) -> None:
    """What the page says of the policies."""
    ones = [at_published(kinds[kind]) for kind in KINDS]
    both = [*ones, at_published(kinds["mixed"])]
    for name in ("lru", "decayed", "belady"):
        print(f"{name}, kinds at 15.2%:", span(r[name] for r in ones))
    lost = ("static_same_kind", "static_all_kinds")
    for name in lost:
        print(f"{name} below hindsight:", span(r["static_hindsight"] - r[name] for r in ones))
    print("decayed above LRU:", span(r["decayed"] - r["lru"] for r in both))
    print("decayed as a part of Belady:", span(r["decayed"] / r["belady"] for r in both))
    print("Belady above decayed:", span(r["belady"] - r["decayed"] for r in both))
    rows = kinds["mixed"]["hits"]
    above = [r["decayed"] - r["static_hindsight"] for r in rows]
    print("mixed, decayed above static in hindsight:", span(above))
    behind = [f"{r['residency']:.3g}: {100 * (r['decayed'] - r['lru']):.1f}" for r in rows]
    print("mixed, LRU behind decayed:", ", ".join(behind))
    online = ("lru", *lost)
    every = [r for kind in (*KINDS, "mixed") for r in kinds[kind]["hits"]]
    best = max(max(r[name] for name in online) - r["decayed"] for r in every)
    print(f"decayed behind the best that does not see ahead: at most {100 * best:.1f}")
    print("half-lives:", {kind: at_published(kinds[kind])["half_life_tokens"] for kind in kinds})


def main() -> None:
    kinds = json.loads(OUT.read_text())["kinds"]
    hit_tables(kinds)
    print()
    look_ups(kinds)
    print()
    policies(kinds)


if __name__ == "__main__":
    main()
