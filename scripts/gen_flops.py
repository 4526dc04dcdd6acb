"""docs/reference/flop-classes.md from the catalogue's records."""

from __future__ import annotations

from pathlib import Path

from headrace.explain.catalogue.evaluate import run_checks
from headrace.explain.catalogue.load import load_catalogue
from headrace.explain.catalogue.record import Record

PAGE = Path("docs/reference/flop-classes.md")
HEAD = """\
# FLOP classes

<!-- Written by scripts/gen_flops.py from explain/catalogue/data: edit that, then run `make docs`. -->

{classes} classes of work, {checks} checks. A class says what it asks of each resource, as formulas of
symbols of a model, a workload and a machine; what binds is worked out from them and stands nowhere.
`headrace flops show ID` puts numbers in, `headrace flops site DIR` writes all of this as pages to
search. [How to read them](../explain.md).

"""
WRONG = """\
## Where published figures are wrong

The catalogue was begun from a published page of FLOP classes. These of its figures do not hold:

"""


def row(record: Record, users: int) -> str:
    work = ", ".join(record.work) or record.kind
    return (
        f"| `{record.id}` | {record.title} | {work} | {record.status}, {record.confidence:.2f} "
        f"| {len(record.checks) + (len(record.rule.cases) if record.rule else 0)} | {users} |"
    )


def pages() -> dict[Path, str]:
    catalogue = load_catalogue()
    users = catalogue.leaned_on()
    parts = [HEAD.format(classes=len(catalogue.records), checks=len(run_checks(catalogue)))]
    categories = dict.fromkeys(record.category for record in catalogue.records.values())
    for category in categories:
        parts.append(f"## {category.capitalize()}\n\n")
        parts.append("| class | what | asks of | status | checks | leaned on by |\n")
        parts.append("| --- | --- | --- | --- | --- | --- |\n")
        for record in catalogue.records.values():
            if record.category == category:
                parts.append(row(record, len(users[record.id])) + "\n")
        parts.append("\n")
    parts.append("## Where published figures are wrong\n\n")
    parts.append(
        "The catalogue was begun from a published page of FLOP classes. These of its figures do not hold:\n\n"
    )
    for record in catalogue.records.values():
        if record.correction:
            parts.append(f"- `{record.id}`: {record.correction}\n")
    return {PAGE: "".join(parts)}
