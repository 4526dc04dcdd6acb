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

from headrace.core.numeric import GROUPED_FORMATS
from headrace.ops.expert_keep import ASK_DEVICE, NOWHERE, choose_kept
from headrace.ops.expert_records import Rows
from headrace.ops.records import Activation
from headrace.ops.triton.control import interpreted
from headrace.ops.triton.expert_grouped import ENTRY, grouped_down, grouped_gate_up, grouped_sum
from headrace.ops.triton.expert_grouped_blocks import block_grouped_down, block_grouped_gate_up
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

_PAIR_ROWS = 64
_COLS = 1024  # of a row, that a program takes
_WORDS = 1024
_TABLE_ENTRIES = 256
_KEEP_PROGRAMS = 8  # of a slice
_MOST_LANES = 8  # programs that share an expert's tokens
# Reads of the acknowledgement before the CPU counts as dead: about 1 us each over PCIe.
_SPINS = 5_000_000

# Rows of a long chunk that are normalised at a time.
LONG_PIECE = 1024
# Rows of weights, tokens, columns at once (of MXFP4 bytes), warps, stages.
Tile = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class GroupedTuning:
    """Tiles of gate/up and of down, by tokens of a tile.

    H200, 128 experts of gpt-oss-120b's size: 225 TFLOP/s for gate and up and 180 for down with 8,192
    tokens, 129 and 137 with 2,048; 1.7 and 1.3 TB/s with 64. Tiles of 128 rows are slower (172 against
    200 TFLOP/s), of 32 rows, too (0.9 against 1.6 TB/s).
    """

    few: tuple[Tile, Tile] = ((64, 16, 64, 4, 3), (64, 16, 64, 4, 3))
    some: tuple[Tile, Tile] = ((64, 64, 32, 4, 4), (64, 64, 32, 4, 4))
    many: tuple[Tile, Tile] = ((64, 128, 32, 4, 3), (64, 128, 32, 4, 3))

    def tiles(self, mean: int) -> tuple[Tile, Tile]:
        """For experts of so many tokens on average; small ones are ``few``."""
        if mean <= 2 * self.few[0][1]:
            return self.few
        return self.some if mean <= 2 * self.some[0][1] else self.many


# Of unpacked tiles: whole groups of every format's columns. H200, 2026-11-30, 128 experts of 2048 x 768, gate
# and up in Q4_K, down in Q6_K, all resident, the whole layer: 512 tokens 1.3 ms (tiles of 32 x 16: 2.9, of
# 64 x 128: 1.9), 2,048 tokens 3.0 (64 x 128: 2.3, but its sums nobody has compared; 128 x 128: 2.7). One
# slice after the other by cuBLAS took 142 and 226.
_UNPACKED: tuple[Tile, Tile] = ((64, 64, 64, 4, 2), (64, 64, 64, 4, 2))
BLOCKS = GroupedTuning(few=_UNPACKED, some=_UNPACKED, many=_UNPACKED)


# The interpreter's time goes with the number of operations.
_INTERPRETED = GroupedTuning(*[((256, 16, 256, 1, 1), (256, 16, 256, 1, 1))] * 3)


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
    y: torch.Tensor  # float32 where that is small: an expert's slices may come in several launches
    alone: bool  # y is the sum, to which one expert after the other is added
    gate_up: Tile
    down: Tile
    lanes: int
    own: bool  # MXFP4 or bfloat16


class GroupedChunk:
    """See ``experts.chunk.ChunkCompute``.

    Args:
        layers: of each layer.
        state: whose tables say what lies in which slot.
        arena: uint8, the slots.

    ``launches``: the staged work lists, on the device.
    """

    def __init__(
        self,
        layers: Sequence[SliceGeometry],
        state: PlanState,
        arena: torch.Tensor,
        act: Activation,
        tuning: GroupedTuning | None = None,
        blocks: GroupedTuning | None = None,
    ) -> None:
        g, plan = layers[0], state.geometry
        self.tuning, self._blocks = tuning or GroupedTuning(), blocks or _blocks()
        self._layers, self._state, self._arena, self._act = tuple(layers), state, arena, act
        # What all layers have in common is taken from the first.
        self._geometry = g
        self._sizes = (g.has_bias, g.hidden, g.width, g.num_slices)
        self._keys = plan.num_experts * plan.num_slices
        device, words = arena.device, ENTRY.value
        # Each layer has its own: the host writes the next one's while this one's waits to be read.
        self._staging = torch.zeros(
            plan.num_layers, self._keys, words, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._work = torch.zeros(self._keys, words, dtype=torch.int32, device=device)
        self._dest = torch.full((self._keys,), NOWHERE, dtype=torch.int32, device=device)
        self._experts = torch.arange(plan.num_experts + 1, dtype=torch.int32, device=device)
        self.launches: list[torch.Tensor] = []
        self._alone: list[list[torch.Tensor]] = []  # of each launch, an expert's entries
        self._keeps: list[bool] = []
        self._at: _Layer | None = None

    def begin(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Sort the chunk's pairs by expert and token."""
        self._begin(layer, lambda rows: x[rows], ids, weights, None)

    def begin_into(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """See ``experts.chunk.ChunkCompute``: no memory for each pair but some for each token."""
        self._begin(layer, x, ids, weights, out)

    def _begin(
        self,
        layer: int,
        x: Rows,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None,
    ) -> None:
        g, plan = self._geometry, self._state.geometry
        tokens, top_k = ids.shape
        keys, merged = torch.empty_like(ids), torch.empty_like(weights)
        pair_keys[(triton.cdiv(tokens, _PAIR_ROWS),)](
            ids.contiguous(), weights.contiguous(), keys, merged, tokens, top_k,
            triton.next_power_of_2(top_k), _PAIR_ROWS, num_warps=2,
        )  # fmt: skip
        ordered, order = keys.view(-1).sort(stable=True)
        bounds = torch.searchsorted(ordered, self._experts, out_int32=True)
        own = _has_own(self._layers[layer])
        rounded = torch.empty(tokens, g.hidden, dtype=torch.bfloat16, device=ids.device)
        step = tokens if out is None else LONG_PIECE
        for start in range(0, tokens, step):
            some = x(slice(start, start + step)).contiguous()
            prepare_rows[(some.shape[0], triton.cdiv(g.hidden, _COLS))](
                some, rounded[start:], g.hidden, own and self._layers[layer].format == "mxfp4",
                _COLS, num_warps=4,
            )  # fmt: skip
        mean = tokens * top_k // plan.num_experts
        tuning = self.tuning if own else self._blocks
        gate_up, down = tuning.tiles(mean)
        if out is None:
            dtype = torch.float32 if gate_up == tuning.few[0] else torch.bfloat16
            y = rounded.new_zeros(tokens * top_k, g.hidden, dtype=dtype)
        else:
            y = out
        self._at = _Layer(
            layer, tokens, bounds, order, merged, rounded,
            # An expert alone has a pair of each token at most.
            rounded.new_empty(y.shape[0], g.num_slices * g.width), y, out is not None,
            gate_up, down, min(_MOST_LANES, max(1, 2 * mean // gate_up[1])), own,
        )  # fmt: skip

    def stage(self, work: npt.NDArray[np.int32], ends: Sequence[int]) -> None:
        """Give the work lists, int32 [n, 3]: slot, key, where it is to stay; a launch ends at each of
        ``ends``. The entries of an expert in a launch are neighbours."""
        at, count = self._now, len(work)
        staged: Any = self._staging[at.number].numpy()
        staged[:count, :3] = work
        staged[:count, 3] = _runs(work[:, 1] // self._geometry.num_slices, ends)
        if count:
            words = count * ENTRY.value
            copy_words[(triton.cdiv(words, _WORDS),)](
                self._staging[at.number], self._work, words, _WORDS, num_warps=4
            )
        starts = [0, *ends[:-1]]
        self.launches = [self._work[a:b] for a, b in zip(starts, ends)]
        if at.alone:
            firsts: list[int] = np.flatnonzero(staged[:count, 3]).tolist()
            parts = [*zip(firsts, [*firsts[1:], count])]
            self._alone = [
                [self._work[c:d] for c, d in parts if a <= c < b] for a, b in zip(starts, ends)
            ]
        self._keeps = [bool((work[a:b, 2] != NOWHERE).any()) for a, b in zip(starts, ends)]
        if (work[:, 2] == ASK_DEVICE).any():
            self._choose(self._work[:count])

    def _choose(self, work: torch.Tensor) -> None:
        """Which of the streamed slices take the slots of which resident ones of the layer."""
        at, keys = self._now, self._keys
        streamed = torch.zeros_like(self._dest)
        streamed.scatter_(0, work[:, 1].long(), (work[:, 2] == ASK_DEVICE).int())
        uses = at.bounds.diff().repeat_interleave(self._geometry.num_slices)
        slots = self._state.slot_of[at.number * keys : (at.number + 1) * keys]
        self._dest = choose_kept(uses, slots, streamed > 0)

    def compute(self, number: int) -> None:
        """Add the slices of a launch to the sum; keep those that are to stay."""
        work = self.launches[number]
        if not len(work):
            return
        for part in self._alone[number] if self._now.alone else (work,):
            self.gate_up(part)
            self.down(part)
        if self._keeps[number]:
            keep_slices[(len(work), _KEEP_PROGRAMS)](
                self._arena, work, self._dest, self._geometry.slice_nbytes, _WORDS, num_warps=4
            )

    def gate_up(self, work: torch.Tensor) -> None:
        """The first half of a launch: activations of every pair and slice."""
        at, act = self._now, self._act
        g = self._layers[at.number]
        gate = (act.kind == "swiglu_clamped", act.alpha, act.limit)
        rows, tokens, cols, warps, stages = at.gate_up
        lists = (self._arena, work, at.bounds, at.order, at.x, at.h, at.order.numel() // at.tokens)
        grid = (len(work) * triton.cdiv(g.width, rows), at.lanes)
        if at.own:
            grouped_gate_up[grid](
                *lists, g.format == "mxfp4", g.slice_nbytes, *g.gate_up, *self._sizes, *gate,
                at.alone, rows, tokens, cols, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        else:
            block_grouped_gate_up[grid](
                *lists, *_parts(g, 0), *self._sizes, *gate, at.alone, rows, tokens, cols,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip

    def down(self, work: torch.Tensor) -> None:
        """The second half: outputs, added to those of each pair."""
        at = self._now
        g = self._layers[at.number]
        rows, tokens, cols, warps, stages = at.down
        top_k = at.order.numel() // at.tokens
        lists = (self._arena, work, at.bounds, at.order, at.h, at.y, at.weights, top_k)
        grid = (len(work) * triton.cdiv(g.hidden, rows), at.lanes)
        if at.own:
            grouped_down[grid](
                *lists, g.format == "mxfp4", g.slice_nbytes, *g.down, *self._sizes, at.alone, rows,
                tokens, cols, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        else:
            block_grouped_down[grid](
                *lists, *_parts(g, 1), *self._sizes, at.alone, rows, tokens, cols,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip

    def finish(self) -> torch.Tensor:
        """Enter what stays into the tables; the sum, float32 [T, D]."""
        g, at, self._at = self._geometry, self._now, None
        if any(self._keeps):
            count = sum(map(len, self.launches))
            keep_tables[(triton.cdiv(count, _TABLE_ENTRIES),)](
                self._work, count, self._dest, self._state.slot_of, self._state.owner_of,
                at.number * self._keys, _TABLE_ENTRIES, num_warps=4,
            )  # fmt: skip
        if at.alone:
            return at.y
        out = torch.empty(at.tokens, g.hidden, device=self._arena.device)
        grouped_sum[(at.tokens, triton.cdiv(g.hidden, _COLS))](
            at.y, at.weights, out, at.order.numel() // at.tokens, g.hidden, _COLS, num_warps=4
        )
        return out

    @property
    def _now(self) -> _Layer:
        assert self._at is not None, "begin() comes first"
        return self._at


def _blocks() -> GroupedTuning:
    return _INTERPRETED if interpreted() else BLOCKS


def _has_own(g: SliceGeometry) -> bool:
    return g.format in GROUPED_FORMATS and all(place.format == g.format for place in g.places)


def _parts(g: SliceGeometry, which: int) -> tuple[object, ...]:
    """Where a matrix of a slice lies, and how."""
    place, (codes, scales, bias) = g.places[which], (g.gate_up, g.down)[which]
    return (
        g.slice_nbytes, codes, scales, place.factors, bias, place.code_stride, place.scale_stride,
        place.format, place.factor_kind,
    )  # fmt: skip


def _runs(experts: npt.NDArray[np.int32], ends: Sequence[int]) -> npt.NDArray[np.int32]:
    """At the first of neighbours of one expert in a launch how many they are, elsewhere 0."""
    count = len(experts)
    found = np.zeros(count, np.int32)
    if count:
        first = np.append(True, experts[1:] != experts[:-1])
        first[[end for end in ends if end < count]] = True
        starts = np.flatnonzero(first)
        found[starts] = np.diff(starts, append=count)
    return found


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
        add_answer[(triton.cdiv(out.numel(), _COLS),)](
            self._floats, out, out.numel(), self._out, _COLS, num_warps=4
        )
