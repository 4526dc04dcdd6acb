"""Records with numbers put in: values of symbols, work, price, checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import ConfigError, MachineError
from headrace.explain.catalogue.expression import evaluate, symbols_of
from headrace.explain.catalogue.load import DEFAULT_PROFILE
from headrace.explain.catalogue.record import Catalogue, Check, Record, Rule, Symbols
from headrace.explain.cost import Priced, Work, price, rate_of
from headrace.machine.profile import MachineProfile


@dataclass(frozen=True)
class Setting:
    """Values of all symbols with the machine that the rates among them are from."""

    values: Mapping[str, float]
    machine: MachineProfile
    about: str


def setting(
    symbols: Symbols,
    profile: str = DEFAULT_PROFILE,
    values: Mapping[str, float] | None = None,
    machine: MachineProfile | None = None,
) -> Setting:
    """Values of all symbols: defaults, then the profile's, then ``values``, then what follows.

    A rate that the machine lacks has no value; only formulas that need it fail.

    Raises:
        ConfigError: no such profile, or ``values`` names no symbol that can be set.
    """
    if profile not in symbols.profiles:
        raise ConfigError(
            f"there is no profile {profile!r}", hint=f"known: {', '.join(symbols.profiles)}"
        )
    chosen = symbols.profiles[profile]
    machine = machine or symbols.machines[chosen.machine]
    given = {**chosen.values, **(values or {})}
    result: dict[str, float] = {}
    for name in given:
        known = symbols.by_name.get(name)
        if known is None or known.formula is not None or known.group == "unit":
            raise ConfigError(f"{name!r} is no symbol that can be set")
    for name, symbol in symbols.by_name.items():
        if symbol.formula is not None:
            if all(needed in result for needed in symbols_of(symbol.formula)):
                result[name] = float(evaluate(symbol.formula, result))
        elif name in given:
            result[name] = float(given[name])
        elif symbol.rate is not None:
            _put_rate(result, name, symbol.rate, machine)
        else:
            result[name] = symbol.default or 0.0
    return Setting(result, machine, chosen.about)


def _put_rate(values: dict[str, float], name: str, rate: str, machine: MachineProfile) -> None:
    try:
        values[name] = rate_of(machine, rate)
    except MachineError:
        return


def work_of(record: Record, values: Mapping[str, float]) -> Work:
    """The record's work for these values of the symbols."""
    amounts = {name: float(evaluate(formula, values)) for name, formula in record.work.items()}
    return Work(
        tensor_flops={record.dtype: amounts["tensor"]} if "tensor" in amounts else {},
        vector_flops=amounts.get("vector", 0.0),
        special_ops=amounts.get("special", 0.0),
        cpu_flops={"f32": amounts["cpu"]} if "cpu" in amounts else {},
        hbm_nbytes=amounts.get("hbm", 0.0),
        pcie_nbytes=amounts.get("pcie", 0.0),
        dram_nbytes=amounts.get("dram", 0.0),
        link_nbytes=amounts.get("link", 0.0),
        disk_nbytes=amounts.get("disk", 0.0),
        host_s=amounts.get("host", 0.0),
        launches=amounts.get("launches", 0.0),
    )


def price_of(record: Record, at: Setting) -> Priced:
    """The record's price, and with it what binds, for these symbols on their machine."""
    return price(work_of(record, at.values), at.machine)


def outputs_of(record: Record, at: Setting) -> dict[str, float]:
    """The record's further quantities."""
    return {name: float(evaluate(formula, at.values)) for name, formula in record.outputs.items()}


@dataclass(frozen=True)
class CheckResult:
    """One check of one record: what was expected and what came out."""

    record: str
    expr: str
    want: Any
    got: Any
    holds: bool
    source: str
    page: float | None = None


def run_checks(catalogue: Catalogue) -> list[CheckResult]:
    """Every check and every rule's case of every record."""
    results: list[CheckResult] = []
    for record in catalogue.records.values():
        results += [_check(record.id, check, catalogue.symbols) for check in record.checks]
        if record.rule is not None:
            results += _cases(record.id, record.rule)
    return results


def _check(record: str, check: Check, symbols: Symbols) -> CheckResult:
    at = setting(symbols, check.profile, check.values)
    got = float(evaluate(check.expr, at.values))
    want = float(evaluate(check.want, {})) if isinstance(check.want, str) else float(check.want)
    holds = math.isclose(got, want, rel_tol=check.tolerance, abs_tol=1e-12)
    return CheckResult(record, check.expr, want, got, holds, check.source, check.page)


def _cases(record: str, rule: Rule) -> list[CheckResult]:
    results: list[CheckResult] = []
    for inputs, want in rule.cases:
        got = evaluate(rule.expr, inputs)
        same = got == want or (
            isinstance(want, float) and math.isclose(float(got), want, rel_tol=1e-9)
        )
        shown = f"{rule.output} of {', '.join(f'{k}={v}' for k, v in inputs.items())}"
        results.append(CheckResult(record, shown, want, got, same, "the rule's case"))
    return results
