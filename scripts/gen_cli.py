"""docs/reference/cli.md from the argument parser."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.main import EPILOG, build_parser

PAGE = Path("docs/reference/cli.md")
HEAD = """\
# Command line

<!-- Written by scripts/gen_cli.py from the argument parser: edit that, then run `make docs`. -->

Standard output carries answers and tables, standard error progress, notes and errors. An error is
one line that begins with `headrace: error:`, and a second with `hint:` where there is a remedy.
`HEADRACE_TRACEBACK=1` adds the traceback. Sizes need a unit: `8GiB` is 8 x 2^30 bytes, `500MB` is
500 x 10^6.

`run` is greedy unless a sampling flag says otherwise, so that the same command prints the same
answer; `chat` takes the sampling of the model's generation_config where it has one.

Environment variables:

| variable | meaning |
| --- | --- |
| `HEADRACE_MODELS` | a folder of models: their names can be given as MODEL, and `models` lists them |
| `HEADRACE_PROFILES` | the folder of measured machine profiles, instead of one in the user's cache |
| `HEADRACE_API_KEY` | the key that `serve` asks for, out of sight of other users of the machine |
| `HEADRACE_ISA` | forces the CPU kernels: `scalar`, `avx2`, `avx512`, `avx512_amx` or `avx512_vnni` |
| `HEADRACE_TRACEBACK` | `1` prints the traceback of an error |
| `HF_HUB_OFFLINE` | `1` keeps Hugging Face's client from the network; cached models still load |
"""


def describe(action: argparse.Action) -> str:
    """One row of a table of flags."""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    value = ""
    if action.choices is not None:
        value = " ".join(f"`{c}`" for c in action.choices)
    elif action.option_strings and action.nargs != 0:
        value = f"`{action.metavar or action.dest.upper()}`"
    return f"| {names} | {value} | {(action.help or '').replace('|', '/')} |"


def sections(command: argparse.ArgumentParser, level: int = 2) -> list[str]:
    """A command's flags, and below them its actions."""
    parts: list[str] = []
    if level > 1:
        parts.append(f"{'#' * level} {command.prog}\n\n{command.description}\n")
        for group in command._action_groups:
            rows = [
                describe(a)
                for a in group._group_actions
                if a.dest != "help" and not isinstance(a, argparse._SubParsersAction)
            ]
            if rows:
                title = f"{group.title}".capitalize()
                note = f" ({group.description})" if group.description else ""
                table = "\n".join(["| flag | value | meaning |", "| --- | --- | --- |", *rows])
                parts.append(f"{title}{note}:\n\n{table}\n")
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                parts += sections(inner, level + 1)
    return parts


def pages() -> dict[Path, str]:
    parts = [HEAD, "```\n" + EPILOG + "```\n", *sections(build_parser(), 1)]
    return {PAGE: "\n".join(parts)}
