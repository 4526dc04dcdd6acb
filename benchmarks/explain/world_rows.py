"""A published figure with our prediction of it, and where the figures are from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

SOURCES = {
    "desktop": "a blog post on one RTX 5070 Ti (2026)",
    "freetoken": "a blog post on the FreeToken paper, arXiv 2608.16157 (2026)",
    "mxfp4": "a blog post on MXFP4 (2026)",
    "vllm": "a blog post on vLLM (2026)",
    "mpfa": "MpFA, arXiv 2609.33135 (2026)",
    "page": "a page of FLOP classes (2026)",
}


@dataclass(frozen=True)
class Row:
    """One figure. ``kind``: speed, memory, share or ratio; ``published`` is the middle of a range."""

    source: str
    kind: str
    what: str
    machine: str
    setting: str
    unit: str
    published: float
    predict: Callable[[], float]
    low: float | None = None
    high: float | None = None
    why: str = ""  # why it is off, where it is


def ranged(low: float, high: float, row: Row) -> Row:
    """The row with a published range; its middle is what is compared."""
    return replace(row, published=(low + high) / 2, low=low, high=high)
