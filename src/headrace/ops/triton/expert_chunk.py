"""Launches of the grouped expert kernels for one prompt chunk, a layer at a time.

Nothing here waits for the GPU. The work lists that the host writes lie in pinned memory and are copied
by a kernel, since small copies would queue behind the ring's large ones.
"""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from headrace.ops.expert_keep import choose_kept
from headrace.ops.records import Activation
from headrace.ops.triton.expert_grouped import ENTRY, grouped_down, grouped_gate_up
from headrace.ops.triton.expert_launch import SliceGeometry
from headrace.ops.triton.expert_route import (
    add_answer,
    await_answer,
    copy_words,
    keep_slices,
    keep_tables,
    pair_keys,
    prepare_rows,
)
from headrace.ops.triton.expert_state import PlanState

# Formats that the grouped kernels read; of others each slice is a product of its own.
GROUPED_FORMATS = ("mxfp4", "bf16")
_PAIR_ROWS, _ROW_COLS, _COPY_WORDS, _KEEP_WORDS, _TABLE_KEYS, _ANSWER_COLS = (
    *(64, 1024, 1024, 1024, 256, 1024),
)
_KEEP_PROGRAMS = 8  # of a slice
_MOST_LANES = 8  # programs that share an expert's tokens
# Reads of the acknowledgement before the CPU counts as dead: about 1 us each over PCIe.
_SPINS = 5_000_000


# Rows of weights, tokens, columns at once (of MXFP4 bytes), warps, stages.
Tile = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class GroupedTuning:
    """Tiles of the grouped kernels; ranges: of tokens, each with its own programs in ``grouped_down``."""

    gate_up_few: Tile = (64, 16, 64, 4, 3)
    down_few: Tile = (64, 16, 64, 4, 3)
    gate_up_many: Tile = (128, 128, 32, 8, 3)
    down_many: Tile = (64, 64, 64, 4, 3)
    few: int = 32  # mean pairs of an expert up to which it is few
    ranges: int = 3


@dataclass
class _Layer:
    """What lies on the device while a layer of a chunk is computed."""

    number: int
    tokens: int
    bounds: torch.Tensor
    order: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    h: torch.Tensor
    out: torch.Tensor
    gate_up: Tile
    down: Tile
    lanes: int


class GroupedChunk:
    """See ``experts.chunk.ChunkCompute``.

    Args:
        state: whose tables say what lies in which slot.
        arena: uint8, the slots.

    ``launches``: the staged work lists, on the device.
    """

    def __init__(
        self,
        geometry: SliceGeometry,
        state: PlanState,
        arena: torch.Tensor,
        act: Activation,
        tuning: GroupedTuning | None = None,
    ) -> None:
        self.tuning = tuning or GroupedTuning()
        self._geometry, self._state, self._arena, self._act = geometry, state, arena, act
        g, plan = geometry, state.geometry
        self._common = (g.format == "mxfp4", self.tuning.ranges, g.slice_nbytes)
        self._sizes = (g.has_bias, g.hidden, g.width, g.num_slices)
        self._keys = plan.num_experts * plan.num_slices
        pinned = arena.device.type == "cuda"
        # Each layer has its own: the host writes the next one's while this one's waits to be read.
        self._staging = torch.zeros(
            plan.num_layers, self._keys, ENTRY.value, dtype=torch.int32, pin_memory=pinned
        )
        self._work = torch.zeros(self._keys, ENTRY.value, dtype=torch.int32, device=arena.device)
        self._dest = torch.full((self._keys,), -1, dtype=torch.int32, device=arena.device)
        self.launches: list[torch.Tensor] = []
        self._keeps = False
        self._at: _Layer | None = None
        self._targets: dict[int, torch.Tensor] = {}

    def begin(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Sort the chunk's pairs by expert and token."""
        g, t, plan = self._geometry, self.tuning, self._state.geometry
        tokens, top_k = ids.shape
        keys, merged = torch.empty_like(ids), torch.empty_like(weights)
        pair_keys[(triton.cdiv(tokens, _PAIR_ROWS),)](
            ids.contiguous(), weights.contiguous(), keys, merged, tokens, top_k,
            triton.next_power_of_2(top_k), _PAIR_ROWS, num_warps=2,
        )  # fmt: skip
        ordered, order = keys.view(-1).sort(stable=True)
        bounds = torch.searchsorted(ordered, self._bounds_at(tokens), out_int32=True)
        packed = g.format == "mxfp4"
        rounded = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        prepare_rows[(tokens, triton.cdiv(g.hidden, _ROW_COLS))](
            x.contiguous(), rounded, g.hidden, packed, _ROW_COLS, num_warps=4
        )
        mean = tokens * top_k // plan.num_experts
        few = mean <= t.few
        gate_up, down = (t.gate_up_few, t.down_few) if few else (t.gate_up_many, t.down_many)
        self._at = _Layer(
            layer, tokens, bounds, order, merged, rounded,
            rounded.new_empty(tokens * top_k, g.num_slices * g.width), torch.zeros_like(x),
            gate_up, down, min(_MOST_LANES, max(1, 2 * mean // gate_up[1])),
        )  # fmt: skip

    def _bounds_at(self, tokens: int) -> torch.Tensor:
        """First keys of each expert's ranges of tokens, int32 [E * ranges + 1]."""
        if tokens not in self._targets:
            ranges, experts = self.tuning.ranges, self._state.geometry.num_experts
            step = triton.cdiv(tokens, ranges)
            starts = [
                e * tokens + min(r * step, tokens) for e in range(experts) for r in range(ranges)
            ]
            self._targets.clear()  # chunks of one length follow each other
            self._targets[tokens] = torch.tensor(
                [*starts, experts * tokens], dtype=torch.int32, device=self._arena.device
            )
        return self._targets[tokens]

    def stage(self, launches: Sequence[npt.NDArray[np.int32]]) -> None:
        """Give the work lists, int32 [n, 3] each: slot, key, whether it was streamed there."""
        at = self._now
        everything = np.concatenate(launches) if launches else np.zeros((0, 3), np.int32)
        count = len(everything) * ENTRY.value
        source = self._staging[at.number]
        source.numpy()[: len(everything), :3] = everything
        if count:
            copy_words[(triton.cdiv(count, _COPY_WORDS),)](
                source, self._work, count, _COPY_WORDS, num_warps=4
            )
        ends = np.cumsum([len(one) for one in launches]).tolist()
        self.launches = [
            self._work[end - len(one) : end] for one, end in zip(launches, ends, strict=True)
        ]
        self._keeps = bool(everything[:, 2].any()) and self._state.geometry.num_slots > 0
        if self._keeps:
            self._choose(self._work[: len(everything)])

    def _choose(self, work: torch.Tensor) -> None:
        """Which of the streamed slices take the slots of which resident ones of the layer."""
        plan, at = self._state.geometry, self._now
        streamed = torch.zeros_like(self._dest)
        streamed.scatter_(0, work[:, 1].long(), work[:, 2])
        uses = at.bounds[:: self.tuning.ranges].diff().repeat_interleave(plan.num_slices)
        first = at.number * self._keys
        slots = self._state.slot_of[first : first + self._keys]
        self._dest = choose_kept(uses, slots, streamed > 0)

    def compute(self, number: int) -> None:
        """Add the slices of a launch to the sum; keep those that are to stay."""
        work = self.launches[number]
        if not len(work):
            return
        self.gate_up(work)
        self.down(work)
        if self._keeps:
            keep_slices[(len(work), _KEEP_PROGRAMS)](
                self._arena, work, self._dest, self._geometry.slice_nbytes, _KEEP_WORDS, num_warps=4
            )

    def gate_up(self, work: torch.Tensor) -> None:
        """The first half of a launch: activations of every pair and slice."""
        g, at, act = self._geometry, self._now, self._act
        gate = (act.kind == "swiglu_clamped", act.alpha, act.limit)
        rows, tokens, cols, warps, stages = at.gate_up
        grouped_gate_up[(len(work) * triton.cdiv(g.width, rows), at.lanes)](
            self._arena, work, at.bounds, at.order, at.x, at.h, at.order.numel() // at.tokens,
            *self._common, *g.gate_up, *self._sizes, *gate, rows, tokens, cols,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def down(self, work: torch.Tensor) -> None:
        """The second half: outputs, added to the sum."""
        g, at, ranges = self._geometry, self._now, self.tuning.ranges
        rows, tokens, cols, warps, stages = at.down
        grouped_down[(triton.cdiv(g.hidden, rows), ranges)](
            self._arena, work, len(work), at.bounds, at.order, at.weights, at.h, at.out,
            at.order.numel() // at.tokens, *self._common, *g.down, *self._sizes,
            rows, tokens, cols, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    @property
    def out(self) -> torch.Tensor:
        """The sum so far, float32 [T, D]."""
        return self._now.out

    def finish(self) -> torch.Tensor:
        """Enter what stays into the tables; the sum, float32 [T, D]."""
        at, self._at = self._now, None
        if self._keeps:
            keep_tables[(triton.cdiv(self._keys, _TABLE_KEYS),)](
                self._dest, self._state.slot_of, self._state.owner_of, at.number * self._keys,
                self._keys, _TABLE_KEYS, num_warps=4,
            )  # fmt: skip
        return at.out

    @property
    def _now(self) -> _Layer:
        assert self._at is not None, "begin() comes first"
        return self._at


class GpuAnswer:
    """Adds the CPU's answer to a chunk's sum on the GPU, so that the host need not wait for it.

    Args:
        block: uint8, the request block; ack, abort, out: byte offsets of its fields.
    """

    def __init__(self, block: torch.Tensor, ack: int, abort: int, out: int) -> None:
        self._words: Any = block.view(torch.int32)
        self._floats: Any = block.view(torch.float32)
        self._ack, self._abort, self._out = ack // 4, abort // 4, out // 4

    def __call__(self, seq: int, out: torch.Tensor) -> None:
        """Wait for request ``seq`` and add its rows to ``out``, float32 [T, D]."""
        await_answer[(1,)](self._words, seq, self._ack, self._abort, _SPINS, num_warps=1)
        add_answer[(triton.cdiv(out.numel(), _ANSWER_COLS),)](
            self._floats, out, out.numel(), self._out, _ANSWER_COLS, num_warps=4
        )
