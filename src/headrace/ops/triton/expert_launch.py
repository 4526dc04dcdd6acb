"""Launches of the expert kernels, and the buffers between them.

``ExpertLauncher`` knows where the parts of a slice lie and how many programs and warps to use; it
allocates everything once, so that its calls can be captured in a CUDA graph.
"""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.errors import UnsupportedModelError
from headrace.ops.records import Activation
from headrace.ops.triton.expert_block_launch import BlockLauncher, BlockTuning
from headrace.ops.triton.expert_gather import expert_gather
from headrace.ops.triton.expert_geometry import SliceGeometry
from headrace.ops.triton.expert_halves import TILE_BLOCKS, expert_prepare, halves_down
from headrace.ops.triton.expert_loop import loop_gate_up
from headrace.ops.triton.expert_matvec import (
    bf16_down,
    bf16_gate_up,
    expert_await,
    expert_combine,
)
from headrace.ops.triton.expert_plan import (
    COUNT_FETCHES,
    COUNT_HITS,
    STATE_FAILED,
    STATE_SEQ,
)
from headrace.ops.triton.expert_state import COPY_WORDS, PlanState, power_of_two
from headrace.ops.triton.expert_whole_cuda import WholeExperts, takes
from headrace.ops.triton.overlap import can_overlap
from headrace.ops.triton.unpack import GROUPS

FORMATS = tuple(GROUPS)
_OWN_KERNELS = ("mxfp4", "bf16")  # alone in a model; everything else shares ``expert_blocks``
WEIGHTS_OF_SCALE = 32  # MXFP4
MAX_COLUMNS = 512  # of bfloat16 rows: 16 bytes a lane, twice
COMBINE_COLS = 128
BF16_TILE = 16
PREPARE_COLS = 256  # ``request_block.READY_COLS``
ROWS_OF_WARP = 16  # of a tensor core's instruction
MOST_SHARING = 8  # warps of a row
TILES_OF_WARP = 6  # of a row, until warps share it: 48 registers of weights


@dataclass(frozen=True)
class RequestOffsets:
    """int32 offsets in the request block."""

    ack: int
    abort: int
    ready: int
    x: int
    out: int


@dataclass(frozen=True)
class Tuning:
    """Grids and warps, measured (docs/LOG.md); programs are for each multiprocessor."""

    # Hopper and later: kernels start while those before end, and down fetches its weights meanwhile.
    overlap: bool = True
    gate_up_tiles: int = 4  # of a row, 4 blocks each, on their way while as many are computed
    gate_up_registers: int | None = 168
    down_warps: int = 2
    down_registers: int | None = 128
    most_programs: int = 16  # longer lists take several turns
    # bfloat16
    bf16_gate_up_programs: int = 2
    bf16_down_programs: int = 5
    gather_programs: int = 16  # on the whole GPU; 12 to 64 are alike
    gather_warps: int = 8
    settle_programs: int = 16  # move 2.7 MB in some 15 us, which nobody waits for
    gather_words: int = COPY_WORDS  # that a program moves at a time; prefetching fixes it
    # Reads of the acknowledgement before the CPU counts as dead: about 1 us each over PCIe.
    await_spins: int = 5_000_000
    await_early: bool = True  # while what was fetched is computed
    blocks: BlockTuning | None = None  # of the kernels for any format; the measured one if None
    # MXFP4 in one kernel where there is one: 22.9 us instead of 25.5 alone; within a step its forerunner, of
    # 24.3, gained no more than 1 % (docs/adr/0009).
    whole: bool = False


class ExpertLauncher:
    """The expert kernels of one model on one device.

    Args:
        state: the plan's tensors; ``state.block`` decides whether there is a CPU's part.
        arena: uint8 [(num_slots + max_fetch + max_prefetch) * slice_nbytes], the slots.
        bases: int64 [L], device tensor with the addresses of the layers' first slabs.
        multiprocessors: of the device, the unit of the grids; found out if None.
        layers: geometry of each layer, where they differ or have ``places``.
    """

    def __init__(
        self,
        geometry: SliceGeometry,
        state: PlanState,
        arena: torch.Tensor,
        bases: torch.Tensor,
        act: Activation,
        request: RequestOffsets,
        multiprocessors: int | None = None,
        tuning: Tuning | None = None,
        layers: Sequence[SliceGeometry] = (),
    ) -> None:
        self._layers = tuple(layers)
        formats = {p.format for g in self._layers for p in g.places} | {geometry.format}
        if not formats.issubset(FORMATS):
            raise UnsupportedModelError(
                f"the GPU has no expert kernels for {', '.join(sorted(formats - set(FORMATS)))}",
                hint=f"supported: {', '.join(FORMATS)}; --experts cpu serves the other formats",
            )
        mixed = len(formats) != 1 or geometry.format not in _OWN_KERNELS
        self.tuning = tuning or Tuning()
        self._geometry, self._state, self._arena, self._bases = geometry, state, arena, bases
        self._act, self._request = act, request
        self._sms = multiprocessors or _multiprocessors(arena.device)
        self._mxfp4 = geometry.format == "mxfp4" and not mixed
        self._overlap = self.tuning.overlap and can_overlap(arena.device)
        self._block = state.counts if state.block is None else state.block
        self._has_cpu = state.block is not None
        self._allocate()
        self._whole: WholeExperts | None = None
        if self._mxfp4 and self.tuning.whole and takes(geometry, arena.device):
            self._whole = WholeExperts(
                geometry, state, arena, self._x_halves, self._h, self.partial, act, self._sms
            )
        self._blocks: BlockLauncher | None = None
        if mixed:
            self._blocks = BlockLauncher(
                self._layers, state, arena, self.partial, act, self._sms, self.tuning.blocks
            )

    def _allocate(self) -> None:
        g, plan, device = self._geometry, self._state.geometry, self._arena.device
        tokens, pairs, inner = plan.max_tokens, plan.max_uses, g.width * g.num_slices
        if self._mxfp4:
            self._x_halves, self._h = (
                torch.zeros(n, 2, k, dtype=torch.float16, device=device)
                for n, k in ((tokens, g.hidden), (pairs, inner))
            )
        else:
            self._h = torch.zeros(pairs, inner, device=device)
            self._x_halves = self._h  # nobody's
        self.partial = torch.zeros(pairs, g.num_slices, g.hidden, device=device)

    def prepare(self, x: torch.Tensor, layer: int = 0, *, beside: bool = False) -> None:
        """Publish x, float32 [T, D], to the CPU and to the kernels, before the plan of ``layer``; that of a
        single token may be made ``beside`` it, on another stream."""
        if self._blocks is not None:
            self._blocks.prepare(x)
        if not (self._has_cpu or self._mxfp4):
            return
        hidden, plan = self._geometry.hidden, self._state.geometry
        overlap = self._overlap and not beside
        expert_prepare[(x.shape[0], -(-hidden // PREPARE_COLS))](
            x, self._x_halves, self._block, self._state.state, layer, self._request.x,
            self._request.ready, plan.num_layers, hidden, PREPARE_COLS, self._mxfp4, self._has_cpu,
            plan.numbered and x.shape[0] == 1, overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip

    def gather(self, layer: int, fetches: torch.Tensor | None = None) -> None:
        """Copy the planned fetches (or those of a list of the caller's) into their slots."""
        t = self.tuning
        s, slices = self._state, self._state.geometry
        ahead = slices.max_prefetch if fetches is None else 0
        settling = t.settle_programs if ahead else 0
        expert_gather[(t.gather_programs + settling,)](
            self._bases, self._arena, s.fetches if fetches is None else fetches, s.counts, s.totals,
            s.origins, s.arrived, s.homes, s.state, layer, t.gather_programs,
            self._geometry.slice_nbytes, self._host_nbytes(layer),
            COPY_WORDS if ahead else t.gather_words,
            slices.num_slots + slices.max_fetch, ahead, slices.prefetch_programs, num_warps=t.gather_warps,
        )  # fmt: skip

    def _host_nbytes(self, layer: int) -> int:
        own = self._layers[layer].host_nbytes if self._layers else 0
        return own or self._geometry.slice_nbytes

    def hits(self, x: torch.Tensor, layer: int = 0) -> None:
        """Compute the planned hits. ``layer`` matters where layers differ."""
        self.compute(x, self._state.hits, COUNT_HITS.value, layer=layer)

    def fetched(self, x: torch.Tensor, layer: int = 0) -> None:
        """Compute what ``gather`` brought."""
        self.compute(x, self._state.fetches, COUNT_FETCHES.value, layer=layer)

    def compute(
        self,
        x: torch.Tensor,
        entries: torch.Tensor,
        which: int,
        only: str | None = None,
        *,
        layer: int = 0,
    ) -> None:
        """Compute ``counts[which]`` entries; ``only`` one half of it, for benchmarks."""
        if only is None and self._whole is not None:
            # What was fetched depends on the side stream, too: no start before its end.
            hits = which == COUNT_HITS.value
            self._whole.compute(entries, which, overlaps=self._overlap and hits)
            return
        if only != "down":
            if self._blocks is not None:
                self._blocks.gate_up(layer, x, entries, which)
            else:
                self._gate_up(x, entries, which)
        if only != "gate_up":
            if self._blocks is not None:
                self._blocks.down(layer, entries, which)
            else:
                self._down(entries, which)

    def _gate_up(self, x: torch.Tensor, entries: torch.Tensor, which: int) -> None:
        g, s, t, act = self._geometry, self._state, self.tuning, self._act
        sizes = (g.has_bias, g.hidden, g.width, g.num_slices)
        gate = (act.kind == "swiglu_clamped", act.alpha, act.limit)
        weights, scales, bias = g.gate_up
        if self._mxfp4:
            tiles = -(-g.hidden // (WEIGHTS_OF_SCALE * TILE_BLOCKS.value))
            at_once = min(t.gate_up_tiles, tiles)
            loop_gate_up[self._programs(entries, 2 * g.width, 1)](
                self._arena, entries, s.counts, s.pair_token, self._x_halves, self._h,
                g.hidden // WEIGHTS_OF_SCALE, which, g.slice_nbytes, weights, scales, bias, *sizes,
                *gate, -(-tiles // at_once), at_once, self._overlap, num_warps=1,
                maxnreg=t.gate_up_registers,
            )  # fmt: skip
        else:
            bf16_gate_up[(t.bf16_gate_up_programs * self._sms,)](
                self._arena, entries, s.counts, s.pair_token, x, self._h, which, g.slice_nbytes,
                weights, bias, *sizes, *gate, _columns_at_once(g.hidden), BF16_TILE, num_warps=4,
            )  # fmt: skip

    def _down(self, entries: torch.Tensor, which: int) -> None:
        g, s, t = self._geometry, self._state, self.tuning
        sizes = (g.has_bias, g.hidden, g.width, g.num_slices)
        weights, scales, bias = g.down
        if self._mxfp4:
            split, warps = _warps(g.width, t.down_warps)
            halves_down[self._programs(entries, g.hidden, warps // split)](
                self._arena, entries, s.counts, s.pair_weight, self._h, self.partial,
                g.width // WEIGHTS_OF_SCALE, which, g.slice_nbytes, weights, scales, bias, *sizes,
                split, warps, self._overlap, num_warps=warps, maxnreg=t.down_registers,
                launch_pdl=self._overlap,
            )  # fmt: skip
        else:
            bf16_down[(t.bf16_down_programs * self._sms,)](
                self._arena, entries, s.counts, s.pair_weight, self._h, self.partial, which,
                g.slice_nbytes, weights, bias, *sizes, _columns_at_once(g.width), BF16_TILE,
                num_warps=4,
            )  # fmt: skip

    def _programs(self, entries: torch.Tensor, num_rows: int, warps: int) -> tuple[int, ...]:
        """A program for each tile of each entry that there can be, up to ``most_programs``; ``warps`` of
        it have rows of their own."""
        tiles = -(-num_rows // (ROWS_OF_WARP * warps))
        return (min(entries.shape[0] * tiles, self.tuning.most_programs * self._sms),)

    def await_cpu(self) -> None:
        """Wait for the CPU's answer to this layer's request, if there is one."""
        if self._has_cpu:
            # Early only behind products, which began when the plan was done.
            early = self._overlap and self.tuning.await_early and self._state.geometry.max_fetch > 0
            expert_await[(1,)](
                self._state.counts, self._state.state, self._block, self._state.totals,
                self._request.ack, self._request.abort, STATE_SEQ.value, STATE_FAILED.value,
                self.tuning.await_spins, early, num_warps=1, launch_pdl=early,
            )  # fmt: skip

    def combine(self, num_tokens: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Sum what the paths computed, and ``residual``: float32 [T, D]."""
        g, s = self._geometry, self._state
        out = torch.empty(num_tokens, g.hidden, device=self._arena.device)
        block = s.counts if s.block is None else s.block.view(torch.float32)
        expert_combine[(num_tokens, -(-g.hidden // COMBINE_COLS))](
            self.partial, s.pair_of, s.on_gpu, s.counts, block,
            out if residual is None else residual, out, self._request.out, s.geometry.top_k,
            g.num_slices, g.hidden, self._has_cpu, residual is not None, COMBINE_COLS,
            self._overlap, num_warps=1, launch_pdl=self._overlap,
        )  # fmt: skip
        return out


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # interpreted: more programs only take longer
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count


def _warps(columns: int, most: int) -> tuple[int, int]:
    """Warps that share a row's blocks, and warps of a program, for a matrix's columns."""
    blocks, split = -(-columns // WEIGHTS_OF_SCALE), 1
    while split < MOST_SHARING and blocks > TILES_OF_WARP * TILE_BLOCKS.value * split:
        split *= 2
    return split, max(split, most)


def _columns_at_once(columns: int) -> int:
    return min(MAX_COLUMNS, power_of_two(columns))
