"""What a layer's experts go through in a decoding step, and its twin in plain PyTorch.

``HybridExecutor`` calls these steps in this order; on a GPU they are kernels on streams
(``gpu_paths``), here they are done when the call returns. Both decide by the same rules
(``plan_oracle``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.experts.chunk import ChunkCompute, SliceChunk
from headrace.experts.cpu_share import Answer
from headrace.experts.foresight import FORMATS, guess, surest
from headrace.experts.items import Items
from headrace.experts.lending import lend
from headrace.experts.plan_oracle import (
    FREE,
    NO_PLACE,
    NOTHING_PREFETCHED,
    CacheTables,
    Entry,
    LayerPlan,
    PlanShape,
    Prefetched,
    begin_step,
    foresee,
    new_tables,
    plan_layer,
)
from headrace.experts.slab import SlabLayout
from headrace.experts.slab_pack import slice_weights
from headrace.experts.slice_reference import run_items, slice_output
from headrace.experts.store import HostStore
from headrace.ops.expert_records import CpuExperts, RouterView
from headrace.ops.records import Activation


@dataclass(frozen=True)
class ExpertCounts:
    """Slices of decoding steps by path since the start, and what became of the fetched ones.

    layers: plans made, one for each layer and step
    fetch_s: seconds in which PCIe was busy with ``fetched``
    cpu_nbytes, compute_s: what the CPU has read and how long it was busy, prompts' part included
    cpu_requests, cpu_square_nbytes, cpu_nbytes_s: see ``ops.expert_records.ServiceStats``; 0 without one
    prefetched_nbytes, prefetch_s: what was sent before a plan, and PCIe's seconds for it; rounded up to
        chunks
    ahead_nbytes: those of ``fetched`` that had arrived so
    stalls, stall_s: layers for which everything else was done before the CPU was, and those waits
    """

    hits: int = 0
    fetched: int = 0
    computed: int = 0
    admitted: int = 0
    layers: int = 0
    fetch_s: float = 0.0
    cpu_nbytes: int = 0
    compute_s: float = 0.0
    stalls: int = 0
    stall_s: float = 0.0
    prefetched_nbytes: int = 0
    ahead_nbytes: int = 0
    prefetch_s: float = 0.0
    cpu_requests: int = 0
    cpu_square_nbytes: float = 0.0
    cpu_nbytes_s: float = 0.0

    @property
    def looked_up(self) -> int:
        return self.hits + self.fetched + self.computed

    @property
    def hit_rate(self) -> float:
        """Share of looked-up slices that lay in a slot."""
        return self.hits / self.looked_up if self.looked_up else 0.0


@dataclass(frozen=True)
class CacheView:
    """The cache between steps, copied to the host.

    values: float32 [layers * experts], what the policy gives each expert; slot_of: int32, of every key;
    owner_of: int32, of every slot; -1: none
    """

    values: npt.NDArray[np.float32]
    slot_of: npt.NDArray[np.int32]
    owner_of: npt.NDArray[np.int32]


class ExpertPaths(Protocol):
    """The steps of a layer: guess and prefetch, or not; prepare; plan; then gather beside hits, fetched,
    await_cpu; combine."""

    def begin_step(self) -> None:
        """Advance the clock and rank the slots; once a step, before its first layer."""
        ...

    def can_foresee(self, router: RouterView) -> bool:
        """Whether a layer's routing can be guessed with this router."""
        ...

    def guess(self, x: torch.Tensor, router: RouterView) -> torch.Tensor:
        """The router's logits of x, float32 [T, D], before its norm: float32 [T, E], valid until the next
        guess."""
        ...

    def prefetch(
        self, layer: int, guessed: torch.Tensor, top_k: int, valid: torch.Tensor | None
    ) -> None:
        """Bring what is missing of the surest experts until the layer's plan, the next one, is made.
        valid: bool [T], rows that count; None: all."""
        ...

    def prepare(self, layer: int, x: torch.Tensor) -> None:
        """Give x, float32 [T, D], to all paths."""
        ...

    def publish(self, layer: int, x: torch.Tensor) -> None:
        """``prepare`` of a single token on another stream, beside the router and the plan."""
        ...

    def plan(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Decide, and let the CPU begin. ids: int32 [T, k]; weights: float32 [T, k]."""
        ...

    def gather(self, layer: int) -> None:
        """Bring what is fetched into its slots, and what was prefetched and stays."""
        ...

    def hits(self, x: torch.Tensor) -> None: ...
    def fetched(self, x: torch.Tensor) -> None: ...
    def await_cpu(self) -> None: ...

    def combine(self, num_tokens: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all paths and of ``residual``, float32 [T, D], contiguous."""
        ...

    def set_split(self, tables: Sequence[Sequence[int]]) -> None:
        """For each layer, slices to fetch of m missing ones, by m."""
        ...

    def fill(self, keys: Sequence[int]) -> None:
        """Put these slices (``plan_oracle``'s keys) into slots 0, 1, ..., and nothing into the others;
        between steps."""
        ...

    def counts(self) -> ExpertCounts: ...

    def post_counts(self) -> None:
        """Send the counters to the host as they are behind the work queued so far."""
        ...

    def posted_counts(self) -> ExpertCounts:
        """``counts`` at the oldest point that was posted; waits for that only."""
        ...

    def view(self) -> CacheView:
        """The cache as it is; between steps."""
        ...

    def slots_used(self) -> int:
        """Slots that hold a slice."""
        ...

    def replace(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """For each (slot, old, new): the slot that held key ``old`` (-1: nothing) now holds ``new``."""
        ...

    def slot(self, number: int) -> torch.Tensor:
        """A slot's bytes, uint8 [slice_nbytes]."""
        ...

    def slots(self, first: int, count: int) -> torch.Tensor:
        """See ``chunk.SlotTable``, as the next three."""
        ...

    def residency(self) -> npt.NDArray[np.int32]: ...
    def lend(self, count: int) -> None: ...
    def move(self, layer: int, changes: Sequence[tuple[int, int, int]]) -> None: ...


class HostPaths:
    """The twin: the same plan by the oracle, slots in ordinary memory, all work done at once.

    Args:
        cpu: computes the CPU's part; the float64 reference if None.
    """

    def __init__(
        self, store: HostStore, shape: PlanShape, act: Activation, cpu: CpuExperts | None = None
    ) -> None:
        self.shape = shape
        self.tables: CacheTables = new_tables(shape)
        self._store, self._act, self._cpu = store, act, cpu
        layout: SlabLayout = store.layout
        self.arena = torch.zeros(shape.all_slots, layout.slice_nbytes, dtype=torch.uint8)
        self._prefetched = NOTHING_PREFETCHED
        self._ahead_nbytes = self._sent_nbytes = 0
        self._split: Sequence[Sequence[int]] = ()
        self._counts = [0] * 5
        self._fetch_s = self._compute_s = 0.0
        self._posted: list[ExpertCounts] = []
        self._plan: LayerPlan | None = None
        self._layer = 0
        self._x = self._out = torch.zeros(0)

    def begin_step(self) -> None:
        begin_step(self.shape, self.tables)

    def can_foresee(self, router: RouterView) -> bool:
        return router.weight.format in FORMATS

    def guess(self, x: torch.Tensor, router: RouterView) -> torch.Tensor:
        return guess(x, router)

    def prefetch(
        self, layer: int, guessed: torch.Tensor, top_k: int, valid: torch.Tensor | None
    ) -> None:
        guesses = surest(guessed, top_k)
        if valid is not None:
            guesses = guesses.masked_fill(~valid.unsqueeze(1), -1)
        items = foresee(self.shape, self.tables, layer, _rows(guesses))
        self._prefetched = Prefetched(items, arrived=len(items))
        for place, (expert, piece) in enumerate(items):
            slot = self.shape.prefetch_slot(layer, place)
            source = self._store.slab(layer, expert)[piece]
            self.arena[slot, : len(source)] = source
            self._sent_nbytes += len(source)

    def prepare(self, layer: int, x: torch.Tensor) -> None:
        self._x = x
        self._out = torch.zeros(x.shape, dtype=torch.float64)

    publish = prepare

    def plan(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._layer = layer
        plan = plan_layer(
            self.shape,
            self.tables,
            layer,
            _rows(ids),
            _rows(weights),
            self._split[layer],
            self._prefetched,
        )
        self._plan, self._prefetched = plan, NOTHING_PREFETCHED
        there = sum(origin != NO_PLACE for origin in plan.origins)
        self._ahead_nbytes += there * self._store.layouts[layer].slice_nbytes
        made = (len(plan.hits), len(plan.fetches), len(plan.cpu), sum(plan.admitted), 1)
        self._counts = [a + b for a, b in zip(self._counts, made)]

    def gather(self, layer: int) -> None:
        assert self._plan is not None
        start = time.perf_counter()
        for entry, origin in zip(self._plan.fetches, self._plan.origins):
            if origin != NO_PLACE:
                continue
            piece = self._store.slab(layer, entry.expert)[entry.slice_index]
            self.arena[entry.slot, : len(piece)] = piece
        self._fetch_s += time.perf_counter() - start
        for place, home in enumerate(self._plan.homes):
            if home != FREE:
                self.arena[home] = self.arena[self.shape.prefetch_slot(layer, place)]

    def hits(self, x: torch.Tensor) -> None:
        assert self._plan is not None
        self._compute(self._plan.hits)

    def fetched(self, x: torch.Tensor) -> None:
        assert self._plan is not None
        self._compute(self._plan.fetches)

    def _compute(self, entries: Sequence[Entry]) -> None:
        assert self._plan is not None
        x = self._x.double()
        for entry in entries:
            pairs = self._plan.pairs[entry.first_pair : entry.first_pair + entry.num_pairs]
            layout = self._store.layouts[self._layer]
            part = slice_weights(self.arena[entry.slot].unsqueeze(0), layout, 0)
            tokens = torch.tensor([token for token, _ in pairs])
            weights = torch.tensor([weight for _, weight in pairs], dtype=torch.float64)
            y = slice_output(part, self._act, x[tokens]) * weights[:, None]
            self._out.index_add_(0, tokens, y)

    def await_cpu(self) -> None:
        plan = self._plan
        if plan is None or not plan.cpu:
            return
        start = time.perf_counter()
        self._out += self.on_cpu(self._layer, self._x, plan)
        self._compute_s += time.perf_counter() - start

    def on_cpu(self, layer: int, x: torch.Tensor, plan: LayerPlan) -> torch.Tensor:
        """The CPU's part of a layer, [T, D]."""
        rows = [(c.expert, c.slice_index, c.first_pair, c.num_pairs) for c in plan.cpu]
        work = Items(
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor([token for token, _ in plan.pairs], dtype=torch.int32),
            torch.tensor([weight for _, weight in plan.pairs], dtype=torch.float32),
        )
        layout = self._store.layouts[layer]
        if self._cpu is None:
            return run_items(layout, self._store.tensor(layer), self._act, x, work)
        return self._cpu.run_now(
            layout,
            self._store.base(layer),
            self._store.num_experts,
            self._act,
            x,
            work.items,
            work.pair_token,
            work.pair_weight,
        )

    def combine(self, num_tokens: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = self._out[:num_tokens].float()
        return out if residual is None else out + residual

    def set_split(self, tables: Sequence[Sequence[int]]) -> None:
        self._split = tables

    def fill(self, keys: Sequence[int]) -> None:
        for table in (self.tables.slot_of, self.tables.owner_of):
            table[:] = [FREE] * len(table)
        for slot, key in enumerate(keys):
            row, piece = divmod(key, self.shape.num_slices)
            layer, expert = divmod(row, self.shape.num_experts)
            source = self._store.slab(layer, expert)[piece]
            self.arena[slot, : len(source)] = source
            self.tables.slot_of[key], self.tables.owner_of[slot] = slot, key

    def counts(self) -> ExpertCounts:
        nbytes = self._counts[2] * self._store.mean_slice_nbytes
        # It never stalls: the CPU's part is computed when it is waited for.
        return ExpertCounts(
            *self._counts,
            fetch_s=self._fetch_s,
            cpu_nbytes=nbytes,
            compute_s=self._compute_s,
            prefetched_nbytes=self._sent_nbytes,
            ahead_nbytes=self._ahead_nbytes,
        )

    def post_counts(self) -> None:
        self._posted.append(self.counts())

    def posted_counts(self) -> ExpertCounts:
        return self._posted.pop(0)

    def view(self) -> CacheView:
        tables = self.tables
        return CacheView(
            np.array(tables.values, np.float32),
            np.array(tables.slot_of, np.int32),
            np.array(tables.owner_of, np.int32),
        )

    def slots_used(self) -> int:
        return sum(owner != FREE for owner in self.tables.owner_of)

    def replace(self, changes: Sequence[tuple[int, int, int]]) -> None:
        for slot, old, new in changes:
            if old != FREE:
                self.tables.slot_of[old] = FREE
            self.tables.slot_of[new], self.tables.owner_of[slot] = slot, new

    def slot(self, number: int) -> torch.Tensor:
        return self.arena[number]

    def slots(self, first: int, count: int) -> torch.Tensor:
        return self.arena[first : first + count]

    def residency(self) -> npt.NDArray[np.int32]:
        return np.array(self.tables.slot_of, np.int32).reshape(self.shape.num_layers, -1)

    def lend(self, count: int) -> None:
        view = self.view()
        values = np.repeat(view.values, self.shape.num_slices)
        found = lend(view.slot_of, view.owner_of, values, count)
        for source, target in found.moves:
            self.arena[target] = self.arena[source]
        self.tables.slot_of[:] = found.slot_of.tolist()
        self.tables.owner_of[:] = found.owner_of.tolist()

    def move(self, layer: int, changes: Sequence[tuple[int, int, int]]) -> None:
        first = self.shape.key(layer, 0, 0)
        self.replace(
            [(s, first + old if old != FREE else FREE, first + new) for s, old, new in changes]
        )

    def chunk(self, act: Activation) -> ChunkCompute:
        """Computes prompt chunks, in float64."""
        layouts = self._store.layouts

        def product(layer: int, piece: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            part = slice_weights(piece.unsqueeze(0), layouts[layer], 0)
            return slice_output(part, act, x.double()).float()

        return SliceChunk(self, product, self.shape.num_slices)

    def answer(self) -> Answer | None:
        """The host waits for the CPU itself."""
        return None


def _rows(values: Any) -> Any:
    """A tensor as lists; torch types ``tolist`` only in part."""
    return values.tolist()
