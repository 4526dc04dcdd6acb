"""The records of the catalogue: one FLOP class each, and the symbols that their formulas use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from headrace.explain.catalogue.units import Unit
from headrace.machine.profile import MachineProfile

Status = Literal["verified", "draft", "contested"]
Kind = Literal["formula", "rule", "note"]

# Formulas of a record by resource, and the unit that each must have.
RESOURCE_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "tensor": "flop",
        "vector": "flop",
        "special": "flop",
        "cpu": "flop",
        "hbm": "byte",
        "pcie": "byte",
        "dram": "byte",
        "link": "byte",
        "disk": "byte",
        "host": "s",
        "launches": "1",
    }
)

_EMPTY: Mapping[str, Any] = MappingProxyType({})

# Of a check that states none: what four digits of a source allow. At 1e-3 a count of 1,280 passed for 1,281.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Check:
    """A formula against a value that was found in another way.

    want: a number, or a sum of plain numbers; source: where it is from. page: the figure of the
    page of FLOP classes that the catalogue was begun from, if it gives one; where that differs,
    the record's ``correction`` says why.
    """

    expr: str
    want: float | str
    source: str
    profile: str
    values: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    tolerance: float = TOLERANCE
    page: float | None = None


@dataclass(frozen=True)
class Rule:
    """A decision or a fact as a small expression of its inputs. cases: (inputs, output)."""

    expr: str
    inputs: tuple[str, ...]
    output: str
    cases: tuple[tuple[Mapping[str, Any], Any], ...]


@dataclass(frozen=True)
class Record:
    """One FLOP class.

    work: formula by resource of ``RESOURCE_UNITS``; empty for rules and notes
    outputs: further quantities that follow, by name
    dtype: what multiplies in ``work["tensor"]``
    profile: the profile that it is shown with
    ignores: what the formula leaves out; correction: what the page of FLOP classes has wrong
    leans_on: ids of the records that it takes a part from
    """

    id: str
    title: str
    category: str
    about: str
    status: Status
    confidence: float
    work: Mapping[str, str]
    outputs: Mapping[str, str]
    rule: Rule | None
    checks: tuple[Check, ...]
    sources: tuple[str, ...]
    leans_on: tuple[str, ...]
    profile: str
    dtype: str = "bf16"
    ignores: str = ""
    correction: str = ""

    @property
    def kind(self) -> Kind:
        return "rule" if self.rule else "formula" if self.work or self.outputs else "note"

    @property
    def formulas(self) -> Mapping[str, str]:
        """Work and outputs."""
        return {**self.work, **self.outputs}


@dataclass(frozen=True)
class Symbol:
    """A quantity that formulas name. Exactly one of default, formula and rate says where it is from."""

    name: str
    group: str
    unit: Unit
    unit_text: str
    about: str
    default: float | None = None
    formula: str | None = None
    rate: str | None = None

    @property
    def settable(self) -> bool:
        """Whether a user may give it another value."""
        return self.formula is None and self.group != "unit"


@dataclass(frozen=True)
class Profile:
    """A model, a workload and a machine: values of symbols that differ from the defaults."""

    name: str
    about: str
    machine: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Symbols:
    """All symbols, with the profiles and the machines that the checks use."""

    by_name: Mapping[str, Symbol]
    profiles: Mapping[str, Profile]
    machines: Mapping[str, MachineProfile]

    @property
    def units(self) -> Mapping[str, Unit]:
        return {name: symbol.unit for name, symbol in self.by_name.items()}


@dataclass(frozen=True)
class Catalogue:
    """Every record by id, in the order of the files."""

    records: Mapping[str, Record]
    symbols: Symbols

    def leaned_on(self) -> dict[str, tuple[str, ...]]:
        """For each record the ids of those that lean on it, most leaned on first."""
        users: dict[str, list[str]] = {name: [] for name in self.records}
        for record in self.records.values():
            for target in record.leans_on:
                users[target].append(record.id)
        ordered = sorted(users, key=lambda name: (-len(users[name]), name))
        return {name: tuple(users[name]) for name in ordered}
