"""A decoding step's paths on a GPU: kernels of ``ops.triton.experts`` and the CPU's expert service.

Everything keeps its address, and no call waits for the GPU or copies from the host, so that a step can
be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import InternalError
from headrace.experts.cache_policy import value_constants
from headrace.experts.chunk import ChunkCompute
from headrace.experts.cpu_share import Answer
from headrace.experts.lending import lend
from headrace.experts.paths import CacheView, ExpertCounts
from headrace.experts.plan_oracle import PlanShape
from headrace.experts.request_block import RequestBlock
from headrace.experts.slab import SlabLayout
from headrace.experts.store import HostStore
from headrace.machine.device import Device
from headrace.machine.readback import ReadBack
from headrace.ops import registry
from headrace.ops.expert_records import RouterView
from headrace.ops.records import Activation

_WORD = 4  # bytes of an int32
NANO = 1e9


class GpuPaths:
    """See ``paths.ExpertPaths``.

    Args:
        store: its pinned layers can be fetched.
        fields: the request block's; block: its memory, uint8, pinned; None without a CPU service.
        max_tokens: of a decoding step; the block's if None.
        tuning: ``ops.triton.expert_launch.Tuning``; the measured one if None.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        shape: PlanShape,
        act: Activation,
        fields: RequestBlock,
        block: torch.Tensor | None,
        top_k: int,
        tuning: Any = None,
        *,
        max_tokens: int | None = None,
    ) -> None:
        kernels = registry.gpu_experts()
        self._kernels, self.shape, self._store = kernels, shape, store
        self._fields, self._block, self.layout = fields, block, store.layout
        self._device = device
        target = device.torch_device
        at = (fields.header, fields.items, fields.pair_token, fields.pair_weight)
        geometry = kernels.PlanGeometry(
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            num_slices=shape.num_slices,
            num_slots=shape.num_slots,
            max_fetch=shape.max_fetch,
            window=shape.window,
            max_tokens=max_tokens or fields.max_tokens,
            top_k=top_k,
            request=tuple(offset // _WORD for offset in at),
            max_prefetch=shape.max_prefetch,
            slice_nbytes=store.layout.slice_nbytes,
            prefetch_programs=(tuning or kernels.Tuning()).gather_programs,
            numbered=block is not None and fields.ready_parts > 0,
        )
        words = None if block is None else block.view(torch.int32)
        constants = value_constants(shape.num_layers, shape.num_slices).table()
        self.state: Any = kernels.new_plan_state(geometry, constants, target, words)
        nbytes = store.layout.slice_nbytes
        self.arena = torch.empty(max(shape.all_slots, 1) * nbytes, dtype=torch.uint8, device=target)
        addresses = [store.base(layer) for layer in range(store.num_layers)]
        bases = torch.tensor(addresses, dtype=torch.int64, device=target)
        self._ahead: Any = kernels.PrefetchLauncher(
            self.state, self.arena, bases, [layout.slice_nbytes for layout in store.layouts]
        )
        self.launcher: Any = kernels.ExpertLauncher(
            geometry_of(kernels, store.layout, nbytes),
            self.state,
            self.arena,
            bases,
            act,
            kernels.RequestOffsets(
                ack=fields.ack // _WORD,
                abort=fields.abort // _WORD,
                ready=fields.ready // _WORD,
                x=fields.x // _WORD,
                out=fields.out // _WORD,
            ),
            tuning=tuning,
            layers=[geometry_of(kernels, layout, nbytes) for layout in store.layouts],
        )
        self._layer = 0  # that is planned
        totals: torch.Tensor = self.state.totals
        self._totals = ReadBack(device, totals.numel(), totals.dtype)

    def begin_step(self) -> None:
        self._kernels.start_step(self.state)

    def can_foresee(self, router: RouterView) -> bool:
        return router.weight.format in self._kernels.ROUTER_FORMATS

    def guess(self, x: torch.Tensor, router: RouterView) -> torch.Tensor:
        return self._ahead.guess(x, router)

    def prefetch(
        self, layer: int, guessed: torch.Tensor, top_k: int, valid: torch.Tensor | None
    ) -> None:
        self._ahead.prefetch(layer, guessed, top_k, valid)

    def prepare(self, layer: int, x: torch.Tensor) -> None:
        self.launcher.prepare(x, layer)

    def publish(self, layer: int, x: torch.Tensor) -> None:
        self.launcher.prepare(x, layer, beside=True)

    def plan(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._layer = layer
        self._kernels.plan_layer(self.state, layer, ids, weights)

    def gather(self, layer: int) -> None:
        self.launcher.gather(layer)

    def hits(self, x: torch.Tensor) -> None:
        self.launcher.hits(x, self._layer)

    def fetched(self, x: torch.Tensor) -> None:
        self.launcher.fetched(x, self._layer)

    def await_cpu(self) -> None:
        self.launcher.await_cpu()

    def combine(self, num_tokens: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.launcher.combine(num_tokens, residual)

    def set_split(self, tables: Sequence[Sequence[int]]) -> None:
        rows = torch.tensor([list(table) for table in tables], dtype=torch.int32)
        want = tuple(self.state.split.shape)
        if rows.shape != want:
            raise InternalError(f"split tables {list(rows.shape)}, expected {list(want)}")
        # From pinned memory, which torch keeps until the copy is done: a copy that waits would wait for the
        # step on its way, too.
        pinned = self._device.pinned(*want, dtype=torch.int32)
        pinned.copy_(rows)
        self._device.copy(self.state.split, pinned)

    def fill(self, keys: Sequence[int]) -> None:
        s = self.shape
        if len(keys) > s.num_slots:
            raise InternalError(f"{len(keys)} slices for {s.num_slots} slots")
        pieces = self.arena.view(-1, self._store.layout.slice_nbytes)
        slot_of = torch.full((self.state.slot_of.numel(),), -1, dtype=torch.int32)
        owner_of = torch.full((self.state.owner_of.numel(),), -1, dtype=torch.int32)
        for slot, key in enumerate(keys):
            row, piece = divmod(key, s.num_slices)
            layer, expert = divmod(row, s.num_experts)
            source = self._store.slab(layer, expert)[piece]
            pieces[slot][: len(source)].copy_(source, non_blocking=True)
            slot_of[key], owner_of[slot] = slot, key
        self.state.slot_of.copy_(slot_of)
        self.state.owner_of.copy_(owner_of)

    def counts(self) -> ExpertCounts:
        """Waits for the GPU. The CPU's own figures are its service's."""
        return self._counts_of(self.state.totals.tolist())

    def post_counts(self) -> None:
        self._totals.post(self.state.totals)

    def posted_counts(self) -> ExpertCounts:
        totals: Any = self._totals.take()
        return self._counts_of(totals.tolist())

    def _counts_of(self, totals: list[int]) -> ExpertCounts:
        hits, fetched, computed, layers, _, admitted, *_ = totals
        fetch_ns, stalls, stall_ns, sent, used, sent_ns = totals[self._kernels.NUM_COUNTS :]
        chunk = 8 * self._kernels.COPY_WORDS
        return ExpertCounts(
            hits,
            fetched,
            computed,
            admitted,
            layers,
            fetch_s=fetch_ns / NANO,
            stalls=stalls,
            stall_s=stall_ns / NANO,
            prefetched_nbytes=sent * chunk,
            ahead_nbytes=used * chunk,
            prefetch_s=sent_ns / NANO,
        )

    def view(self) -> CacheView:
        """Waits for the GPU."""
        s = self.state
        return CacheView(
            s.values.cpu().numpy(),
            s.slot_of.cpu().numpy(),
            s.owner_of[: self.shape.num_slots].cpu().numpy(),
        )

    def slots_used(self) -> int:
        """Waits for the GPU."""
        return int((self.state.owner_of[: self.shape.num_slots] >= 0).sum())

    def replace(self, changes: Sequence[tuple[int, int, int]]) -> None:
        device = self.state.slot_of.device
        slots, old, new = torch.tensor(list(changes), dtype=torch.int32, device=device).T
        self.state.slot_of[old[old >= 0].long()] = -1
        self.state.slot_of[new.long()] = slots
        self.state.owner_of[slots.long()] = new

    def slot(self, number: int) -> torch.Tensor:
        return self.slots(number, 1)[0]

    def slots(self, first: int, count: int) -> torch.Tensor:
        return self.arena.view(-1, self._store.layout.slice_nbytes)[first : first + count]

    def residency(self) -> npt.NDArray[np.int32]:
        s = self.shape
        table = self.state.slot_of[: s.num_layers * s.num_experts * s.num_slices]
        return table.cpu().numpy().reshape(s.num_layers, -1)

    def lend(self, count: int) -> None:
        view, s = self.view(), self.shape
        keys = s.num_layers * s.num_experts * s.num_slices
        values = np.repeat(view.values[: s.num_layers * s.num_experts], s.num_slices)
        found = lend(view.slot_of[:keys], view.owner_of, values, count)
        for source, target in found.moves:
            self.slot(target).copy_(self.slot(source))
        self.state.slot_of[:keys].copy_(torch.tensor(found.slot_of))
        self.state.owner_of[: s.num_slots].copy_(torch.tensor(found.owner_of))

    def move(self, layer: int, changes: Sequence[tuple[int, int, int]]) -> None:
        first = self.shape.key(layer, 0, 0)
        self.replace(
            [(s, first + old if old >= 0 else old, first + new) for s, old, new in changes]
        )

    def chunk(self, act: Activation) -> ChunkCompute:
        """Computes prompt chunks, by matrix products in bfloat16."""
        kernels, widest = self._kernels, self._store.layout
        layers = [geometry_of(kernels, one, widest.slice_nbytes) for one in self._store.layouts]
        return kernels.GroupedChunk(layers, self.state, self.arena, act)

    def answer(self) -> Answer | None:
        """Adds the CPU's answer to a prompt chunk, on the GPU."""
        if self._block is None:
            return None
        f = self._fields
        return self._kernels.GpuAnswer(self._block, f.ack, f.abort, f.out)


def geometry_of(kernels: Any, layout: SlabLayout, slot_nbytes: int | None = None) -> Any:
    """``ops.triton.expert_geometry.SliceGeometry`` of a layout whose slices lie in slots of
    ``slot_nbytes``, as long as they are if None."""
    at = {part.name: part.offset for part in layout.parts}
    stride = {part.name: part.row_nbytes for part in layout.parts}

    def place(name: str, fmt: str) -> Any:
        factors = f"{name}_factors"
        kind = 0 if factors not in at else 2 if layout.block_factors and fmt == "fp8_e4m3" else 1
        return kernels.MatrixPlace(
            fmt, stride[name], stride.get(f"{name}_scales", 0), at.get(factors, 0), kind
        )

    def offsets(name: str) -> tuple[int, ...]:
        return tuple(at.get(name + suffix, 0) for suffix in ("", "_scales", "_bias"))

    return kernels.SliceGeometry(
        layout.format,
        layout.hidden,
        layout.width,
        layout.num_slices,
        slot_nbytes or layout.slice_nbytes,
        layout.has_bias,
        offsets("gate_up"),
        offsets("down"),
        (place("gate_up", layout.format), place("down", layout.down_format)),
        layout.slice_nbytes,
    )
