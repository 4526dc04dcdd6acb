"""``headrace explain``: runs real steps and says where their time goes, and what would change it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.columns import show, terminal_width
from headrace.cli.flags import Commands, add_command, add_engine_flags, engine_config, whole_number
from headrace.cli.outputs import check_output, writing
from headrace.cli.progress import loading_progress
from headrace.cli.reporting import configure_logging, note
from headrace.cli.session import ctrl_c_ends_at_once
from headrace.core.errors import ConfigError, InternalError
from headrace.core.words import counted

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.explaining import Watch, Workload
    from headrace.explain.report import ExplainReport
    from headrace.machine.profile import MachineProfile

PROMPT_TOKENS, STEPS = 512, 32


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "explain", "run real steps and say where their time goes, class by class", run
    )
    add_engine_flags(parser)
    group = parser.add_argument_group("steps")
    add = group.add_argument
    add(
        "--step",
        choices=("decode", "prefill"),
        default="decode",
        help="which steps (default: decode)",
    )
    add(
        "--prompt-tokens",
        type=whole_number("--prompt-tokens", 1),
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"tokens of each prompt (default: {PROMPT_TOKENS})",
    )
    add(
        "--steps",
        type=whole_number("--steps", 3, 4096),
        default=STEPS,
        metavar="N",
        help=f"tokens that each sequence writes (default: {STEPS})",
    )
    add(
        "--sequences",
        type=whole_number("--sequences", 1, 1024),
        default=1,
        metavar="N",
        help="sequences at once (default: 1)",
    )
    add(
        "--no-probe", action="store_true", help="do not measure the kernels' rates first (2 to 4 s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the roofline (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    configure_logging(args.verbose)
    if args.step == "prefill" and args.prompt_tokens < 2:
        raise ConfigError(
            f"--prompt-tokens is {args.prompt_tokens}; a prompt of one token is a decoding step",
            hint="give 2 or more, or --step decode",
            param="--prompt-tokens",
        )
    png: Path | None = args.png
    if png is not None:
        from headrace.explain.report_png import require_matplotlib

        require_matplotlib()
        check_output(png, "--png", ".png")
    # As many at once as are asked for: the engine's own choice would let the others wait.
    config = engine_config(args, max_num_seqs=args.sequences if args.sequences > 1 else None)
    with loading_progress() as progress, ctrl_c_ends_at_once():
        from headrace.engine.engine import Engine
        from headrace.engine.explaining import Workload, check_workload, report_of, run_steps
        from headrace.engine.this_machine import this_machine, with_rates
        from headrace.machine.probe import probe_machine

        engine = Engine.load(config, progress)
    workload = Workload(args.step, args.prompt_tokens, args.steps, args.sequences)
    try:
        check_workload(engine.info, workload)  # before the kernels are measured
        on_gpu = engine.parts.device.torch_device.type == "cuda"
        machine = this_machine(probe_machine(gpus=True), engine.info.threads, on_gpu=on_gpu)
        if not args.no_probe and not any(name.startswith("kernel_one_") for name in machine.rates):
            from headrace.engine.probes import has_room, probe_engine

            note("measuring the kernels' rates")
            try:
                machine = with_rates(machine, probe_engine(engine))
            except Exception as error:
                if has_room(error):
                    raise
                note("there is no memory left to measure the kernels in, so nothing is predicted")
        watch = _run(lambda progress: run_steps(engine, workload, progress), workload)
        report = report_of(engine, watch, args.step, machine)
    finally:
        engine.close()
    if report is None:
        raise InternalError(f"no {args.step} step was seen")
    if args.step == "decode" and report.sequences < args.sequences:
        note(
            f"only {report.sequences:,} of the {args.sequences:,} sequences ran at once: "
            + _why_fewer(engine, workload)
        )
    if png is not None:
        from headrace.explain.report_png import write_png

        with writing(png, "--png"):
            write_png(report, *roofs_of(machine), png)
        note(f"the roofline is in {png}")
    if args.json:
        print(json.dumps(report.to_data()))
    else:
        show(lines(report, machine, terminal_width()))
    return 0


def _why_fewer(engine: Engine, workload: Workload) -> str:
    """Why not all sequences of ``workload`` decoded together, and what would let more of them."""
    block = engine.info.block_tokens
    blocks = workload.batch * -(-(workload.prompt + workload.steps - 1) // block)
    if blocks > engine.snapshot().kv_blocks_total:
        return "no more fit into the KV cache; fewer --prompt-tokens or --steps leave room for more"
    return (
        "the first had written their tokens before the prompts of the last were computed; more --steps or "
        "fewer --prompt-tokens let more run together"
    )


def _run(steps: Callable[[Callable[[float], None]], Watch], workload: Workload) -> Watch:
    """Run the steps and show how far they are: many sequences on a CPU take minutes."""
    sequences = counted(workload.batch, "sequence", form=",")
    each = f"{counted(workload.prompt, 'token', form=',')} and {workload.steps:,} more"
    note(f"running {sequences} of {each}")
    with loading_progress() as update:

        def progress(share: float) -> None:
            if update is not None:
                update("running steps", share)

        return steps(progress)


def roofs_of(machine: MachineProfile) -> tuple[float, float]:
    """FLOPs and bytes a second of where the engine computes."""
    from headrace.explain.catalogue.roofline import roofs

    return roofs(machine)


def lines(report: ExplainReport, machine: MachineProfile, columns: int | None = None) -> list[str]:
    """The whole report as text. columns: of the terminal, None for any number."""
    from headrace.explain.report_text import changes, roofline, table

    return [*table(report, columns), *roofline(report, *roofs_of(machine)), *changes(report)]
