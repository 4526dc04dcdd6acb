"""Background copies into the cache, between decoding steps whose misses left PCIe idle.

``promotion`` decides what and how much; here it is copied. A slice travels to a place outside of the
cache, piece by piece beside the steps, and takes its slot between two steps once all of it is there: a
step's plan never sees half a slice, and whatever it does to the slots meanwhile is respected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.experts.paths import CacheView, ExpertPaths
from headrace.experts.plan_oracle import FREE, PlanShape
from headrace.experts.promotion import Promotion, PromotionQueue, Valued, choose_promotions
from headrace.experts.store import HostStore
from headrace.machine.device import Device

# Slices under way at once, each with a place of its own: 4 of 3.3 MB, out of the GPU plan's reserve.
PLACES = 4
# Steps that pass before the values are looked at again where nothing was worth a copy. Looking costs
# three copies of tables to the host, some 0.2 ms.
PATIENCE_STEPS = 16


class Promoter:
    """Copies for one cache.

    Args:
        can_fetch: by layer, whether the GPU reads its slabs.

    Attributes:
        promoted: slices that took a slot; dropped: those that a demand fetch was faster with, or whose
            victim had become worth more.
        nbytes: copied.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        paths: ExpertPaths,
        shape: PlanShape,
        can_fetch: Sequence[bool],
    ) -> None:
        self._device, self._store, self._paths, self._shape = device, store, paths, shape
        per_layer = shape.num_experts * shape.num_slices
        self._can_fetch: npt.NDArray[np.bool_] = np.repeat(np.array(can_fetch, bool), per_layer)
        nbytes = store.layout.slice_nbytes
        self._queue = PromotionQueue(nbytes)
        self._places = torch.empty(PLACES, nbytes, dtype=torch.uint8, device=device.torch_device)
        self._copies = device.stream()
        self._settled, self._copied = device.event(), device.event()
        self._place_of: dict[int, int] = {}
        self._arrived: list[Promotion] = []
        self._rest = 0
        self.promoted = self.dropped = self.nbytes = 0

    def waits(self, budget_nbytes: int) -> bool:
        """Whether ``advance`` would look at the cache, and with that wait for the device."""
        return bool(self._arrived) or (budget_nbytes > 0 and self._queue.idle and not self._rest)

    def advance(self, budget_nbytes: int) -> None:
        """Between steps: install what has arrived, and send ``budget_nbytes`` more on the way."""
        self._install()
        if budget_nbytes <= 0:
            return
        if self._queue.idle:
            if self._rest:
                self._rest -= 1
                return
            self._offer()
        pieces = self._queue.advance(budget_nbytes)
        if not pieces:
            return
        self._settled.record()
        self._copies.wait_event(self._settled)
        with self._device.use(self._copies):
            for piece in pieces:
                row, index = divmod(piece.promotion.key, self._shape.num_slices)
                source = self._store.slab(*divmod(row, self._shape.num_experts))[index]
                # The queue counts slots, whose end a shorter slice of this layer may leave empty.
                part = slice(piece.offset, min(piece.offset + piece.nbytes, len(source)))
                target = self._places[self._place_of[piece.promotion.key]]
                target[part].copy_(source[part], non_blocking=True)
                self.nbytes += piece.nbytes
                if piece.last:
                    self._arrived.append(piece.promotion)
            self._copied.record()

    def _offer(self) -> None:
        view, s = self._paths.view(), self._shape
        values = np.repeat(view.values, s.num_slices)
        outside = np.flatnonzero((view.slot_of == FREE) & self._can_fetch & (values > 0))
        inside = np.flatnonzero(view.slot_of != FREE)
        free = int((view.owner_of == FREE).sum())
        best = outside[np.argsort(-values[outside], kind="stable")[:PLACES]]
        worst = inside[np.argsort(values[inside], kind="stable")[:PLACES]]
        chosen = choose_promotions(
            _valued(best, values), _valued(worst, values), num_free=free, limit=PLACES
        )
        self._rest = 0 if chosen else PATIENCE_STEPS
        self._place_of = {promotion.key: place for place, promotion in enumerate(chosen)}
        self._queue.offer(chosen)

    def _install(self) -> None:
        """Give what has arrived its slot, unless the steps since then have decided otherwise."""
        if not self._arrived:
            return
        self._copied.wait()
        arrived, self._arrived = self._arrived, []
        view = self._paths.view()
        free = [int(slot) for slot in np.flatnonzero(view.owner_of == FREE)]
        changes: list[tuple[int, int, int]] = []
        for promotion in arrived:
            slot, victim = self._slot(promotion, view, free)
            if slot == FREE:
                self.dropped += 1
                continue
            self._paths.slot(slot).copy_(self._places[self._place_of[promotion.key]])
            changes.append((slot, victim, promotion.key))
        if changes:
            self._paths.replace(changes)
            self.promoted += len(changes)

    def _slot(self, promotion: Promotion, view: CacheView, free: list[int]) -> tuple[int, int]:
        """(slot, key that leaves it) for a promotion; (FREE, FREE) if it has become pointless."""
        if view.slot_of[promotion.key] != FREE:
            return FREE, FREE
        if promotion.victim is None:
            return (free.pop(0), FREE) if free else (FREE, FREE)
        slot = int(view.slot_of[promotion.victim])
        value, other = (
            view.values[key // self._shape.num_slices] for key in (promotion.key, promotion.victim)
        )
        return (slot, promotion.victim) if value > other else (FREE, FREE)


def _valued(keys: npt.NDArray[np.intp], values: npt.NDArray[np.float32]) -> list[Valued]:
    return [Valued(int(key), float(values[key])) for key in keys]
