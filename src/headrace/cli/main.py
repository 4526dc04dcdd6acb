"""The ``headrace`` command: parses, dispatches, and turns errors into messages and exit codes.

Nothing heavy is imported before a command needs it, so that ``headrace --help`` stays quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from headrace import __version__
from headrace.cli import (
    bench,
    calibrate,
    chat,
    demo,
    doctor,
    explain,
    flops,
    kernels,
    models,
    plan,
    run,
    serve,
)
from headrace.cli.exit_codes import EXIT_INTERRUPTED, EXIT_PIPE_CLOSED
from headrace.cli.flags import Parser
from headrace.cli.reporting import prepare_streams, report

COMMANDS = (run, chat, serve, models, plan, explain, calibrate, doctor, bench, demo, flops, kernels)
EPILOG = """\
MODEL is a folder with config.json and safetensors, a .gguf file, a hub id (owner/name) or an alias
such as tiny (built in) or smollm2. Answers go to standard output; progress and messages to standard
error.
Exit codes: 0 done, 2 wrong input, 3 the machine cannot do it, 4 a fault of Headrace, 130 ctrl-C.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; docs/reference/cli.md is written from it."""
    parser = Parser(
        prog="headrace",
        description="Runs language models on one machine, and says what limits them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def main(
    argv: Sequence[str] | None = None,
    *,
    before_command: Callable[[], None] = lambda: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> int:
    """Run one command and return its exit code; never raises what a user can cause.

    Args:
        before_command: called once the arguments are read, before what they name begins.
        interrupted: whether ctrl-C was pressed, whatever became of it; errors are nobody's fault then.
    """
    prepare_streams()
    try:
        args = build_parser().parse_args(argv)
        before_command()
        code: int = args.function(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`headrace run ... | head`): nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except Exception as error:
        return EXIT_INTERRUPTED if interrupted() else report(error)


if __name__ == "__main__":
    raise SystemExit(main())
