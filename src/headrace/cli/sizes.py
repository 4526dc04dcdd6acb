"""Sizes as people write them: ``8GiB``, ``500MB``; decimal and binary units differ."""

from __future__ import annotations

import re
from decimal import Decimal

from headrace.core.errors import ConfigError

UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate(("k", "M", "G", "T"), start=1)},
    **{f"{p}iB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), start=1)},
}


def parse_size(text: str, flag: str) -> int:
    """``"1.5GiB"`` -> 1610612736 bytes (rounded down to whole bytes).

    Raises:
        ConfigError: no number, no unit, an unknown unit, or nothing left of it.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", text)
    nbytes = 0
    if match is not None and match[2] in UNITS:
        nbytes = int(Decimal(match[1]) * UNITS[match[2]])
    if nbytes <= 0:
        raise ConfigError(
            f"{flag} is {text!r}; it must be a positive number with one of the units "
            f"{', '.join(UNITS)}",
            hint=f"for example {flag} 8GiB (2^30 bytes each) or {flag} 500MB (10^6 bytes each)",
            param=flag,
        )
    return nbytes


def format_size(nbytes: float) -> str:
    """Bytes for people, decimal units as disks and files are sold: ``98.4 MB``."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
