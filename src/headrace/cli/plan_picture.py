"""The memory layout as a picture: an SVG file, a bar for each memory, its parts by size and name below."""

from __future__ import annotations

import textwrap
from html import escape

from headrace.cli.plan_text import PURPOSES, TIERS, tiers_of, verdict
from headrace.cli.sizes import format_size
from headrace.engine.plan import Plan

WIDTH, MARGIN, BAR_HEIGHT = 900, 20, 44
BAR_WIDTH = WIDTH - 2 * MARGIN
# Okabe and Ito's palette, told apart also by those who do not see every colour.
COLOURS = {
    "experts": "#e69f00",
    "expert slots": "#d55e00",
    "attention": "#0072b2",
    "dense": "#56b4e9",
    "shared": "#9ad0f5",
    "embedding": "#009e73",
    "lm_head": "#66c2a5",
    "KV cache": "#cc79a7",
    "workspace": "#f0e442",
    "reserve": "#999999",
    "router": "#555555",
    "norm": "#222222",
}
OTHER, FREE = "#777777", "#f4f4f4"
TITLE_COLUMNS = 78  # of bold text of 17 pixels
COLUMNS, COLUMN, ROW = 4, BAR_WIDTH // 4, 22  # of the names below a bar


def svg(plan: Plan) -> str:
    """The picture as SVG text. Every bar has a scale of its own: a GPU's is a fifth of its host's."""
    title = f"{plan.spec.name} on {plan.machine.name}: {verdict(plan)}"
    parts: list[str] = []
    y = MARGIN
    for line in textwrap.wrap(title, TITLE_COLUMNS):
        y += 20
        parts.append(
            f'<text x="{MARGIN}" y="{y}" font-size="17" font-weight="bold">{escape(line)}</text>'
        )
    for tier in TIERS:
        if plan.layout.used.get(tier):
            drawn, y = _tier(plan, tier, y + 36)
            parts += drawn
    height = y + MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _tier(plan: Plan, tier: str, y: int) -> tuple[list[str], int]:
    """One memory from ``y`` on, and where it ends."""
    total = plan.layout.total(tier)
    capacity = plan.layout.capacity.get(tier, total)
    scale = BAR_WIDTH / max(total, capacity, 1)
    of = f" of {format_size(capacity)}" if tier in plan.layout.capacity else ""
    name = tiers_of(plan)[tier]
    found = [
        f'<text x="{MARGIN}" y="{y}"><tspan font-weight="bold">{escape(name)}</tspan>  '
        f"{format_size(total)}{of}</text>"
    ]
    top = y + 10
    found.append(_rectangle(MARGIN, top, capacity * scale, FREE))
    x = float(MARGIN)
    uses = sorted(plan.layout.used[tier].items(), key=lambda item: -item[1])
    for i, (use, nbytes) in enumerate(uses):
        colour = COLOURS.get(use, OTHER)
        label = f"{PURPOSES.get(use, use)} {format_size(nbytes)}"
        found.append(_rectangle(x, top, nbytes * scale, colour, label))
        x += nbytes * scale
        left = MARGIN + COLUMN * (i % COLUMNS)
        below = top + BAR_HEIGHT + 10 + ROW * (i // COLUMNS)
        found.append(
            f'<rect x="{left}" y="{below}" width="14" height="14" fill="{colour}"/>'
            f'<text x="{left + 20}" y="{below + 12}">{escape(label)}</text>'
        )
    end = MARGIN + capacity * scale
    found.append(  # on top of what exceeds it
        f'<rect x="{MARGIN}" y="{top}" width="{end - MARGIN:.1f}" height="{BAR_HEIGHT}" fill="none" '
        'stroke="#333333"/>'
    )
    if total > capacity:
        found.append(
            f'<path d="M{end:.1f} {top - 4}V{top + BAR_HEIGHT + 4}" stroke="#cc0000" stroke-width="3"/>'
        )
    rows = -(-len(uses) // COLUMNS)
    return found, top + BAR_HEIGHT + 10 + ROW * rows


def _rectangle(x: float, y: float, width: float, colour: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}">{inside}'
        "</rect>"
    )
