"""Prompt chunks: the experts that a chunk was routed to, through a ring of slots and on the CPU.

The host learns the routing of each layer (one wait a layer; a chunk is long enough for that), and
takes only what was routed: slices in slots are computed where they lie; of the missing ones the CPU
gets the share that lets it finish with PCIe, if the chunk is short enough for it (``request_block``
holds that many tokens), and the rest passes through the ring: the copy engine brings the next slices
while the GPU computes the ones before. Above the crossover nearly every expert is routed, and the same
ring streams the whole layer.

The cache is warmed, not wiped: the slices of the most used experts take the slots of those experts of
the same layer that the chunk did not use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.core.errors import ConfigError
from headrace.experts.plan_oracle import FREE, PlanShape
from headrace.experts.store import HostStore
from headrace.machine.device import Device

# Computes one slice for some tokens: (layer, slot bytes, x [n, hidden]) -> float32 [n, hidden].
SliceProduct = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class SlotTable(Protocol):
    """The cache's slots between decoding steps, as the host sees and changes them."""

    def slot(self, number: int) -> torch.Tensor:
        """A slot's bytes, uint8 [slice_nbytes]; transit slots follow the others."""
        ...

    def slots_of(self, layer: int) -> list[int]:
        """Slot of each of the layer's slices (expert * slices + slice), -1 where there is none."""
        ...

    def move(self, layer: int, changes: Sequence[tuple[int, int, int]]) -> None:
        """For each (slot, old, new): the slot that held the layer's slice ``old`` (-1: nothing) now
        holds ``new``."""
        ...


class CpuShare(Protocol):
    """The CPU's part of a chunk."""

    max_tokens: int

    def begin(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        keys: Sequence[int],
    ) -> None:
        """Start on these slices (expert * slices + slice). x, ids, weights: on the host."""
        ...

    def finish(self) -> torch.Tensor:
        """Wait; float32 [T, hidden], on the host."""
        ...


@dataclass(frozen=True)
class _Uses:
    """The tokens of one expert: rows of x and weights, on the device."""

    rows: torch.Tensor
    weights: torch.Tensor


class SliceRing:
    """Transit slots that the copy engine fills one after the other, ahead of what is computed."""

    def __init__(self, device: Device, store: HostStore, slots: Sequence[torch.Tensor]) -> None:
        self._device, self._store, self._slots = device, store, slots
        self._copies = device.stream()
        self._free = device.event()
        self._arrived = [device.event() for _ in slots]
        self._computed = [device.event() for _ in slots]
        self._layer, self._keys, self._queued = 0, list[int](), 0

    def begin(self, layer: int, keys: Sequence[int]) -> None:
        """Start to bring these slices (expert * slices + slice) of a layer."""
        self._layer, self._keys, self._queued = layer, list(keys), 0
        self._free.record()  # whatever used the slots before
        self._copies.wait_event(self._free)
        while self._queued < min(len(self._keys), len(self._slots)):
            self._queue()

    def __iter__(self) -> Generator[tuple[int, torch.Tensor], None, None]:
        """(key, slot) in order; the slot is valid on the current stream until the next one is asked."""
        for number, key in enumerate(self._keys):
            place = number % len(self._slots)
            self._arrived[place].wait()
            yield key, self._slots[place]
            self._computed[place].record()
            if self._queued < len(self._keys):
                self._copies.wait_event(self._computed[place])
                self._queue()

    def _queue(self) -> None:
        place = self._queued % len(self._slots)
        expert, piece = divmod(self._keys[self._queued], self._store.layout.num_slices)
        with self._device.use(self._copies):
            source = self._store.slab(self._layer, expert)[piece]
            self._slots[place][: len(source)].copy_(source, non_blocking=True)
            self._arrived[place].record()
        self._queued += 1


class StreamPrefill:
    """``layers.moe.MixtureExecutor`` for chunks that are longer than a decoding step.

    Args:
        product: computes a slice on the device.
        cpu: the CPU's part, if it has one.
        cpu_share: of missing slices that the CPU takes, 0 to 1, where it can.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        shape: PlanShape,
        table: SlotTable,
        product: SliceProduct,
        *,
        cpu: CpuShare | None = None,
        cpu_share: float = 0.0,
    ) -> None:
        self._store, self._shape, self._table = store, shape, table
        self._product, self._cpu = product, cpu
        self._on_host = device.reads_pageable
        self.cpu_share = cpu_share
        transit = [table.slot(shape.num_slots + i) for i in range(shape.max_fetch)]
        self._ring = SliceRing(device, store, transit)
        self.fetched = self.hit = self.on_cpu = 0  # slices

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x: float32 [T, D]; ids: int32 [T, k]; weights: float32 [T, k] -> float32 [T, D]."""
        most = x.shape[0] if self._cpu is None else self._cpu.max_tokens
        if x.shape[0] > most and not self._can_fetch(layer):
            # Only the CPU can serve what is missing: as many tokens at a time as it takes.
            rows = [slice(start, start + most) for start in range(0, x.shape[0], most)]
            return torch.cat([self(layer, x[r], ids[r], weights[r]) for r in rows])
        host_ids = ids.cpu()
        slots = self._table.slots_of(layer)
        uses = _uses(host_ids, weights)
        slices = self._shape.num_slices
        # The most used first: those the cache keeps; the CPU takes from the end.
        order = sorted(uses, key=lambda e: (-len(uses[e].rows), e))
        keys = [e * slices + s for e in order for s in range(slices)]
        missing = [key for key in keys if slots[key] == FREE]
        streamed, on_cpu = self._share(layer, missing, x.shape[0])
        if on_cpu:
            assert self._cpu is not None
            self._cpu.begin(layer, x.cpu(), host_ids, weights.cpu(), on_cpu)
        self._ring.begin(layer, streamed)
        out = torch.zeros_like(x)
        for key in keys:
            if slots[key] != FREE:
                self._add(layer, out, x, uses[key // slices], self._table.slot(slots[key]))
        staying = self._staying(slots, uses, streamed)
        changes: list[tuple[int, int, int]] = []
        for key, piece in self._ring:
            self._add(layer, out, x, uses[key // slices], piece)
            if key in staying:
                leaving = staying[key]
                self._table.slot(slots[leaving]).copy_(piece)
                changes.append((slots[leaving], leaving, key))
        if changes:
            self._table.move(layer, changes)
        if on_cpu:
            assert self._cpu is not None
            out += self._cpu.finish().to(out.device)
        self.hit += len(keys) - len(missing)
        self.fetched += len(streamed)
        self.on_cpu += len(on_cpu)
        return out

    def _share(
        self, layer: int, missing: Sequence[int], num_tokens: int
    ) -> tuple[list[int], list[int]]:
        """(what is streamed, in order; what the CPU computes, ascending).

        Raises:
            ConfigError: the layer cannot be fetched, and the chunk is too long for the CPU.
        """
        can_fetch = self._can_fetch(layer)
        able = self._cpu is not None and num_tokens <= self._cpu.max_tokens
        if not (can_fetch or able) and missing:
            most = self._cpu.max_tokens if self._cpu is not None else 0
            raise ConfigError(
                f"{num_tokens} tokens at once: layer {layer} is not pinned, and the CPU takes {most}",
                hint=f"give --max-batch-tokens {most}"
                if most
                else "free host memory, so that it can be pinned",
            )
        share = (self.cpu_share if can_fetch else 1.0) if able else 0.0
        count = len(missing) - round(len(missing) * share)
        return list(missing[:count]), sorted(missing[count:])

    def _can_fetch(self, layer: int) -> bool:
        return bool(self._shape.max_fetch) and (self._on_host or self._store.pinned(layer))

    def _add(
        self, layer: int, out: torch.Tensor, x: torch.Tensor, uses: _Uses, piece: torch.Tensor
    ) -> None:
        y = self._product(layer, piece, x.index_select(0, uses.rows))
        out.index_add_(0, uses.rows, y.mul_(uses.weights.unsqueeze(1)))

    def _staying(
        self, slots: Sequence[int], uses: Mapping[int, _Uses], streamed: Sequence[int]
    ) -> dict[int, int]:
        """Which of the streamed slices stay: key -> the layer's slice that leaves its slot for it."""
        slices = self._shape.num_slices
        idle = [key for key, slot in enumerate(slots) if slot != FREE and key // slices not in uses]
        return dict(zip(streamed, idle))


def _uses(ids: torch.Tensor, weights: torch.Tensor) -> dict[int, _Uses]:
    """Tokens by expert. ids: int32 [T, k] on the host; weights: float32 [T, k] on the device."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    by_expert: Any = flat[order].numpy()
    there = order.to(weights.device, non_blocking=True)
    rows = there // ids.shape[1]
    sorted_weights = weights.flatten().index_select(0, there)
    found: dict[int, _Uses] = {}
    start = 0
    for expert, same in itertools.groupby(map(int, by_expert)):
        end = start + sum(1 for _ in same)
        if expert >= 0:
            found[expert] = _Uses(rows[start:end], sorted_weights[start:end])
        start = end
    return found
