"""Which experts to bring into the cache while PCIe has nothing else to do.

A link so slow that the split fetches nothing would leave a cold cache cold for good. Promotion cures
that, and rounding does not: whatever PCIe can carry between demand fetches goes to the hottest
slices that are not resident. A copy in the background is cut into pieces that fit into the idle time
of a layer, so that none of them stands in front of a demand fetch; a slice serves only when its last
piece has arrived. Every layer either fetches or leaves PCIe idle, so a cold cache warms on any pair
of rates.

It stops by itself: a candidate must beat its victim by ``GAIN``, so two experts of about the same
value do not take each other's place for ever.

Pure decisions: no tensors here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.experts.split import GIGA, PathRates, fetch_seconds

# A candidate replaces a resident only if it is worth this many times as much. The value policy's worth
# grows with about the fifth power of how often an expert is used, so this is 1.5 times as often.
# Simulated on the demo mixture (docs/residency.md): 8 is best or equal on fast and slow links; 1.25
# copies twice as much for no more hits, 64 leaves hits behind, 512 a quarter of promotion's gain.
GAIN = 8.0
# Share of the idle time that promotion uses; the rest absorbs what the prediction of it gets wrong.
IDLE_SHARE = 0.8


@dataclass(frozen=True)
class Valued:
    """A key (an expert, a slot or a slice: the caller's numbering) and what the policy gives it."""

    key: int
    value: float


@dataclass(frozen=True)
class Promotion:
    """Bring ``key`` in, over ``victim``; None: into a free place."""

    key: int
    victim: int | None


def choose_promotions(
    candidates: Sequence[Valued],
    residents: Sequence[Valued],
    *,
    num_free: int,
    limit: int,
    gain: float = GAIN,
) -> tuple[Promotion, ...]:
    """Pair the best of what is not resident with the worst of what is.

    Args:
        candidates: not resident, in any order. Only values above 0 are worth a copy.
        residents: what may be evicted, in any order.
        num_free: empty places, filled first.
        limit: promotions at most.
        gain: how many times its victim's value a candidate must have, at least 1.

    Returns:
        Promotions, best first; ties go to the smaller key. Empty if nothing would improve.
    """
    if gain < 1:
        raise ValueError(f"a gain of {gain} would let equals replace each other for ever")
    best = sorted((c for c in candidates if c.value > 0), key=lambda c: (-c.value, c.key))
    worst = sorted(residents, key=lambda r: (r.value, r.key))
    chosen: list[Promotion] = []
    for at, candidate in enumerate(best[: max(limit, 0)]):
        if at < num_free:
            chosen.append(Promotion(candidate.key, None))
            continue
        if at - num_free >= len(worst):
            break
        victim = worst[at - num_free]
        if candidate.value <= gain * victim.value:
            break
        chosen.append(Promotion(candidate.key, victim.key))
    return tuple(chosen)


def idle_nbytes(window_s: float, fetched: int, rates: PathRates, share: float = IDLE_SHARE) -> int:
    """Bytes that PCIe can carry in a layer's window beside its demand fetches.

    Args:
        window_s: seconds from this layer's first possible fetch to the next layer's.
        fetched: slices that the layer demands.
    """
    if rates.pcie_gbps <= 0:
        return 0
    idle_s = max(window_s - fetch_seconds(fetched, rates), 0.0)
    return int(idle_s * share * rates.pcie_gbps * GIGA)


@dataclass(frozen=True)
class Piece:
    """Part of a background copy: ``nbytes`` from ``offset``; ``last`` completes the slice."""

    promotion: Promotion
    offset: int
    nbytes: int
    last: bool


class PromotionQueue:
    """The background copies under way, cut to the idle bytes of each layer.

    A promotion that has begun is finished, whatever the scores say by then: half a slice is worth
    nothing. New ones are taken only when the queue is empty, so that they follow fresh scores.
    """

    def __init__(self, slice_nbytes: int) -> None:
        if slice_nbytes < 1:
            raise ValueError(f"slices of {slice_nbytes} bytes")
        self.slice_nbytes = slice_nbytes
        self._waiting: list[Promotion] = []
        self._done_nbytes = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, so that new promotions may be offered."""
        return not self._waiting

    @property
    def keys(self) -> frozenset[int]:
        """What is under way: not to be promoted again, nor used before its last piece."""
        return frozenset(p.key for p in self._waiting)

    def offer(self, promotions: Sequence[Promotion]) -> None:
        """Take these on. Only while ``idle``."""
        if not self.idle:
            raise ValueError("promotions are under way; offer new ones when the queue is idle")
        self._waiting = list(promotions)

    def drop(self, key: int) -> None:
        """Give up a promotion: a demand fetch brought it in meanwhile, or its victim is gone."""
        if self._waiting and self._waiting[0].key == key:
            self._done_nbytes = 0
        self._waiting = [p for p in self._waiting if p.key != key]

    def advance(
        self, budget_nbytes: int, begin: Callable[[Promotion], bool] | None = None
    ) -> list[Piece]:
        """The pieces to copy now, ``budget_nbytes`` together at most.

        Args:
            begin: asked before a promotion's first piece; False gives it up. The place to take its
                slot, as the victim that it was offered with may have gone.
        """
        pieces: list[Piece] = []
        while self._waiting and budget_nbytes > 0:
            first = self._waiting[0]
            if self._done_nbytes == 0 and begin is not None and not begin(first):
                self._waiting.pop(0)
                continue
            part = min(self.slice_nbytes - self._done_nbytes, budget_nbytes)
            last = self._done_nbytes + part == self.slice_nbytes
            pieces.append(Piece(first, self._done_nbytes, part, last))
            budget_nbytes -= part
            self._done_nbytes = 0 if last else self._done_nbytes + part
            if last:
                self._waiting.pop(0)
        return pieces
