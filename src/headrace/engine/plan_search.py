"""Where a plan looks for the best of many: shares of misses, and sequences at a time. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache


def best_share(shares: Sequence[float], seconds: Callable[[float], float]) -> float:
    """The one of ``shares``, which rise, with the shortest step, the largest such one.

    A step lasts as long as the longest of paths that each grow or shrink linearly with the share, so
    the function is convex, and halving finds its minimum.
    """
    low, high = 0, len(shares) - 1

    @cache
    def at(index: int) -> float:
        return seconds(shares[index])

    while low < high:
        middle = (low + high) // 2
        if at(middle) < at(middle + 1):
            high = middle
        else:
            low = middle + 1
    return shares[low]


def refined(counts: Sequence[int], value: Callable[[int], float]) -> list[int]:
    """``counts``, which rise, and those that halving towards the best of them and its neighbours tries.

    Between neighbours the value has one top, as sequences gain tokens and cost the experts slots.
    """
    found = list(counts)
    best = max(range(len(counts)), key=lambda i: value(counts[i]))
    low, high = counts[max(best - 1, 0)], counts[min(best + 1, len(counts) - 1)]
    while low < high:
        middle = (low + high) // 2
        found += [middle, middle + 1]
        if value(middle) < value(middle + 1):
            low = middle + 1
        else:
            high = middle
    return sorted(set(found))
