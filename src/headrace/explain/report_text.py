"""An explained step as text: the table, a roofline in characters, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_letters

from headrace.core.words import counted
from headrace.explain.report import ABOVE_ROOF, ClassRow, ExplainReport
from headrace.explain.units_text import amount, figures, seconds

PLOT_WIDTH, PLOT_HEIGHT = 64, 14
# Letters of the classes in the picture, in the order of the table: more than a step has classes.
LETTERS = ascii_letters


# Columns of the numbers beside a class's name.
NUMBERS_WIDTH = 72
INDENT = 4


def table(report: ExplainReport, columns: int | None = None) -> list[str]:
    """Title, a line for each class, the gap, the sum.

    columns: of the terminal, None for any number. Where names do not fit beside the numbers they have lines
    of their own.
    """
    width = max(len(row.id) for row in report.rows) + 2
    apart = columns is not None and width + NUMBERS_WIDTH > columns

    def line(name: str, numbers: str) -> list[str]:
        return [name, " " * INDENT + numbers] if apart else [f"{name:<{width}}{numbers}"]

    head = (
        f"{report.model} on {report.machine}: {report.phase} of {counted(report.sequences, 'sequence')}, "
        f"{counted(report.tokens, 'token')} after {report.context:,}; mean of "
        f"{counted(report.steps, 'step')}"
    )
    lines = [
        head,
        "",
        *line(
            "CLASS",
            f" {'CALLS':>5} {'FLOP':>8} {'BYTES':>8} {'FLOP/B':>7} {'BOUND':<7}"
            f"{'FLOOR':>8} {'MEASURED':>9} {'RATIO':>6} {'SHARE':>6}",
        ),
    ]
    for letter, row in zip(LETTERS, report.rows):
        lines += line(f"{letter} {row.id}", _numbers(row))
    share = report.gap_s / report.step_s
    lines += line("unexplained", f"{'':>48} {seconds(report.gap_s):>9} {'':>6} {share:>6.1%}")
    ratio = figures(report.step_s / report.floor_s) if report.floor_s else "-"
    lines += line(
        "step",
        f"{'':>40}{seconds(report.floor_s):>8} {seconds(report.step_s):>9} {ratio:>6} {1:>6.0%}",
    )
    lines += ["", f"{figures(report.tokens_per_s)} tokens a second."]
    if report.predicted_s is not None:
        off = report.predicted_s / report.step_s - 1
        lines[-1] += f" The kernels' own rates predict {seconds(report.predicted_s)} ({off:+.0%})."
    return [*lines, *report.notes]


def _numbers(row: ClassRow) -> str:
    intensity = "-" if row.intensity is None else figures(row.intensity)
    ratio = "-" if row.ratio is None else figures(row.ratio)
    flops = amount(row.flops, "").strip() if row.flops else "-"
    nbytes = amount(row.nbytes, "B") if row.nbytes else "-"
    floor = seconds(row.floor_s) if row.floor_s else "-"
    return (
        f" {figures(row.calls):>5} {flops:>8} {nbytes:>8} {intensity:>7} "
        f"{row.bound or '-':<7}{floor:>8} {seconds(row.measured_s):>9} {ratio:>6} {row.share:>6.1%}"
    )


def changes(report: ExplainReport) -> list[str]:
    """What one change alone would give, in tokens a second, and the advice."""
    lines: list[str] = []
    for title, found in (("HARDWARE", report.hardware), ("SOFTWARE", report.software)):
        if found:
            lines += ["", f"{title}: one change alone"]
            lines += [
                f"  {c.name:<24} {figures(c.tokens_per_s):>7} tok/s  {c.gain - 1:+.0%}"
                for c in found
            ]
    return [*lines, "", *report.advice]


def roofline(report: ExplainReport, peak: float, memory: float) -> list[str]:
    """A roofline in characters: FLOPs a second against FLOPs a byte, both by powers.

    Args:
        peak: FLOPs a second at most; memory: bytes a second at most.
    """
    found = [
        (letter, row.intensity, row.flops / row.measured_s)
        for letter, row in zip(LETTERS, report.rows)
        if row.intensity is not None and row.flops and row.measured_s
    ]
    if not found:
        return []
    ridge = peak / memory
    left = min([0.1 * ridge, *(i for _, i, _ in found)])
    right = max([10 * ridge, *(i for _, i, _ in found)])
    low = min([memory * left, *(r for _, _, r in found)])

    def column(intensity: float) -> int:
        return round((PLOT_WIDTH - 1) * math.log(intensity / left) / math.log(right / left))

    def line(rate: float) -> int:
        place = math.log(max(rate, low) / low) / math.log(peak / low)
        return PLOT_HEIGHT - 1 - round((PLOT_HEIGHT - 1) * min(place, 1.0))

    cells = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for at in range(PLOT_WIDTH):
        intensity = left * (right / left) ** (at / (PLOT_WIDTH - 1))
        cells[line(min(peak, memory * intensity))][at] = "-" if intensity >= ridge else "/"
    places: dict[tuple[int, int], list[str]] = {}
    for letter, intensity, rate in found:
        places.setdefault((line(rate), column(intensity)), []).append(letter)
    for (row, at), letters in places.items():
        cells[row][at] = letters[0]
    lines = [
        "",
        f"ROOFLINE  {amount(peak, 'FLOP/s')} and {amount(memory, 'B/s')}, ridge {figures(ridge)}",
    ]
    labels = {0: amount(peak, ""), PLOT_HEIGHT - 1: amount(low, "")}
    for index, row_cells in enumerate(cells):
        lines.append(f"{labels.get(index, '').strip():>8} |{''.join(row_cells).rstrip()}")
    lines.append(f"{'':>8} +{'-' * PLOT_WIDTH}")
    lines.append(
        f"{'':>10}{figures(left, 2):<12}{'FLOPs a byte':^{PLOT_WIDTH - 24}}{figures(right, 2):>12}"
    )
    lines += [
        f"In one place, drawn as {letters[0]}: {', '.join(letters)}"
        for letters in places.values()
        if len(letters) > 1
    ]
    return lines + above_roof(found, peak, memory)


def above_roof(points: Sequence[tuple[str, float, float]], peak: float, memory: float) -> list[str]:
    """What to think of points above the roof: (letter, FLOPs a byte, FLOPs a second) of each."""
    above = [point for point in points if point[2] > min(peak, memory * point[1]) / ABOVE_ROOF]
    lines: list[str] = []
    for where, why, found in (
        ("main memory's", "Caches are faster.", [x for x, i, _ in above if i < peak / memory]),
        (
            "arithmetic's",
            "Its rate was taken while the machine was slower.",
            [x for x, i, _ in above if i >= peak / memory],
        ),
    ):
        if found:
            lines.append(f"Above the roof, which is {where}: {', '.join(found)}. {why}")
    return lines
