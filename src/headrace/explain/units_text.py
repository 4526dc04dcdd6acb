"""Numbers as people read them: 1.07 GB, 27 us, 989.5 TFLOP/s."""

from __future__ import annotations

import math

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def figures(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` digits that count, without an exponent where it can be helped."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    size = math.floor(math.log10(abs(value)))
    if size >= digits:
        return f"{value:,.0f}" if size < 9 else f"{value:.{digits}g}"
    if size < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - size)}f}"


def amount(value: float, unit: str) -> str:
    """``value`` with a decimal prefix: 1.34e8, "B" -> 134 MB."""
    for step, prefix in _STEPS:
        if abs(value) >= step:
            return f"{figures(value / step)} {prefix}{unit}"
    return f"{figures(value)} {unit}"


def seconds(value: float) -> str:
    """``value`` seconds in the unit that fits: 27.1 us."""
    for step, unit in _SECONDS:
        if abs(value) >= step:
            return f"{figures(value / step)} {unit}"
    return "0 s" if value == 0 else f"{figures(value / 1e-9)} ns"
