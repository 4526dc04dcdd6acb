"""The memory layout as a picture: an SVG file, one bar for each tier, drawn to one scale."""

from __future__ import annotations

from html import escape

from headrace.cli.plan_text import PURPOSES, TIERS, tiers_of, verdict
from headrace.cli.sizes import format_size
from headrace.engine.plan import Plan

WIDTH, LEFT, BAR_WIDTH, BAR_HEIGHT, GAP = 900, 110, 760, 44, 96
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
}
OTHER, FREE = "#555555", "#f4f4f4"
NARROW = 70  # pixels below which a label goes into the legend only


def svg(plan: Plan) -> str:
    """The picture as SVG text."""
    tiers = [tier for tier in TIERS if plan.layout.used.get(tier)]
    scale = max(max(plan.layout.total(t), plan.layout.capacity.get(t, 0)) for t in tiers)
    names = [*dict.fromkeys(name for t in tiers for name in plan.layout.used[t])]
    height = 70 + GAP * len(tiers) + 22 * ((len(names) + 3) // 4) + 20
    title = f"{plan.spec.name} on {plan.machine.name}: {verdict(plan)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="20" y="32" font-size="17" font-weight="bold">{escape(title)}</text>',
    ]
    for row, tier in enumerate(tiers):
        parts += _tier(plan, tier, 62 + GAP * row, scale)
    parts += _legend(names, 62 + GAP * len(tiers))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tier(plan: Plan, tier: str, top: int, scale: int) -> list[str]:
    capacity = plan.layout.capacity.get(tier, plan.layout.total(tier))
    total = plan.layout.total(tier)
    found = [
        f'<text x="20" y="{top + 27}" font-weight="bold">{escape(tiers_of(plan)[tier])}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{BAR_WIDTH * capacity / scale:.1f}" height="{BAR_HEIGHT}" '
        f'fill="{FREE}" stroke="#333333"/>',
    ]
    x = float(LEFT)
    for name, nbytes in sorted(plan.layout.used[tier].items(), key=lambda item: -item[1]):
        width = BAR_WIDTH * nbytes / scale
        title = f"{PURPOSES.get(name, name)}: {format_size(nbytes)}"
        found.append(
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{COLOURS.get(name, OTHER)}"><title>{escape(title)}</title></rect>'
        )
        if width >= NARROW:
            found.append(f'<text x="{x + 6:.1f}" y="{top + 27}">{format_size(nbytes)}</text>')
        x += width
    of = f" of {format_size(capacity)}" if tier in plan.layout.capacity else ""
    found.append(f'<text x="{LEFT}" y="{top + BAR_HEIGHT + 18}">{format_size(total)}{of}</text>')
    return found


def _legend(names: list[str], top: int) -> list[str]:
    found: list[str] = []
    for i, name in enumerate(names):
        x, y = LEFT + 190 * (i % 4), top + 22 * (i // 4)
        found.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS.get(name, OTHER)}"/>'
            f'<text x="{x + 20}" y="{y + 12}">{escape(PURPOSES.get(name, name))}</text>'
        )
    return found
