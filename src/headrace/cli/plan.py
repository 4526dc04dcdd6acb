"""``headrace plan``: will this model run on that machine, how fast, why, and what would help."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.flags import Commands, StoreOnce, add_command, whole_number
from headrace.cli.outputs import check_output, writing
from headrace.cli.progress import loading_progress
from headrace.core.errors import ConfigError
from headrace.core.kv_formats import DEFAULT_ON_CPU, DEFAULT_ON_GPU, FORMATS

if TYPE_CHECKING:
    from headrace.core.config_library import BundledModel
    from headrace.engine.plan import Plan
    from headrace.experts.simulate import Prediction

# What is planned for where nothing is said: a conversation that a desktop's model is used for.
DEFAULT_CONTEXT, DEFAULT_PROMPT = 8192, 2048
LIST, THIS, AUTO = "list", "this", "auto"


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", "say whether a model runs on a machine, how fast, and what limits it", run
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="bundled name (`headrace plan --models`), config.json or its folder, .gguf file, or hub id "
        "(owner/name: only its config.json is downloaded)",
    )
    machine = add(
        "--machine",
        metavar="NAME",
        help="this (default), a chip of the catalogue, parts joined by + "
        "(rtx-4090+pcie4x16+ddr5-5600-dual+ram=192GiB), a profile's JSON file, or list",
    )
    assert isinstance(machine, StoreOnce)
    machine.instead = (
        "--compare A,B puts machines side by side; one machine's parts are joined by +"
    )
    add("--models", action="store_true", help="list the bundled configurations")
    add(
        "--context",
        type=whole_number("--context", 1),
        metavar="TOKENS",
        help=f"tokens of each sequence (default: {DEFAULT_CONTEXT}, or the model's limit)",
    )
    add(
        "--prompt",
        type=whole_number("--prompt", 1),
        metavar="TOKENS",
        help=f"tokens before the first answer (default: {DEFAULT_PROMPT}, or half of the context)",
    )
    add(
        "--concurrency",
        type=whole_number("--concurrency", 1),
        metavar="N",
        help="sequences at a time (default: 1)",
    )
    add(
        "--kv-format",
        choices=(AUTO, *FORMATS),
        help="format of cached keys and values; auto: the smallest that is known to hold on the "
        f"architecture (default: {DEFAULT_ON_GPU}, {DEFAULT_ON_CPU} where the CPU computes)",
    )
    add("--compare", metavar="A,B,C", help="machines to put side by side, separated by commas")
    add("--picture", type=Path, metavar="FILE", help="write the memory layout as an SVG picture")
    add(
        "--routing",
        type=Path,
        metavar="FILE",
        help="routing of a text (`headrace run MODEL --routing FILE`), replayed through this plan's cache",
    )
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.machine == LIST or args.models:
        _refuse_beside(args, "--models" if args.models else "--machine list", ())
        return _list(args)
    if args.model is None:
        raise ConfigError(
            "no MODEL is given",
            hint="`headrace plan --models` lists the bundled ones, `--machine list` the machines",
            param="MODEL",
        )
    if args.picture is not None:
        check_output(args.picture, "--picture", ".svg")
    if args.compare is not None:
        return _compare(args)
    from headrace.engine.plan_changes import alternatives, changes, faster_ways

    plan = _plan(args, THIS if args.machine is None else args.machine)
    fits = plan.layout.mode not in ("none", "disk")
    found, nearest = changes(plan), faster_ways(plan) if fits else alternatives(plan)
    replayed, recorded = (None, 0) if args.routing is None else _replay(plan, args.routing)
    if args.picture is not None:
        from headrace.cli.plan_picture import svg

        with writing(args.picture, "--picture"):
            args.picture.write_text(svg(plan), encoding="utf-8")
    if args.json:
        from headrace.cli.plan_record import record

        answer = record(plan, found, nearest, replayed, recorded)
        print(json.dumps(answer, ensure_ascii=False, indent=2))
        return 0
    from headrace.cli.columns import show
    from headrace.cli.plan_text import lines

    show(lines(plan, found, nearest, replayed, recorded))
    return 0


# What a command line can say beside the model, by the name in ``args``.
_FLAGS = {
    "model": "MODEL",
    "machine": "--machine",
    "context": "--context",
    "prompt": "--prompt",
    "concurrency": "--concurrency",
    "kv_format": "--kv-format",
    "compare": "--compare",
    "picture": "--picture",
    "routing": "--routing",
}


def _refuse_beside(args: argparse.Namespace, what: str, fine: tuple[str, ...]) -> None:
    """Refuse what ``what`` would leave unread, but for ``fine``.

    Raises:
        ConfigError: something else was given.
    """
    for name, flag in _FLAGS.items():
        own = name == "machine" and what == f"--machine {args.machine}"
        if getattr(args, name) is not None and name not in fine and not own:
            raise ConfigError(
                f"{flag} says nothing beside {what}",
                hint=f"leave out {flag} or {what}",
                param=flag,
            )


def _plan(args: argparse.Namespace, machine: str) -> Plan:
    from headrace.cli.plan_source import read_machine, read_model
    from headrace.engine.plan import make_plan
    from headrace.engine.plan_memory import Workload

    spec = read_model(args.model)
    context = args.context or min(DEFAULT_CONTEXT, spec.max_context)
    prompt = args.prompt or min(DEFAULT_PROMPT, max(1, context // 2))
    profile = read_machine(machine)
    kv_format, kv_on_cpu = args.kv_format or DEFAULT_ON_GPU, ""
    if args.kv_format is None:
        kv_on_cpu = DEFAULT_ON_CPU
    if kv_format == AUTO:
        from headrace.core.kv_accuracy import smallest_that_holds

        # without residual scalars: nobody has calibrated a model that is not here
        kv_format, why = smallest_that_holds(spec.family, rank=0, usable=frozenset(FORMATS))
        spec = replace(spec, notes=(*spec.notes, f"--kv-format auto is {kv_format}: {why}"))
    work = Workload(context, args.concurrency or 1, kv_format, prompt, kv_on_cpu)
    return make_plan(spec, profile, work)


def _replay(plan: Plan, file: Path) -> tuple[Prediction, int]:
    """What the recorded routing makes of the plan, and how many tokens were recorded."""
    from headrace.core.trace import RoutingTrace
    from headrace.engine.plan_replay import replay_routing

    if not file.is_file():
        raise ConfigError(
            f"--routing: there is no file {file}",
            hint="`headrace run MODEL -p TEXT --routing FILE` writes one",
            param="--routing",
        )
    try:
        trace = RoutingTrace.load(file)
    except ConfigError as error:
        message = f"--routing: {error.message}"
        raise ConfigError(message, hint=error.hint, param="--routing") from None
    with loading_progress() as update:

        def progress(share: float) -> None:
            if update is not None:
                update("replaying the routing", share)

        ids = trace.ids.tolist()
        return replay_routing(plan, ids, trace.meta.num_experts, progress=progress), len(ids[0])


def _compare(args: argparse.Namespace) -> int:
    names = [name.strip() for name in args.compare.split(",")]
    if len(names) < 2 or not all(names):
        raise ConfigError(
            f"--compare is {args.compare!r}; it takes two machines or more, with one comma between them",
            hint="for example --compare rtx-4090,rtx-5090,h200",
            param="--compare",
        )
    _refuse_beside(
        args, "--compare", ("model", "compare", "context", "prompt", "concurrency", "kv_format")
    )
    try:
        plans = [_plan(args, name) for name in names]
    except ConfigError as error:
        if error.param != "--machine":
            raise
        said = error.message.replace("--machine", "--compare", 1)  # the flag that was given
        raise ConfigError(said, hint=error.hint, param="--compare") from None
    if args.json:
        from headrace.cli.plan_record import record

        print(json.dumps([record(p) for p in plans], ensure_ascii=False, indent=2))
        return 0
    from headrace.cli.columns import show, terminal_width
    from headrace.cli.plan_text import comparison

    show(comparison(plans, terminal_width()))
    return 0


def _list(args: argparse.Namespace) -> int:
    from headrace.cli.columns import table, terminal_width
    from headrace.cli.plan_source import machine_list, machine_records
    from headrace.core.config_library import bundled_model, bundled_names

    models = [bundled_model(name) for name in bundled_names()] if args.models else []
    if args.json:
        records = [_model_record(model) for model in models] if args.models else machine_records()
        print(json.dumps(records, ensure_ascii=False, indent=2))
        return 0
    if args.models:
        rows = [
            (m.name, m.title, f"{m.spec().total_weights / 1e9:,.4g} billion", m.source)
            for m in models
        ]
        heads = ("MODEL", "TITLE", "WEIGHTS", "SOURCE")
    else:
        rows, heads = machine_list(), ("NAME", "MEMORY", "STANDING", "WHAT")
    for line in table([heads, *rows], terminal_width()):
        print(line)
    return 0


def _model_record(model: BundledModel) -> dict[str, object]:
    """A bundled model for a program."""
    spec = model.spec()
    return {
        "name": model.name,
        "title": model.title,
        "total_weights": spec.total_weights,
        "active_weights": spec.active_weights,
        "weights_nbytes": spec.weights_nbytes,
        "max_context": spec.max_context,
        "source": model.source,
    }
