"""Records with numbers put in: values of symbols, work, price, checks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.core.errors import ConfigError, HeadraceError, MachineError
from headrace.explain.catalogue.expression import evaluate, symbols_of
from headrace.explain.catalogue.load import DEFAULT_PROFILE
from headrace.explain.catalogue.record import Catalogue, Check, Record, Rule, Symbols
from headrace.explain.cost import BYTE_RATES, Priced, Work, on_cpu, price, rate_of
from headrace.machine.profile import MachineProfile


@dataclass(frozen=True)
class Setting:
    """Values of all symbols with the machine that the rates among them are from.

    ``missing``: symbols without a value, with the rate that the machine lacks for them. ``own``: symbols
    that were given for a model which is none of the table's; None where it is.
    """

    values: Mapping[str, float]
    machine: MachineProfile
    about: str
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    own: frozenset[str] | None = None


def setting(
    symbols: Symbols,
    profile: str = DEFAULT_PROFILE,
    values: Mapping[str, float] | None = None,
    machine: MachineProfile | None = None,
) -> Setting:
    """Values of all symbols: defaults, then the profile's, then ``values``, then what follows.

    A rate that the machine lacks has no value; only formulas that need it fail. On a machine without a GPU
    the CPU and its memory take the GPU's place: nothing is offloaded, and threads are woken where kernels
    were launched.

    Raises:
        ConfigError: no such profile, or ``values`` names no symbol that can be set.
    """
    if profile not in symbols.profiles:
        raise ConfigError(
            f"there is no profile {profile!r}", hint=f"known: {', '.join(symbols.profiles)}"
        )
    chosen = symbols.profiles[profile]
    machine = machine or symbols.machines[chosen.machine]
    alone = machine.gpu is None
    given = {**chosen.values, **(_ON_CPU if alone else {}), **(values or {})}
    result: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name in given:
        _check_settable(name, symbols)
    for name, symbol in symbols.by_name.items():
        if symbol.formula is not None:
            lacking = [
                missing[needed] for needed in symbols_of(symbol.formula) if needed in missing
            ]
            if lacking:
                missing[name] = lacking[0]
            else:
                result[name] = float(evaluate(symbol.formula, result))
        elif name in given:
            result[name] = float(given[name])
        elif symbol.rate is not None:
            rate = _CPU_RATES.get(symbol.rate, symbol.rate) if alone else symbol.rate
            try:
                result[name] = rate_of(machine, rate)
            except MachineError:
                missing[name] = symbol.rate
        else:
            result[name] = symbol.default or 0.0
    return Setting(result, machine, chosen.about, missing)


# What stands in for a GPU's rates on a machine that has none, and how models lie there.
_CPU_RATES: Mapping[str, str] = {
    **dict.fromkeys(("gpu_flops_bf16", "gpu_flops_f32", "gpu_flops_special"), "cpu_flops_f32"),
    "hbm_read": "dram_read",
    "kernel_launch": "thread_wake",
    "graph_kernel": "thread_wake",
}
_ON_CPU = {"offl": 0.0, "graph": 0.0}


def _check_settable(name: str, symbols: Symbols) -> None:
    known = symbols.by_name.get(name)
    if known is not None and known.settable:
        return
    if known is not None and known.formula is not None:
        why = f"--set {name}: {name!r} is no symbol that can be set: it follows from others"
        hint = f"it is {known.formula}"
    else:
        why = f"--set {name}: {name!r} is no symbol that can be set"
        free = [n for n, symbol in symbols.by_name.items() if symbol.settable]
        near = difflib.get_close_matches(name, free, n=3)
        hint = (f"did you mean {' or '.join(near)}? " if near else "") + (
            "`headrace flops show ID` lists the symbols of a class"
        )
    raise ConfigError(why, hint=hint, param="--set")


# Of rates that only a machine with a GPU has.
_GPU_RATES = ("hbm_", "pcie_", "gpu_", "kernel_", "graph_", "flag_", "link")


def why_unpriced(record: Record, at: Setting, error: HeadraceError) -> str:
    """Why a record has no price there: the rates that the machine lacks, or what the error says."""
    rates = {at.missing[n] for f in record.work.values() for n in symbols_of(f) if n in at.missing}
    rates |= {r for n, r in BYTE_RATES.items() if n in record.work and r not in at.machine.rates}
    if not rates:
        return error.message
    if at.machine.gpu is None and all(name.startswith(_GPU_RATES) for name in rates):
        return "the machine has no GPU, which this class runs on"
    return f"the machine has no rate {' and no rate '.join(sorted(rates))}"


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
    return price(_placed(work_of(record, at.values), at.machine), at.machine)


def seconds_of(record: Record, at: Setting, name: str) -> tuple[str, float]:
    """The resource that serves one of the record's amounts there, and the seconds that it takes alone."""
    priced = price_of(replace(record, work={name: record.work[name]}), at)
    return priced.bound or name, priced.floor_s


def _placed(work: Work, machine: MachineProfile) -> Work:
    """The work where the machine does it: on its CPU if it has no GPU."""
    return work if machine.gpu is not None else on_cpu(work)


def outputs_of(record: Record, at: Setting) -> dict[str, float | None]:
    """The record's further quantities; None for one that takes a rate which the machine lacks."""
    return {
        name: None
        if any(symbol in at.missing for symbol in symbols_of(formula))
        else float(evaluate(formula, at.values))
        for name, formula in record.outputs.items()
    }


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
