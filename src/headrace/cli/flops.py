"""``headrace flops``: the catalogue of FLOP classes, listed, shown with numbers, checked, as pages."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.columns import show, table, terminal_width
from headrace.cli.flags import Commands, add_command
from headrace.cli.outputs import writing
from headrace.cli.reporting import note
from headrace.core.errors import ConfigError, InternalError, MachineError
from headrace.core.words import counted

if TYPE_CHECKING:
    from headrace.explain.catalogue.evaluate import Setting
    from headrace.explain.catalogue.record import Catalogue, Record, Symbols
    from headrace.machine.profile import MachineProfile

DEFAULT = "dense_decode"
STATUSES = ("verified", "draft", "contested")
EXIT_CHECK_FAILED = 4


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "flops", "the catalogue of FLOP classes: what inference costs, and why", run_list
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = add_command(actions, "list", "list the classes", run_list)
    listing.add_argument("text", nargs="*", metavar="TEXT", help="words that an entry must hold")
    listing.add_argument("--bound", metavar="RESOURCE", help="bound by this resource, here")
    listing.add_argument("--resource", metavar="RESOURCE", help="with work on this resource")
    listing.add_argument("--status", choices=STATUSES, help="of this status")
    _add_setting(listing)
    show = add_command(actions, "show", "show one class with its numbers put in", run_show)
    show.add_argument("id", metavar="ID", help="the class, or a part of its name")
    _add_setting(show)
    check = add_command(actions, "check", "hold every check of the catalogue", run_check)
    check.add_argument("--json", action="store_true", help="print one JSON object")
    site = add_command(actions, "site", "write the catalogue as pages to search", run_site)
    site.add_argument("folder", type=Path, metavar="DIR", help="where the pages go")


def _add_setting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="MODEL", help="a profile's name, or a model (default: each class's own)")
    add(
        "--machine",
        metavar="NAME",
        help="a machine's name, or a profile's file (default: the model's)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="SYMBOL=VALUE",
        help="another value of a symbol, such as B=64; can be repeated",
    )
    add("--json", action="store_true", help="print JSON")


def find_machine(name: str, symbols: Symbols) -> MachineProfile:
    """A machine of the examples, or whatever ``headrace plan`` takes as a machine.

    Raises:
        ConfigError: there is none of this name, or the file is not a profile.
    """
    from headrace.cli.plan_source import read_machine

    return symbols.machines[name] if name in symbols.machines else read_machine(name)


def given_values(pairs: list[str]) -> dict[str, float]:
    """``["B=64"]`` -> {"B": 64}.

    Raises:
        ConfigError: one is not a name and a finite number of at least 0, or a name is there twice.
    """
    values: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not name or not math.isfinite(number) or number < 0:
            raise ConfigError(
                f"--set is {pair!r}; it must be SYMBOL=NUMBER, and the number at least 0",
                hint="such as B=64",
                param="--set",
            )
        if name in values:
            raise ConfigError(
                f"--set gives {name!r} twice", hint="give each symbol once", param="--set"
            )
        values[name] = number
    return values


@contextmanager
def _put_in(args: argparse.Namespace) -> Generator[None]:
    """Say that a formula without a value is due to the numbers that were given, where some were.

    Raises:
        ConfigError: in place of the ``InternalError`` that it would be in the catalogue's own examples.
    """
    try:
        yield
    except InternalError as error:
        given = [flag for flag in ("set", "model") if getattr(args, flag)]
        if not given:
            raise
        raise ConfigError(
            f"these numbers cannot be put in: {error.message}",
            hint=f"change {' or '.join('--' + flag for flag in given)}",
            param=f"--{given[0]}",
        ) from None


def _refuse_unused(record: Record, symbols: Symbols, values: dict[str, float]) -> None:
    """Refuse a value that the class's formulas would not read.

    Raises:
        ConfigError: a symbol of ``values`` is in none of them.
    """
    from headrace.explain.catalogue.derivation import used_symbols

    used = used_symbols(record.formulas.values(), symbols)
    for name in values:
        if name not in used and name in symbols.by_name:
            free = [n for n in used if symbols.by_name[n].settable]
            raise ConfigError(
                f"--set {name}: no formula of {record.id} uses {name!r}",
                hint=f"it uses {', '.join(free)}" if free else "it has no symbols",
                param="--set",
            )


def model_values(name: str) -> tuple[dict[str, float], str, int]:
    """Symbols of whatever ``headrace plan`` takes as a model, what it is called in a title, and its bytes.

    Raises:
        HeadraceError: there is none of this name, or it cannot be read.
    """
    from headrace.cli.plan_source import read_model
    from headrace.explain.catalogue.shape import not_said, values_of_plan

    spec = read_model(name)
    nbytes = spec.weights_nbytes
    about = f"{spec.name}, {counted(nbytes / spec.total_weights, 'byte', form='.2f')} a weight"
    if said := not_said(spec):
        about += f", {said}"
    return values_of_plan(spec), about, nbytes


def setting_of(args: argparse.Namespace, symbols: Symbols) -> Callable[[Record], Setting]:
    """What a record's formulas are evaluated with: the flags over the record's own profile."""
    from dataclasses import replace

    from headrace.explain.catalogue.evaluate import setting
    from headrace.explain.units_text import figures

    machine = find_machine(args.machine, symbols) if args.machine else None
    values = given_values(args.set)
    changed = "".join(f", with {name} = {figures(value, 6)}" for name, value in values.items())
    model: str | None = args.model
    about, nbytes = "", 0
    if model is not None and model not in symbols.profiles:
        own, about, nbytes = model_values(model)
        values = {**own, **values}
    profile = model if model in symbols.profiles else None

    def at(record: Record) -> Setting:
        base = profile or (DEFAULT if about else record.profile)
        found = setting(symbols, base, values, machine)
        if about:
            found = replace(found, own=frozenset(values))
        gpu = found.machine.gpu
        too_large = gpu is not None and nbytes > gpu.memory_nbytes
        if too_large and found.values.get("n_moe") and "offl" not in values:
            found = setting(symbols, base, {**values, "offl": 1.0}, machine)
            away = f"{about}, experts in host memory{changed}"
            return replace(found, about=away, own=frozenset(values))
        return replace(found, about=(about or found.about) + changed)

    return at


def _bound(record: Record, at: Setting) -> str:
    """What binds, or "" for what is not priced here."""
    from headrace.explain.catalogue.evaluate import price_of

    try:
        return price_of(record, at).bound
    except (MachineError, InternalError):
        return ""


def run_list(args: argparse.Namespace) -> int:
    from headrace.explain.catalogue.load import load_catalogue
    from headrace.explain.catalogue.record import RESOURCE_UNITS
    from headrace.explain.cost import RESOURCES

    for flag, known in (("bound", RESOURCES), ("resource", RESOURCE_UNITS)):
        if getattr(args, flag) not in (None, *known):
            raise ConfigError(
                f"--{flag} is {getattr(args, flag)!r}; it must be one of {', '.join(known)}",
                param=f"--{flag}",
            )
    catalogue = load_catalogue()
    with _put_in(args):
        rows = _matching(args, catalogue)
    if args.json:
        print(json.dumps([_row(record, bound) for record, bound in rows], indent=2))
        return 0
    if not rows:
        note("no class matches")
        return 0
    cells = [(r.id, bound or r.kind, r.status, r.title) for r, bound in rows]
    for line in table([("CLASS", "BOUND", "STATUS", "TITLE"), *cells], terminal_width()):
        print(line)
    return 0


def _matching(args: argparse.Namespace, catalogue: Catalogue) -> list[tuple[Record, str]]:
    """The records that pass every filter, each with what binds it."""
    at = setting_of(args, catalogue.symbols)
    rows: list[tuple[Record, str]] = []
    for record in catalogue.records.values():
        text = f"{record.id} {record.title} {record.about} {record.category}".lower()
        if not all(word.lower() in text for word in args.text):
            continue
        if args.status not in (None, record.status):
            continue
        if args.resource is not None and args.resource not in record.work:
            continue
        bound = _bound(record, at(record)) if record.work else ""
        if args.bound in (None, bound):
            rows.append((record, bound))
    return rows


def _row(record: Record, bound: str) -> dict[str, Any]:
    return {
        "id": record.id,
        "title": record.title,
        "category": record.category,
        "kind": record.kind,
        "bound": bound or None,
        "resources": list(record.work),
        "status": record.status,
        "confidence": record.confidence,
    }


def run_show(args: argparse.Namespace) -> int:
    from headrace.explain.catalogue.derivation import as_data, derivation
    from headrace.explain.catalogue.load import find_record, load_catalogue

    catalogue = load_catalogue()
    record = find_record(catalogue, args.id)
    _refuse_unused(record, catalogue.symbols, given_values(args.set))
    with _put_in(args):
        at = setting_of(args, catalogue.symbols)(record)
        if args.json:
            print(json.dumps(as_data(record, catalogue, at), indent=2))
        else:
            show(derivation(record, catalogue, at))
    return 0


def run_check(args: argparse.Namespace) -> int:
    from headrace.explain.catalogue.evaluate import run_checks
    from headrace.explain.catalogue.load import load_catalogue

    catalogue: Catalogue = load_catalogue()
    results = run_checks(catalogue)
    failed = [result for result in results if not result.holds]
    if args.json:
        shown = [{"record": r.record, "expr": r.expr, "want": r.want, "got": r.got} for r in failed]
        print(
            json.dumps({"classes": len(catalogue.records), "checks": len(results), "failed": shown})
        )
    else:
        for result in failed:
            print(f"{result.record}: {result.expr} is {result.got}, expected {result.want}")
        print(f"{len(catalogue.records)} classes, {len(results)} checks, {len(failed)} failed")
    return EXIT_CHECK_FAILED if failed else 0


def run_site(args: argparse.Namespace) -> int:
    from headrace.explain.catalogue.load import load_catalogue
    from headrace.explain.catalogue.site import is_ours, write_site

    folder: Path = args.folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file; the pages need a folder",
            hint="name a folder; it is made if it is not there",
            param="DIR",
        )
    if not is_ours(folder):
        raise ConfigError(
            f"{folder} has an index.html that `headrace flops site` did not write",
            hint="name another folder, or move that file",
            param="DIR",
        )
    with writing(folder, "DIR"):
        pages = write_site(load_catalogue(), folder)
    note(f"{counted(pages, 'page')} written; open {folder / 'index.html'}")
    return 0
