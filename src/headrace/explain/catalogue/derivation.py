"""A record with its numbers put in, line by line: what `headrace flops show` prints."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.core.errors import InternalError, MachineError
from headrace.explain.catalogue.evaluate import (
    Setting,
    outputs_of,
    price_of,
    seconds_of,
    why_unpriced,
    work_of,
)
from headrace.explain.catalogue.expression import evaluate, parse, symbols_of
from headrace.explain.catalogue.record import Catalogue, Record, Symbols
from headrace.explain.resources import TITLES, WORK_UNITS
from headrace.explain.units_text import amount, figures, seconds

# What a record's correction speaks of as "the page".
CORRECTS = "Corrects the page of FLOP classes that this catalogue began with"


def substituted(formula: str, values: Mapping[str, float]) -> str:
    """The formula with values in place of symbols."""

    class PutIn(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.Call:
            node.args = [self.visit(argument) for argument in node.args]
            return node

        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Name(id=figures(values[node.id], 4).replace(",", ""), ctx=node.ctx)

    copy = ast.parse(ast.unparse(parse(formula)), mode="eval").body
    return ast.unparse(PutIn().visit(copy))


def used_symbols(formulas: Iterable[str], symbols: Symbols) -> list[str]:
    """Symbols of the formulas and of what those are derived from, in the table's order."""
    found: set[str] = set()
    todo = [name for formula in formulas for name in symbols_of(formula)]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        formula = symbols.by_name[name].formula
        if formula is not None:
            todo += symbols_of(formula)
    return [name for name in symbols.by_name if name in found]


def work_lines(record: Record, at: Setting) -> list[str]:
    """Each resource: formula, with numbers, amount and time alone; then floor and bound.

    A resource for which the machine has no rate is said to have none.
    """
    lines: list[str] = []
    try:
        priced = price_of(record, at)
    except (MachineError, InternalError) as error:
        return [f"not priced on {at.machine.name}: {why_unpriced(record, at, error)}"]
    for name, formula in record.work.items():
        resource, time = seconds_of(record, at, name)
        value = float(evaluate(formula, at.values))
        mark = "   <- binds" if time and resource == priced.bound else ""
        unit = WORK_UNITS[name]
        size = seconds(value) if unit == "s" else amount(value, unit).rstrip()
        lines.append(f"{name:<9}{formula}")
        lines.append(f"{'':<9}= {substituted(formula, at.values)}")
        lines.append(f"{'':<9}= {size}, {seconds(time)}{mark}")
    if priced.bound:
        ratio = f"{figures(priced.intensity)} FLOPs a byte"
        if math.isinf(priced.intensity):
            ratio = "no bytes are moved"
        lines.append(
            f"floor    {seconds(priced.floor_s)}, bound by {TITLES[priced.bound]}; {ratio}"
        )
    return lines


def output_lines(record: Record, at: Setting) -> list[str]:
    """Each further quantity: its formula and its value."""
    return [
        f"{name} = {record.outputs[name]} = "
        + ("not known: this machine lacks a rate" if value is None else figures(value))
        for name, value in outputs_of(record, at).items()
    ]


def derivation(record: Record, catalogue: Catalogue, at: Setting) -> list[str]:
    """Everything about one record, as lines of text: a paragraph is one."""
    head = f"{record.id}  ({record.category}; {record.status}, confidence {record.confidence:.2f})"
    lines = [head, record.title, "", _paragraph(record.about)]
    if record.ignores:
        lines.append(_paragraph(f"Leaves out: {record.ignores}."))
    if record.correction:
        lines += ["", _paragraph(f"{CORRECTS}: {record.correction}")]
    if record.work:
        lines += ["", f"WORK  {at.about}; on {machine_title(at)}"]
        lines += [f"  {line}" for line in work_lines(record, at)]
    if record.outputs:
        lines += ["", "WHAT FOLLOWS"]
        lines += [f"  {line}" for line in output_lines(record, at)]
    if record.rule:
        lines += ["", f"RULE  {record.rule.output}", f"  {record.rule.expr}"]
        for inputs, output in record.rule.cases:
            given = ", ".join(f"{k} = {v}" for k, v in inputs.items())
            lines.append(f"  {given}: {output}")
    lines += _symbol_lines(record, catalogue.symbols, at)
    if record.checks:
        lines += ["", "CHECKS"]
        lines += [f"  {c.expr} = {c.want}: {c.source}" for c in record.checks]
    users = catalogue.leaned_on()[record.id]
    for title, ids in (("LEANS ON", record.leans_on), ("LEANED ON BY", users)):
        if ids:
            lines += ["", title, f"  {', '.join(ids)}"]
    return [*lines, "", "SOURCES", *(f"  {source}" for source in record.sources)]


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def machine_title(at: Setting) -> str:
    """The machine's name and what computes there."""
    gpu, host = at.machine.gpu, at.machine.host
    return f"{at.machine.name} ({gpu.name if gpu else f'{host.cpu}: the CPU computes'})"


def _symbol_lines(record: Record, symbols: Symbols, at: Setting) -> list[str]:
    names = used_symbols(record.formulas.values(), symbols)
    if not names:
        return []
    lines = ["", "SYMBOLS"]
    for name in names:
        symbol = symbols.by_name[name]
        if symbol.group == "unit" or name not in at.values:
            continue
        where = symbol.formula or symbol.about
        strange = at.own is not None and symbol.group == "model" and name not in at.own
        if strange and at.values[name]:
            where += " (an example's: the model has none)"
        unit = "" if symbol.unit_text == "1" else symbol.unit_text
        lines.append(f"  {name:<12} {figures(at.values[name], 4):>12} {unit:<14} {where}")
    return lines


def as_data(record: Record, catalogue: Catalogue, at: Setting) -> dict[str, Any]:
    """The record with its numbers, for ``--json``. The bound in it is computed for ``at``."""
    data: dict[str, Any] = {
        "id": record.id,
        "title": record.title,
        "category": record.category,
        "kind": record.kind,
        "about": record.about,
        "ignores": record.ignores,
        "correction": record.correction,
        "status": record.status,
        "confidence": record.confidence,
        "work": dict(record.work),
        "outputs": dict(record.outputs),
        "leans_on": list(record.leans_on),
        "leaned_on_by": list(catalogue.leaned_on()[record.id]),
        "sources": list(record.sources),
        "checks": [
            {"expr": c.expr, "want": c.want, "source": c.source, "profile": c.profile}
            for c in record.checks
        ],
    }
    if record.rule:
        data["rule"] = {
            "expr": record.rule.expr,
            "output": record.rule.output,
            "cases": [{"inputs": dict(i), "output": o} for i, o in record.rule.cases],
        }
    if record.work or record.outputs:
        data["at"] = _numbers(record, at)
    return data


def _numbers(record: Record, at: Setting) -> dict[str, Any]:
    numbers: dict[str, Any] = {"model": at.about, "machine": at.machine.name}
    try:
        work, priced = work_of(record, at.values), price_of(record, at)
    except (MachineError, InternalError) as error:
        return {**numbers, "not_priced": why_unpriced(record, at, error)}
    return {
        **numbers,
        "flops": work.flops,
        "nbytes": work.bytes_by_resource(),
        "seconds": dict(priced.seconds),
        "floor_s": priced.floor_s,
        "bound": priced.bound,
        "outputs": outputs_of(record, at),
    }
