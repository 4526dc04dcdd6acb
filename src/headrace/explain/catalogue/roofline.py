"""A roofline as a picture: attainable FLOPs against FLOPs a byte, with classes on it. Inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.explain.cost import rate_of
from headrace.explain.units_text import amount, figures
from headrace.machine.profile import MachineProfile

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 32, 28, 44
# FLOPs a byte that the picture spans: from a copy with a few operations to a long prompt's attention.
LOWEST, HIGHEST = 0.1, 1e4


@dataclass(frozen=True)
class Point:
    """One class: FLOPs a byte, FLOPs a second where its floor is reached, and where to read on."""

    name: str
    intensity: float
    rate: float
    link: str = ""


def roofs(machine: MachineProfile) -> tuple[float, float]:
    """FLOPs and bytes a second of where the machine computes: its GPU, or its CPU."""
    if machine.gpu is not None:
        return rate_of(machine, "gpu_flops_bf16"), rate_of(machine, "hbm_read")
    return rate_of(machine, "cpu_flops_f32"), rate_of(machine, "dram_read")


def roofline_svg(machine: MachineProfile, points: Sequence[Point]) -> str:
    """The picture. Points outside the span stand at its edge, hollow."""
    peak, memory = roofs(machine)
    top, bottom = 10 ** math.ceil(math.log10(peak)), memory * LOWEST
    bottom = 10 ** math.floor(math.log10(bottom))

    def outside(point: Point) -> bool:
        return not (LOWEST <= point.intensity <= HIGHEST and bottom <= point.rate <= top)

    def x(intensity: float) -> float:
        share = math.log10(min(max(intensity, LOWEST), HIGHEST) / LOWEST) / math.log10(
            HIGHEST / LOWEST
        )
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(rate: float) -> float:
        share = math.log10(min(max(rate, bottom), top) / bottom) / math.log10(top / bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    ridge = peak / memory
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="roofline of '
        f'{html.escape(machine.name)}">'
    ]
    for power in range(int(math.log10(LOWEST)), int(math.log10(HIGHEST)) + 1):
        at, label = x(10.0**power), figures(10.0**power, 1)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 26}" text-anchor="middle">{label}</text>')
    for power in range(round(math.log10(bottom)), round(math.log10(top)) + 1):
        at, label = y(10.0**power), amount(10.0**power, "")
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(
        f'<path class="roof" d="M{x(LOWEST):.1f} {y(memory * LOWEST):.1f}L{x(ridge):.1f} {y(peak):.1f}'
        f'H{WIDTH - RIGHT}"/>'
    )
    for point in points:
        edge = ' class="edge"' if outside(point) else ""
        dot = (
            f'<circle cx="{x(point.intensity):.1f}" cy="{y(point.rate):.1f}" r="4"{edge}>'
            f"<title>{html.escape(point.name)}: {figures(point.intensity)} FLOPs a byte, "
            f"{amount(point.rate, 'FLOP/s')}</title></circle>"
        )
        parts.append(f'<a href="{html.escape(point.link)}">{dot}</a>' if point.link else dot)
    parts.append(
        f'<text x="8" y="16">FLOP/s</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">FLOPs a byte; the ridge is at '
        f"{figures(ridge)}; hollow: beyond the picture</text></svg>"
    )
    return "".join(parts)
