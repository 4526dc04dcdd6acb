"""What a layer's experts go through in a decoding step, and its twin in plain PyTorch.

``HybridExecutor`` calls these steps in this order; on a GPU they are kernels on streams
(``gpu_paths``), here they are done when the call returns. Both decide by the same rules
(``plan_oracle``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.experts.items import Items
from headrace.experts.plan_oracle import (
    FREE,
    CacheTables,
    Entry,
    LayerPlan,
    PlanShape,
    begin_step,
    new_tables,
    plan_layer,
)
from headrace.experts.slab import SlabLayout
from headrace.experts.slab_pack import slice_weights
from headrace.experts.slice_reference import run_items, slice_output
from headrace.experts.store import HostStore
from headrace.ops.expert_records import CpuExperts
from headrace.ops.records import Activation


@dataclass(frozen=True)
class ExpertCounts:
    """Slices by path since the start, and what became of the fetched ones.

    layers: plans made, one for each layer and step
    """

    hits: int = 0
    fetched: int = 0
    computed: int = 0
    admitted: int = 0
    layers: int = 0

    @property
    def looked_up(self) -> int:
        return self.hits + self.fetched + self.computed

    @property
    def hit_rate(self) -> float:
        """Share of looked-up slices that lay in a slot."""
        return self.hits / self.looked_up if self.looked_up else 0.0


class ExpertPaths(Protocol):
    """The steps of a layer: prepare, plan, then gather beside hits, fetched, await_cpu, combine."""

    def begin_step(self) -> None:
        """Advance the clock and rank the slots; once a step, before its first layer."""
        ...

    def prepare(self, x: torch.Tensor) -> None:
        """Give x, float32 [T, D], to all paths."""
        ...

    def plan(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Decide, and let the CPU begin. ids: int32 [T, k]; weights: float32 [T, k]."""
        ...

    def gather(self, layer: int) -> None:
        """Bring what is fetched into its slots."""
        ...

    def hits(self, x: torch.Tensor) -> None: ...
    def fetched(self, x: torch.Tensor) -> None: ...
    def await_cpu(self) -> None: ...

    def combine(self, num_tokens: int) -> torch.Tensor:
        """The sum of all paths, float32 [T, D]."""
        ...

    def set_split(self, tables: Sequence[Sequence[int]]) -> None:
        """For each layer, slices to fetch of m missing ones, by m."""
        ...

    def fill(self, keys: Sequence[int]) -> None:
        """Put these slices (``plan_oracle``'s keys) into slots 0, 1, ...; between steps."""
        ...

    def counts(self) -> ExpertCounts: ...

    def slot(self, number: int) -> torch.Tensor:
        """See ``stream.SlotTable``, as the next two."""
        ...

    def slots_of(self, layer: int) -> list[int]: ...
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
        slots = shape.num_slots + shape.max_fetch
        self.arena = torch.zeros(slots, layout.slice_nbytes, dtype=torch.uint8)
        self._split: Sequence[Sequence[int]] = ()
        self._counts = [0] * 5
        self._plan: LayerPlan | None = None
        self._layer = 0
        self._x = self._out = torch.zeros(0)

    def begin_step(self) -> None:
        begin_step(self.shape, self.tables)

    def prepare(self, x: torch.Tensor) -> None:
        self._x = x
        self._out = torch.zeros(x.shape, dtype=torch.float64)

    def plan(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._layer = layer
        plan = plan_layer(
            self.shape, self.tables, layer, _rows(ids), _rows(weights), self._split[layer]
        )
        self._plan = plan
        made = (len(plan.hits), len(plan.fetches), len(plan.cpu), sum(plan.admitted), 1)
        self._counts = [a + b for a, b in zip(self._counts, made)]

    def gather(self, layer: int) -> None:
        assert self._plan is not None
        for entry in self._plan.fetches:
            self.arena[entry.slot] = self._store.slab(layer, entry.expert)[entry.slice_index]

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
            part = slice_weights(self.arena[entry.slot].unsqueeze(0), self._store.layout, 0)
            tokens = torch.tensor([token for token, _ in pairs])
            weights = torch.tensor([weight for _, weight in pairs], dtype=torch.float64)
            y = slice_output(part, self._act, x[tokens]) * weights[:, None]
            self._out.index_add_(0, tokens, y)

    def await_cpu(self) -> None:
        plan = self._plan
        if plan is None or not plan.cpu:
            return
        rows = [(c.expert, c.slice_index, c.first_pair, c.num_pairs) for c in plan.cpu]
        work = Items(
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor([token for token, _ in plan.pairs], dtype=torch.int32),
            torch.tensor([weight for _, weight in plan.pairs], dtype=torch.float32),
        )
        layout = self._store.layout
        if self._cpu is None:
            slabs = self._store.tensor(self._layer)
            self._out += run_items(layout, slabs, self._act, self._x, work)
            return
        self._out += self._cpu.run_now(
            layout,
            self._store.base(self._layer),
            self._store.num_experts,
            self._act,
            self._x,
            work.items,
            work.pair_token,
            work.pair_weight,
        )

    def combine(self, num_tokens: int) -> torch.Tensor:
        return self._out[:num_tokens].float()

    def set_split(self, tables: Sequence[Sequence[int]]) -> None:
        self._split = tables

    def fill(self, keys: Sequence[int]) -> None:
        for slot, key in enumerate(keys):
            row, piece = divmod(key, self.shape.num_slices)
            layer, expert = divmod(row, self.shape.num_experts)
            self.arena[slot] = self._store.slab(layer, expert)[piece]
            self.tables.slot_of[key], self.tables.owner_of[slot] = slot, key

    def counts(self) -> ExpertCounts:
        return ExpertCounts(*self._counts)

    def slot(self, number: int) -> torch.Tensor:
        return self.arena[number]

    def slots_of(self, layer: int) -> list[int]:
        size = self.shape.num_experts * self.shape.num_slices
        return self.tables.slot_of[layer * size : (layer + 1) * size]

    def move(self, layer: int, changes: Sequence[tuple[int, int, int]]) -> None:
        first = self.shape.key(layer, 0, 0)
        for slot, old, new in changes:
            self.tables.slot_of[first + old] = FREE
            self.tables.slot_of[first + new] = slot
            self.tables.owner_of[slot] = first + new


def _rows(values: Any) -> Any:
    """A tensor as lists; torch types ``tolist`` only in part."""
    return values.tolist()
