"""``headrace calibrate``: measure the residual directions of a model's KV cache, once."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.flags import Commands, add_command
from headrace.cli.progress import loading_progress
from headrace.cli.reporting import note
from headrace.core.errors import ConfigError, UserError
from headrace.core.kv_formats import MAX_RANK
from headrace.core.words import counted

# Below it too few queries were seen to say where a head looks; beyond the other nothing changes any more.
MIN_TOKENS, MAX_TOKENS = 256, 4096


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "calibrate",
        "measure what makes --kv-format nvfp4k-fp8v more accurate, once for a model",
        run,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id or alias")
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help=f"UTF-8 text to measure on, the first {MAX_TOKENS} tokens of it (default: built in)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, store, and say where; prints the path."""
    text = None if args.text is None else _read(args.text)
    # Heavy imports only once the arguments are known to be right.
    from headrace.engine.calibration import calibrate

    with loading_progress() as progress:
        done = calibrate(
            args.model, text, min_tokens=MIN_TOKENS, max_tokens=MAX_TOKENS, progress=progress
        )
    note(
        f"measured {MAX_RANK} directions for each of {counted(done.num_heads, 'key head')} on "
        f"{counted(done.num_tokens, 'token')}; they hold {done.energy:.0%} of the queries' energy on average"
    )
    print(done.path)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}", hint="convert it first") from error
    except OSError as error:
        raise ConfigError(
            f"--text {path}: {error.strerror}", hint="give a readable file", param="--text"
        ) from error
