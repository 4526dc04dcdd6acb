"""Units as exponents of a few dimensions, so that a sum of bytes and FLOPs is found to be nonsense.

What is counted (tokens, layers, heads, weights) has no dimension: a product of counts is a count.
FLOPs, bytes, seconds and joules have one each.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import InternalError

BASES = ("flop", "byte", "s", "J")

# Everything that is merely counted, as the symbols' tables name it.
COUNTS = frozenset(
    (
        *(
            "1",
            "element",
            "layer",
            "head",
            "token",
            "expert",
            "weight",
            "parameter",
            "row",
            "column",
        ),
        *(
            "sequence",
            "entry",
            "tap",
            "pixel",
            "patch",
            "step",
            "document",
            "tile",
            "string",
            "pass",
        ),
        *(
            "stage",
            "device",
            "kernel",
            "launch",
            "multiprocessor",
            "fraction",
            "flag",
            "bit",
            "group",
        ),
        *("batch", "slice", "wake", "request", "chunk", "word"),
    )
)


@dataclass(frozen=True)
class Unit:
    """Exponents of ``BASES``."""

    powers: tuple[int, ...] = (0,) * len(BASES)

    def __mul__(self, other: Unit) -> Unit:
        return Unit(tuple(a + b for a, b in zip(self.powers, other.powers, strict=True)))

    def __truediv__(self, other: Unit) -> Unit:
        return Unit(tuple(a - b for a, b in zip(self.powers, other.powers, strict=True)))

    def power(self, exponent: int) -> Unit:
        return Unit(tuple(a * exponent for a in self.powers))

    @property
    def plain(self) -> bool:
        """Without dimension."""
        return not any(self.powers)

    def __str__(self) -> str:
        def side(sign: int) -> str:
            parts = [
                name if abs(p) == 1 else f"{name}^{abs(p)}"
                for name, p in zip(BASES, self.powers, strict=True)
                if p * sign > 0
            ]
            return "*".join(parts)

        above, below = side(1), side(-1)
        return (above or "1") + (f"/{below}" if below else "")


PLAIN = Unit()


def parse_unit(text: str) -> Unit:
    """Read a unit such as "byte/element", "flop/s", "J/s" or "layer".

    Raises:
        InternalError: a word of it is neither a dimension nor a count.
    """
    above, *below = text.split("/")
    unit = _product(above)
    for part in below:
        unit = unit / _product(part)
    return unit


def _product(text: str) -> Unit:
    unit = PLAIN
    for word in text.split("*"):
        if word in BASES:
            unit = unit * Unit(tuple(int(word == base) for base in BASES))
        elif word not in COUNTS:
            raise InternalError(f"unit {text!r}: {word!r} is neither a dimension nor a count")
    return unit
