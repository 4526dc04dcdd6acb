"""``headrace kernels``: every operation with its back-ends; attention's GPU kernels stage by stage."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from headrace.cli.columns import fitted, show, table, terminal_width
from headrace.cli.flags import Commands, add_command
from headrace.core.errors import ConfigError, MachineError

if TYPE_CHECKING:
    from headrace.ops.inventory import Inventory
from headrace.core.words import counted

# What headrace.ops.lowering has; written here so that the parser imports nothing heavy.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
DEFAULT_STAGE = "ptx"


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "kernels",
        "what computes here and why; the GPU's attention kernels stage by stage (no GPU needed)",
        run_list,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = add_command(
        actions,
        "list",
        "list every operation with its back-ends, and the kernels that can be shown",
        run_list,
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    show = add_command(actions, "show", "print one kernel at one stage", run_show)
    show.add_argument(
        "name", metavar="NAME", help="a kernel of the last line of `headrace kernels list`"
    )
    show.add_argument(
        "--arch", choices=ARCHITECTURES, default="sm_90", help="the architecture (default: sm_90)"
    )
    show.add_argument("--stage", choices=STAGES, help=f"what to print (default: {DEFAULT_STAGE})")
    show.add_argument(
        "--summary",
        action="store_true",
        help="print registers, shared memory and the matrix instructions instead",
    )
    show.add_argument("--json", action="store_true", help="print the summary as JSON")


def run_list(args: argparse.Namespace) -> int:
    from headrace.ops.inventory import inventory

    found = inventory()
    shown, missing = _shown_kernels()
    if args.json:
        answer = {
            "operations": [dataclasses.asdict(entry) for entry in found.entries],
            "backends": found.reasons,
            "kernels": shown,
            "kernels_missing": missing,
        }
        print(json.dumps(answer, indent=2))
        return 0
    print("\n".join(lines(found, terminal_width())))
    show(["", missing or f"`headrace kernels show` compiles: {', '.join(shown)}"])
    return 0


def _shown_kernels() -> tuple[list[str], str | None]:
    """The kernels that can be compiled for other GPUs, or why none can."""
    from headrace.ops.lowering import kernel_names

    try:
        return list(kernel_names()), None
    except MachineError as error:
        return [], f"`headrace kernels show` cannot compile here: {error.message}"


def lines(found: Inventory, width: int | None = None) -> list[str]:
    """The table: which back-ends have an operation, which serve it here, and what it does.

    width: columns of the terminal, None for any number
    """
    backends = list(found.reasons)
    heads = ["OPERATION", *backends, "ON THE CPU", "ON THE GPU", "WHAT"]
    rows = [
        [
            entry.name,
            *(_cell(name in entry.backends, found.reasons[name]) for name in backends),
            entry.cpu or "-",
            entry.gpu or "-",
            entry.about,
        ]
        for entry in found.entries
    ]
    text = table([heads, *rows], width)
    reasons = [
        f"(yes): {name} cannot be used here: {why}" for name, why in found.reasons.items() if why
    ]
    return [*text, "", *fitted(reasons, width)] if reasons else text


def _cell(there: bool, reason: str | None) -> str:
    if not there:
        return "-"
    return "yes" if reason is None else "(yes)"


def run_show(args: argparse.Namespace) -> int:
    if args.stage is not None and (args.summary or args.json):
        flag = "--summary" if args.summary else "--json"
        raise ConfigError(
            f"--stage {args.stage} says nothing beside {flag}, which prints numbers instead",
            hint=f"leave out --stage or {flag}",
            param="--stage",
        )
    from headrace.ops.lowering import lower

    made = lower(args.name, args.arch)
    if not (args.summary or args.json):
        stage = args.stage or DEFAULT_STAGE
        if stage not in made.texts:
            raise ConfigError(
                f"kernel {made.name} has no stage {stage}: Gluon begins with ttgir",
                hint=f"--stage {' or '.join(made.texts)}",
                param="--stage",
            )
        print(made.texts[stage])
        return 0
    summary = {
        "kernel": made.name,
        "arch": made.arch,
        "triton": made.triton,
        "registers": made.registers,
        "stack_nbytes": made.stack_nbytes,
        "shared_nbytes": made.shared_nbytes,
        "matrix_instructions": made.matrix_instructions,
        "loops": [{"instructions": c.total, "by_name": c.by_name} for c in made.loops],
    }
    if args.json:
        print(json.dumps(summary, indent=2))
        return 0
    for key in ("kernel", "arch", "triton", "registers", "stack_nbytes", "shared_nbytes"):
        print(f"{key:14} {summary[key]}")
    for name in made.matrix_instructions:
        print(f"{'multiplies by':14} {name}")
    for count in made.loops:
        names = sorted(count.by_name.items(), key=lambda item: -item[1])[:12]
        print(
            f"{'loop':14} {counted(count.total, 'instruction')}: "
            + ", ".join(f"{n} {c}" for n, c in names)
        )
    return 0
