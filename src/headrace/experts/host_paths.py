"""The paths of a layer's experts (``paths.ExpertPaths``) in plain PyTorch, the GPU's twin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.experts.chunk import ChunkCompute, SliceChunk
from headrace.experts.cpu_share import Answer
from headrace.experts.foresight import FORMATS, guess, surest
from headrace.experts.items import Items
from headrace.experts.lending import lend
from headrace.experts.paths import CacheView, ExpertCounts
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
