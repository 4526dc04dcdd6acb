"""Reading the catalogue's files: one TOML file a category, and the table of symbols.

Loading takes some tens of milliseconds, so nothing loads it on import; callers keep what they got.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, cast

from headrace.core.errors import ConfigError, InternalError
from headrace.explain.catalogue.expression import unit_of
from headrace.explain.catalogue.record import (
    RESOURCE_UNITS,
    TOLERANCE,
    Catalogue,
    Check,
    Profile,
    Record,
    Rule,
    Symbol,
    Symbols,
)
from headrace.explain.catalogue.units import Unit, parse_unit
from headrace.machine.profile import GpuProfile, HostProfile, LinkProfile, MachineProfile, Rate

DEFAULT_PROFILE = "dense_decode"

CATEGORIES = (
    "step",
    "dense",
    "attention",
    "kv",
    "mixture",
    "speculation",
    "quantisation",
    "scheduling",
    "host",
    "parallel",
    "architectures",
    "multimodal",
    "encoders",
    "nvidia",
    "amd",
    "accelerators",
)

_KEYS = frozenset(
    (
        *("id", "title", "about", "status", "confidence", "outputs", "rule", "checks", "sources"),
        *("leans_on", "profile", "dtype", "ignores", "correction", *RESOURCE_UNITS),
    )
)


def load_catalogue() -> Catalogue:
    """Read every record.

    Raises:
        InternalError: a file has an unknown key, an id twice, or a link to nothing.
    """
    symbols = load_symbols()
    records: dict[str, Record] = {}
    for category in CATEGORIES:
        for entry in _read(category)["class"]:
            record = _record(category, entry)
            if record.id in records:
                raise InternalError(f"the catalogue has {record.id!r} twice")
            records[record.id] = record
    for record in records.values():
        for target in record.leans_on:
            if target not in records:
                raise InternalError(f"record {record.id!r} leans on {target!r}, which is not there")
    return Catalogue(records, symbols)


def find_record(catalogue: Catalogue, name: str) -> Record:
    """The record of an id, or of the only id that contains ``name``; ``flops/`` before it is left out.

    Raises:
        ConfigError: there is none, or more than one.
    """
    name = name.removeprefix("flops/")
    if name in catalogue.records:
        return catalogue.records[name]
    near = [known for known in catalogue.records if name in known]
    if len(near) == 1:
        return catalogue.records[near[0]]
    hint = "`headrace flops list` shows all"
    if near:
        more = f"; {len(near) - 6} more have {name!r} in their id" if len(near) > 6 else ""
        hint = f"did you mean {', '.join(near[:6])}?{more}"
    elif alike := difflib.get_close_matches(name, list(catalogue.records), n=3, cutoff=0.5):
        hint = f"did you mean {' or '.join(alike)}? {hint}"
    raise ConfigError(f"no FLOP class has the id {name!r}", hint=hint)


def load_symbols() -> Symbols:
    """Read the table of symbols with its profiles and machines."""
    table = _read("symbols")
    symbols: dict[str, Symbol] = {}
    for name, (group, unit, default, about) in table["symbols"].items():
        symbols[name] = Symbol(name, group, parse_unit(unit), unit, about, default=float(default))
    for name, (rate, unit, about) in table["rates"].items():
        symbols[name] = Symbol(name, "machine", parse_unit(unit), unit, about, rate=rate)
    units: dict[str, Unit] = {name: symbol.unit for name, symbol in symbols.items()}
    for name, formula in table["derived"].items():
        units[name] = unit_of(formula, units)
        symbols[name] = Symbol(name, "derived", units[name], str(units[name]), "", formula=formula)
    profiles: dict[str, Profile] = {}
    for name, entry in table["profiles"].items():
        profiles[name] = _profile(name, dict(entry), profiles)
    machines = {name: _machine(name, entry) for name, entry in table["machines"].items()}
    return Symbols(symbols, profiles, machines)


def _read(name: str) -> dict[str, Any]:
    resource = files("headrace.explain.catalogue.data").joinpath(f"{name}.toml")
    return tomllib.loads(resource.read_text(encoding="utf-8"))


def _profile(name: str, entry: dict[str, Any], known: Mapping[str, Profile]) -> Profile:
    like = known[entry.pop("like")] if "like" in entry else None
    about = str(entry.pop("about"))
    machine = str(entry.pop("machine", like.machine if like else ""))
    values = {**(like.values if like else {}), **{k: float(v) for k, v in entry.items()}}
    return Profile(name, about, machine, values)


def _machine(name: str, entry: Mapping[str, Any]) -> MachineProfile:
    gpu, memory = entry["gpu"]
    cpu, cores, host_memory = entry["host"]
    return MachineProfile(
        name=name,
        origin="catalogued",
        host=HostProfile(cpu=cpu, cores=cores, memory_nbytes=host_memory),
        gpu=GpuProfile(name=gpu, memory_nbytes=memory),
        link=LinkProfile(name="PCIe"),
        rates={
            rate: Rate(float(value), unit, "alone", source)
            for rate, (value, unit, source) in entry["rates"].items()
        },
    )


def _record(category: str, entry: Mapping[str, Any]) -> Record:
    unknown = set(entry) - _KEYS
    if unknown:
        raise InternalError(f"record {entry.get('id')!r} has unknown keys: {sorted(unknown)}")
    profile = str(entry.get("profile", DEFAULT_PROFILE))
    return Record(
        id=entry["id"],
        title=entry["title"],
        category=category,
        about=" ".join(str(entry["about"]).split()),
        status=entry["status"],
        confidence=float(entry["confidence"]),
        work={name: entry[name] for name in RESOURCE_UNITS if name in entry},
        outputs=dict(entry.get("outputs", {})),
        rule=_rule(entry["rule"]) if "rule" in entry else None,
        checks=tuple(_checks(entry.get("checks", ()), profile)),
        sources=tuple(entry.get("sources", ())),
        leans_on=tuple(entry.get("leans_on", ())),
        profile=profile,
        dtype=str(entry.get("dtype", "bf16")),
        ignores=str(entry.get("ignores", "")),
        correction=" ".join(str(entry.get("correction", "")).split()),
    )


def _rule(entry: Mapping[str, Any]) -> Rule:
    cases = tuple((cast(Mapping[str, Any], inputs), output) for inputs, output in entry["cases"])
    return Rule(entry["expr"], tuple(cases[0][0]), entry["output"], cases)


def _checks(entries: Iterable[Mapping[str, Any]], profile: str) -> Iterable[Check]:
    for entry in entries:
        unknown = set(entry) - {"expr", "want", "source", "profile", "with", "tol", "page"}
        if unknown:
            raise InternalError(f"check {entry['expr']!r} has unknown keys: {sorted(unknown)}")
        yield Check(
            expr=entry["expr"],
            want=entry["want"],
            source=entry["source"],
            profile=str(entry.get("profile", profile)),
            values=dict(entry.get("with", {})),
            tolerance=float(entry.get("tol", TOLERANCE)),
            page=entry.get("page"),
        )
