"""A prompt chunk's products on the device: the interface, and one slice after the other.

On a GPU many slices are computed at a time (``ops.triton.expert_chunk``); on a host device they go one by
one here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.ops.expert_keep import ASK_DEVICE, choose_kept
from headrace.ops.expert_records import Rows

# Computes one slice for some tokens: (layer, slot bytes, x [n, hidden]) -> float32 [n, hidden].
SliceProduct = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
# [n, 3]: slot, key (expert * slices + slice), the slot that it is to stay in (NOWHERE, ASK_DEVICE)
Work = npt.NDArray[np.int32]


class ChunkCompute(Protocol):
    """A layer of a chunk: ``begin``, ``stage``, ``compute`` of each launch in turn, ``finish``."""

    def begin(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """x: float32 [T, D]; ids: int32 [T, k]; weights: float32 [T, k]."""
        ...

    def begin_into(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """``begin`` of a long chunk: the sum is added to ``out``, float32 [T, D], which may be what x is
        made from: x is asked for before ``compute``."""
        ...

    def stage(self, work: Work, ends: Sequence[int]) -> None:
        """Say what will be computed; a launch ends at each of ``ends``. The entries of an expert in a
        launch are neighbours."""
        ...

    def compute(self, number: int) -> None:
        """Add launch ``number`` to the sum."""
        ...

    def finish(self) -> torch.Tensor:
        """Enter into the cache's tables what stays; the sum."""
        ...


class SlotTable(Protocol):
    """The cache's slots between decoding steps, as the host sees and changes them."""

    def slots(self, first: int, count: int) -> torch.Tensor:
        """Bytes of neighbouring slots, uint8 [count, slice_nbytes]; transit slots follow the others."""
        ...

    def residency(self) -> npt.NDArray[np.int32]:
        """Slot of every slice of every layer, [layers, experts * slices], -1 where there is none.
        Waits for the device."""
        ...

    def lend(self, count: int) -> None:
        """Free the last ``count`` slots, see ``lending``."""
        ...

    def move(self, layer: int, changes: Sequence[tuple[int, int, int]]) -> None:
        """For each (slot, old, new): the slot that held the layer's slice ``old`` (-1: nothing) now
        holds ``new``."""
        ...


@dataclass(frozen=True)
class _Uses:
    """The tokens of one expert: rows of x and weights, on the device."""

    rows: torch.Tensor
    weights: torch.Tensor


class SliceChunk:
    """``ChunkCompute`` by one product for each slice. ``product``: on the device."""

    def __init__(self, table: SlotTable, product: SliceProduct, num_slices: int) -> None:
        self._table, self._product, self._num_slices = table, product, num_slices
        self._layer = 0
        self._x = self._out = torch.zeros(0)
        self._uses: dict[int, _Uses] = {}
        self._launches: list[Work] = []
        self._staying: dict[int, int] = {}  # key -> slot
        self._owners: dict[int, int] = {}  # slot -> key

    def begin(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._layer, self._x = layer, x
        self._out = torch.zeros_like(x)
        self._uses = _uses(ids.cpu(), weights)

    def begin_into(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.begin(layer, x(slice(0, ids.shape[0])).clone(), ids, weights)
        self._out = out

    def stage(self, work: Work, ends: Sequence[int]) -> None:
        self._launches = [work[a:b] for a, b in zip([0, *ends[:-1]], ends)]
        stay = work[:, 2].copy()
        slots = self._table.residency()[self._layer]
        asked = stay == ASK_DEVICE
        if asked.any():
            counts, came = np.zeros(len(slots), np.int32), np.zeros(len(slots), np.bool_)
            for expert, uses in self._uses.items():
                counts[expert * self._num_slices : (expert + 1) * self._num_slices] = len(uses.rows)
            came[work[asked, 1]] = True
            dest = choose_kept(*map(torch.tensor, (counts, slots, came))).numpy()
            stay[asked] = dest[work[asked, 1]]
        kept = stay >= 0
        self._staying = dict(zip(work[kept, 1].tolist(), stay[kept].tolist()))
        self._owners = {int(slots[key]): int(key) for key in np.flatnonzero(slots >= 0)}

    def compute(self, number: int) -> None:
        for slot, key, _ in self._launches[number].tolist():
            uses = self._uses.get(key // self._num_slices)
            piece = self._table.slots(slot, 1)[0]
            if uses is not None:
                y = self._product(self._layer, piece, self._x.index_select(0, uses.rows))
                self._out.index_add_(0, uses.rows, y.mul_(uses.weights.unsqueeze(1)))
            if key in self._staying:
                self._table.slots(self._staying[key], 1)[0].copy_(piece)

    def finish(self) -> torch.Tensor:
        changes = [(slot, self._owners[slot], key) for key, slot in self._staying.items()]
        if changes:
            self._table.move(self._layer, changes)
        return self._out


def _uses(ids: torch.Tensor, weights: torch.Tensor) -> dict[int, _Uses]:
    """Tokens by expert. ids: int32 [T, k] on the host; weights: float32 [T, k] on the device."""
    flat: npt.NDArray[np.int32] = ids.flatten().numpy()
    order = np.argsort(flat, kind="stable")
    experts, starts = np.unique(flat[order], return_index=True)
    ends = np.append(starts[1:], len(flat))
    there = torch.from_numpy(order).to(weights.device)  # pyright: ignore[reportUnknownMemberType]
    rows = there // ids.shape[1]
    by_expert = weights.flatten().index_select(0, there)
    return {
        int(expert): _Uses(rows[a:b], by_expert[a:b])
        for expert, a, b in zip(experts, starts, ends)
        if expert >= 0
    }
