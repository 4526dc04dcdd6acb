"""``headrace kernels``: the attention kernels, compiled for any architecture, stage by stage."""

from __future__ import annotations

import argparse
import json

from headrace.cli.flags import Commands, add_command
from headrace.core.errors import ConfigError
from headrace.core.words import counted

# What headrace.ops.lowering has; written here so that the parser imports nothing heavy.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
DEFAULT_STAGE = "ptx"


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "kernels",
        "the GPU's attention kernels, compiled stage by stage (no GPU needed)",
        run_list,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = add_command(actions, "list", "list the kernels", run_list)
    listing.add_argument("--json", action="store_true", help="print JSON")
    show = add_command(actions, "show", "print one kernel at one stage", run_show)
    show.add_argument("name", metavar="NAME", help="the kernel, as `headrace kernels list` has it")
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
    from headrace.ops.lowering import kernel_names

    names = kernel_names()
    print(json.dumps(names) if args.json else "\n".join(names))
    return 0


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
