"""Progress of loading and downloading, on standard error, where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

ProgressCallback = Callable[[str, float], None]


@contextmanager
def loading_progress() -> Generator[ProgressCallback | None, None, None]:
    """Yield a callback (stage, fraction 0 to 1) that draws one bar a stage.

    None where standard error is not a terminal: nothing is drawn, and nothing is computed for it.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def update(stage: str, fraction: float) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=1.0)
        bar.update(tasks[stage], completed=min(1.0, max(0.0, fraction)))

    with bar:
        yield update
