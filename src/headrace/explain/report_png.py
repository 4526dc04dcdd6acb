"""The roofline of an explained step as a PNG. Needs matplotlib, which Headrace does not install."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.explain.report import ExplainReport
from headrace.explain.report_text import LETTERS, above_roof


def require_matplotlib() -> None:
    """Say at once if there is nothing to draw with.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--png needs matplotlib, which is not installed",
            hint="pip install matplotlib, or leave --png out: the picture is printed as text, too",
            param="--png",
        )


def write_png(report: ExplainReport, peak: float, memory: float, path: Path) -> None:
    """Draw every class that computes where it was measured, by the table's letter, under the machine's roof.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(8, 5))
    points = [
        (letter, row.id, row.intensity, row.flops / row.measured_s)
        for letter, row in zip(LETTERS, report.rows)
        if row.intensity is not None and row.flops and row.measured_s
    ]
    ridge = peak / memory
    left = min([0.1 * ridge, *(p[2] for p in points)])
    right = max([10 * ridge, *(p[2] for p in points)])
    axes.plot([left, ridge, right], [memory * left, peak, peak], color="black")
    for i, (letter, name, intensity, rate) in enumerate(points):
        # letters as in the table: names of classes that lie close together would cover each other
        axes.scatter([intensity], [rate], s=30, label=f"{letter}  {name}")
        away = (5, 3) if i % 2 else (-11, -9)
        axes.annotate(
            letter, (intensity, rate), fontsize=9, xytext=away, textcoords="offset points"
        )
    if points:
        axes.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
    axes.grid(alpha=0.3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel("FLOP/s")
    title = f"{report.model} on {report.machine}: {report.phase}"
    for line in above_roof([(letter, at, rate) for letter, _, at, rate in points], peak, memory):
        title += f"\n{line}"
    axes.set_title(title, fontsize=10)
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    finally:
        plt.close(figure)
