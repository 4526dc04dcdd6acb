"""Prompt chunks: hits where they lie, misses through a ring of slots and on the CPU, all at once.

Chunks on both paths take only the experts that were routed. The host learns the routing of each layer;
of the missing slices the CPU gets the share that lets it finish with PCIe, by the rates that the layers
before showed, and the rest passes through the ring. What is longer than the CPU takes at a time
(``request_block`` holds that many tokens) goes piece by piece within each layer, where that is faster than
streaming at the present rates (``prefill.streaming_crossover``).

Streamed chunks use every expert, so they need no routing to begin: the ring knows at once what all layers
miss and never stops, over attention and routers too; the host waits for nothing. Between the two, and
where no rates are known, what was routed passes through the ring alone.

The cache is warmed, not wiped: see ``ops.expert_keep``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import ConfigError
from headrace.experts.chunk import ChunkCompute, SlotTable
from headrace.experts.plan_oracle import FREE, PlanShape
from headrace.experts.prefill import (
    expected_distinct,
    pieces,
    prefill_rates,
    streaming_crossover,
)
from headrace.experts.ring import ChunkRing, Keys
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore
from headrace.machine.device import Device
from headrace.ops.expert_keep import ASK_DEVICE, NOWHERE, choose_kept
from headrace.ops.expert_records import Rows

Counts = npt.NDArray[np.int32]

# How fast the CPU's share follows what one layer showed: a prompt of 18 layers settles it.
_LEARN = 0.25
# Lent to the ring: at most this part of the slots, and what PCIe brings while the GPU is busy with the
# attention of a layer: 6 ms for 8,192 tokens of gpt-oss-120b's geometry, 120 slots of 2.6 MB.
_LENT = 8
_TOKENS_OF_A_LENT_SLOT = 64
# A chunk uses every expert of a layer, near enough, if so many would be used ...
_ALL_EXPERTS = 0.95
# ... by a fraction of its tokens: routers with favourites touch fewer experts than uniform ones.
_FAVOURITES = 4


class CpuShare(Protocol):
    """The CPU's part of a chunk."""

    max_tokens: int

    def rows(self, num_tokens: int) -> torch.Tensor:
        """Where the chunk's x is to be put before ``begin``: float32 [T, D], on the host."""
        ...

    def begin(
        self, layer: int, ids: torch.Tensor, weights: torch.Tensor, keys: Sequence[int] | Keys
    ) -> None:
        """Start on these slices (expert * slices + slice, ascending). ids, weights: on the host."""
        ...

    def add_to(self, out: torch.Tensor) -> None:
        """Add the result to ``out``, float32 [T, D], on the device."""
        ...

    def busy_s(self) -> float:
        """Seconds of computing so far; 0 if nobody counts."""
        ...


class StreamPrefill:
    """``layers.moe.MixtureExecutor`` for chunks that are longer than a decoding step.

    Layers of one chunk follow each other; a call for any other layer than the next begins a new chunk.

    Args:
        compute: the device's part.
        cpu: the CPU's part, if it has one.
        cpu_share: of missing slices that the CPU takes at first, 0 to 1, where it can.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        shape: PlanShape,
        table: SlotTable,
        compute: ChunkCompute,
        *,
        cpu: CpuShare | None = None,
        cpu_share: float = 0.0,
    ) -> None:
        self._store, self._shape, self._table = store, shape, table
        self._device, self._compute, self._cpu = device, compute, cpu
        self.cpu_share = cpu_share
        self._rates: PathRates | None = None
        self._crossovers: dict[int, int | None] = {}  # by top-k, at these rates
        self._ring = ChunkRing(device, store)
        self._known = device.event()
        self._residency: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._next = -1
        self._sent = 0, 0  # slices of the layer before by the ring, by the CPU
        self._busy_s = 0.0
        self._host: tuple[torch.Tensor, torch.Tensor] | None = None
        self.fetched = self.hit = self.on_cpu = 0  # slices

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x: float32 [T, D]; ids: int32 [T, k]; weights: float32 [T, k] -> float32 [T, D]."""
        if self._enter(layer, *ids.shape):
            self._compute.begin(layer, x, ids, weights)
            return self._stream(layer)
        most = self._piece(layer, *ids.shape)
        if most is None:
            return self._route(layer, x, ids, weights)
        return torch.cat(
            [part for _, part in self._in_pieces(layer, x.__getitem__, ids, weights, most)]
        )

    def add_to(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Add a long chunk's sum to ``out``, float32 [T, D], with little memory beside it.

        x: what makes the rows, which may come from ``out``.
        """
        tokens = ids.shape[0]
        if self._enter(layer, *ids.shape):
            self._compute.begin_into(layer, x, ids, weights, out)
            self._stream(layer)
            return
        most = self._piece(layer, *ids.shape)
        if most is not None:
            for rows, part in self._in_pieces(layer, x, ids, weights, most):
                out[rows] += part
        elif self._cpu_takes(tokens):
            out += self._route(layer, x(slice(0, tokens)), ids, weights)
        else:
            self._route(layer, x, ids, weights, into=out)

    def _cpu_takes(self, num_tokens: int) -> bool:
        return self._cpu is not None and num_tokens <= self._cpu.max_tokens

    def _enter(self, layer: int, tokens: int, top_k: int) -> bool:
        """Come to a layer; whether all of its experts pass through the ring."""
        everything = not self.takes_both_paths(tokens, top_k) and self._uses_everything(
            tokens, top_k
        )
        if layer != self._next:
            self._begin(layer, tokens, everything)
        self._next = layer + 1
        return everything and self._can_fetch(layer)

    def _piece(self, layer: int, tokens: int, top_k: int) -> int | None:
        """Tokens that go at a time on both paths; None for all of them."""
        cpu = self._cpu
        if cpu is None or tokens <= cpu.max_tokens:
            return None
        both = self.takes_both_paths(tokens, top_k) or not self._can_fetch(layer)
        return cpu.max_tokens if both else None

    def set_rates(self, rates: PathRates | None) -> None:
        """Choose between both paths and streaming by these rates; between steps. None: unknown.

        What prompts showed of the CPU's share stays, moved by how much the rates moved: a path that got
        nothing shows nothing.
        """
        before, self._rates = self._rates, rates
        if rates == before:
            return
        self._crossovers.clear()
        if rates is None or before is None:
            return
        cpu, ring = rates.cpu_gbps, rates.pcie_gbps
        if before.cpu_gbps and before.pcie_gbps:
            cpu *= self.cpu_share / before.cpu_gbps
            ring *= (1 - self.cpu_share) / before.pcie_gbps
        if cpu + ring:
            self.cpu_share = cpu / (cpu + ring)

    def takes_both_paths(self, num_tokens: int, top_k: int) -> bool:
        """Whether a chunk's misses are split between PCIe and the CPU, where a layer can be fetched."""
        if self._cpu is None:
            return False
        if num_tokens <= self._cpu.max_tokens:
            return True
        if self._rates is None or not self._shape.max_fetch:
            return False
        if top_k not in self._crossovers:
            shape = self._shape
            experts = shape.num_experts
            resident = shape.num_slots / (shape.num_layers * experts * shape.num_slices)
            self._crossovers[top_k] = streaming_crossover(
                experts,
                min(top_k, experts),
                1 - min(resident, 1.0),
                prefill_rates(self._rates, shape.num_slices),
                self._cpu.max_tokens,
            )
        crossover = self._crossovers[top_k]
        return crossover is None or num_tokens < crossover

    def settle(self) -> None:
        """Between steps: after a chunk that failed half-way, its copies end before others' work."""
        self._ring.settle()

    def _begin(self, layer: int, num_tokens: int, everything: bool) -> None:
        """Look at the cache; if all of it is needed, let the ring start on what the layers miss."""
        self._sent = 0, 0
        shape = self._shape
        lent = 0
        if everything and shape.max_fetch:
            lent = min(shape.num_slots // _LENT, num_tokens // _TOKENS_OF_A_LENT_SLOT)
        if lent:
            self._table.lend(lent)
        self._residency = self._table.residency().copy()  # follows what the pieces of a layer keep
        first = shape.num_slots - lent
        self._ring.reset(self._table.slots(first, lent + shape.max_fetch), first)
        for at in range(layer if everything else shape.num_layers, shape.num_layers):
            if self._can_fetch(at):
                self._ring.add(at, _keys(self._residency[at] == FREE))

    def _stream(self, layer: int) -> torch.Tensor:
        """Every expert, whatever the routing."""
        slots = self._residency[layer]
        hits = _keys(slots != FREE)
        self.hit += len(hits)
        self.fetched += self._compute_all(layer, slots, hits, None)
        return self._compute.finish()

    def _compute_all(
        self, layer: int, slots: npt.NDArray[np.int32], hits: Keys, uses: Counts | None
    ) -> int:
        """Hits, and what the ring brings; how many those are. Hits first: what arrives may take their
        slots.

        slots: of the layer's keys, changed as the cache is; uses: tokens of each key's expert, by which
            to keep; None if only the device knows.
        """
        keys, places, ends = self._ring.take(layer)
        stay = np.full(len(keys), ASK_DEVICE, np.int32)
        if uses is not None and len(keys):
            came = np.zeros(len(slots), np.bool_)
            came[keys] = True
            stay = choose_kept(*map(torch.tensor, (uses, slots, came))).numpy()[keys]
        work = np.empty((len(hits) + len(keys), 3), np.int32)
        work[: len(hits)] = np.stack([slots[hits], hits, np.full_like(hits, NOWHERE)], 1)
        work[len(hits) :] = np.stack([places, keys, stay], 1)
        if uses is not None:
            taken = stay >= 0
            slots[np.isin(slots, stay[taken])] = FREE
            slots[keys[taken]] = stay[taken]
        self._compute.stage(work, [len(hits), *(len(hits) + end for end in ends)])
        self._compute.compute(0)
        for number, _ in enumerate(self._ring.chunks(len(ends)), 1):
            self._compute.compute(number)
        return len(keys)

    def _in_pieces(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, most: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As many tokens at a time as the CPU takes, and their sums. What stays in the cache is judged by
        all of them: a piece of some tokens an expert would let chance wipe it."""
        of_all = self._uses(ids.cpu())
        start = 0
        for size in pieces(ids.shape[0], most):
            r = slice(start, start + size)
            yield r, self._route(layer, x(r), ids[r], weights[r], of_all)
            start += size

    def _uses(self, ids: torch.Tensor) -> Counts:
        """Tokens of each key's expert. ids: on the host."""
        flat: Any = ids.numpy().ravel()
        uses = np.bincount(flat[flat >= 0], minlength=self._shape.num_experts)
        return np.repeat(uses, self._shape.num_slices).astype(np.int32)

    def _route(
        self,
        layer: int,
        x: torch.Tensor | Rows,
        ids: torch.Tensor,
        weights: torch.Tensor,
        of_all: Counts | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts, on all paths. of_all: uses by the chunk of which this is a piece.

        into: what the sum of a chunk that is too long for the CPU is added to, x making its rows.
        """
        if self._cpu is not None and isinstance(x, torch.Tensor) and self._cpu_takes(len(x)):
            self._cpu.rows(x.shape[0]).copy_(x, non_blocking=True)
        host_ids, host_weights = self._to_host(ids, weights)
        if isinstance(x, torch.Tensor):
            self._compute.begin(layer, x, ids, weights)
        else:
            assert into is not None
            self._compute.begin_into(layer, x, ids, weights, into)
        self._known.synchronize()
        self._learn()
        uses = self._uses(host_ids)
        slots = self._residency[layer]
        hits = _keys((uses > 0) & (slots != FREE))
        missing = _keys((uses > 0) & (slots == FREE))
        # The most used first: those the cache may keep; the CPU takes the others.
        worth = uses if of_all is None else of_all
        missing = missing[np.argsort(-worth[missing], kind="stable")]
        streamed, on_cpu = self._share(layer, missing, ids.shape[0])
        if self._cpu is not None and len(on_cpu):
            self._cpu.begin(layer, host_ids, host_weights, on_cpu)
        self._sent = len(streamed), len(on_cpu)
        self._ring.add(layer, streamed)
        self._compute_all(layer, slots, hits, worth)
        out = self._compute.finish()
        if self._cpu is not None and len(on_cpu):
            self._cpu.add_to(out)
        self.hit += len(hits)
        self.fetched += len(streamed)
        self.on_cpu += len(on_cpu)
        return out

    def _learn(self) -> None:
        """Correct the CPU's share by how long both paths took for the layer before, if both worked.

        Everything before this layer's routing is done by now, the CPU's part included.
        """
        (streamed, on_cpu), self._sent = self._sent, (0, 0)
        busy_s = 0.0 if self._cpu is None else self._cpu.busy_s()
        cpu_s, self._busy_s = busy_s - self._busy_s, busy_s
        ring_s = self._ring.seconds() if streamed else 0.0
        if streamed and on_cpu and cpu_s > 0 and ring_s > 0:
            cpu, ring = on_cpu / cpu_s, streamed / ring_s
            self.cpu_share += _LEARN * (cpu / (cpu + ring) - self.cpu_share)

    def _to_host(
        self, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies that are there once ``_known`` is."""
        tokens, top_k = ids.shape
        if self._host is None or tokens > self._host[0].shape[0] or top_k != self._host[0].shape[1]:
            pinned = self._device.pinned
            self._host = (
                pinned(tokens, top_k, dtype=torch.int32), pinned(tokens, top_k, dtype=torch.float32)
            )  # fmt: skip
        # A last piece is shorter than the others: all share the memory, pinned once and not in every layer.
        to = self._host[0][:tokens], self._host[1][:tokens]
        to[0].copy_(ids, non_blocking=True)
        to[1].copy_(weights, non_blocking=True)
        self._known.record()
        return to

    def _share(self, layer: int, missing: Keys, num_tokens: int) -> tuple[Keys, Keys]:
        """(what is streamed, what the CPU computes), both ascending; ``missing`` by falling use.

        Raises:
            ConfigError: the layer cannot be fetched, and the chunk is too long for the CPU.
        """
        can_fetch = self._can_fetch(layer)
        able = self._cpu_takes(num_tokens)
        if not (can_fetch or able) and len(missing):
            most = self._cpu.max_tokens if self._cpu is not None else 0
            raise ConfigError(
                f"{num_tokens} tokens at once: layer {layer} is not pinned, and the CPU takes {most}",
                hint=f"give --max-batch-tokens {most}"
                if most
                else "free host memory, so that it can be pinned",
            )
        share = (self.cpu_share if can_fetch else 1.0) if able else 0.0
        count = len(missing) - round(len(missing) * share)
        return np.sort(missing[:count]), np.sort(missing[count:])

    def _can_fetch(self, layer: int) -> bool:
        reads = self._device.reads_pageable or self._store.pinned(layer)
        return bool(self._shape.max_fetch) and reads

    def _uses_everything(self, num_tokens: int, top_k: int) -> bool:
        if self._cpu is not None and num_tokens <= self._cpu.max_tokens:
            return False
        experts = self._shape.num_experts
        touched = expected_distinct(num_tokens / _FAVOURITES, experts, min(top_k, experts))
        return touched >= _ALL_EXPERTS * experts


def _keys(where: npt.NDArray[np.bool_]) -> Keys:
    return np.flatnonzero(where).astype(np.int32)
