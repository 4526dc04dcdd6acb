"""Launches ``expert_whole.cu``: a layer's resident MXFP4 experts in one kernel, on GPUs with bulk copies.

Triton's two kernels for the same (``expert_loop``, ``expert_halves``) serve every other case.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from headrace.ops.records import Activation
from headrace.ops.triton import cuda_source
from headrace.ops.triton.control import interpreted
from headrace.ops.triton.expert_geometry import SliceGeometry
from headrace.ops.triton.expert_state import PlanState

SOURCES = ("expert_whole.cuh", "expert_whole.cu")
CAPABILITY = (9, 0)  # bulk copies, programmatic dependent launch
BLOCK, ROWS = 32, 16  # weights of a scale, rows of a tile
UNIT = 4 * BLOCK  # columns that four lanes take at a time
RESULTS, BEYOND, ENTRIES = 4, 64, 32  # of the source
# Of a row, for each warp: activations that it holds are 16 registers a unit. Of a whole row: instructions.
MOST_UNITS, MOST_UNITS_OF_ROW = 3, 12
LEAST_STAGES = 3
# Of a block's shared memory, left for the small kernels beside this one (fetches over PCIe).
LEFT_NBYTES = 8 << 10
# Until a block computes what it waits for. Beyond what any fetch beside it takes (some 300 us).
PATIENCE_NS = 5_000_000


@dataclass(frozen=True)
class Shape:
    """Compile-time choices.

    warps: that multiply; stages: pieces on their way, each a tile of gate and up or several of down;
    own_percent: of the tiles of gate and up that blocks take without drawing
        (H200, 2026-11-30, four experts of gpt-oss, us, in one run: 50 % 22.9, 75 % 24.0, 90 % 24.4, 0 24.2;
        with 50 %: 12 warps 23.1, 7 stages 23.6)
    """

    warps: int = 8
    stages: int = 6
    own_percent: int = 50


class _Call(ctypes.Structure):
    """``Call`` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "arena", "entries", "counts", "pair_token", "pair_weight", "x", "h", "partial", "done",
            "drawn", "passed",
        )),
        ("which", ctypes.c_int), ("most", ctypes.c_int),
    )  # fmt: skip


def chunk_of(geometry: SliceGeometry) -> int:
    """Tiles of down that are about as many bytes as one of gate and up."""
    gate_up, down = (_tile_nbytes(k, geometry.has_bias) for k in (geometry.hidden, geometry.width))
    return max((gate_up + down // 2) // down, 1)


def _tile_nbytes(columns: int, has_bias: bool) -> int:
    return ROWS * (columns // 2 + columns // BLOCK + 4 * has_bias)


def shared_nbytes(geometry: SliceGeometry, shape: Shape) -> int:
    """Bytes of the kernel's ``Shared``."""
    gate_up, down = (_tile_nbytes(k, geometry.has_bias) for k in (geometry.hidden, geometry.width))
    stage = _up(max(gate_up, chunk_of(geometry) * down))
    h = shape.stages * 2 * geometry.width * 2
    barriers = 4 * shape.stages + 2 * RESULTS + 1
    sums = RESULTS * ROWS * 4 * (4 * shape.warps + 1)
    entries = ENTRIES * 16 + 4 * (shape.stages + RESULTS)
    return _up(shape.stages * stage + BEYOND + 128 + h + sums + entries + 8 * barriers)


def _up(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def shape_for(geometry: SliceGeometry, most_nbytes: int) -> Shape | None:
    """The measured shape, with less on its way where ``most_nbytes`` are too few; None: no shape serves."""
    units = -(-geometry.hidden // UNIT), -(-geometry.width // UNIT)
    shape = Shape()
    if units[0] > MOST_UNITS * shape.warps or units[1] > MOST_UNITS_OF_ROW:
        return None
    for stages in range(shape.stages, LEAST_STAGES - 1, -1):
        found = replace(shape, stages=stages)
        if shared_nbytes(geometry, found) <= most_nbytes:
            return found
    return None


def defines(
    geometry: SliceGeometry, act: Activation, shape: Shape, patience_ns: int = PATIENCE_NS
) -> tuple[str, ...]:
    """What the source is compiled with."""
    g = geometry
    names = ("CODES", "SCALES", "BIAS")
    return (
        f"HIDDEN={g.hidden}", f"WIDTH={g.width}", f"S={g.num_slices}",
        f"SLICE_NBYTES={g.slice_nbytes}", f"HAS_BIAS={int(g.has_bias)}",
        *(f"GATE_UP_{name}={at}" for name, at in zip(names, g.gate_up, strict=True)),
        *(f"DOWN_{name}={at}" for name, at in zip(names, g.down, strict=True)),
        f"CLAMPED={int(act.kind == 'swiglu_clamped')}",
        f"ALPHA={float(act.alpha)}f", f"LIMIT={float(act.limit)}f",
        f"WARPS={shape.warps}", f"STAGES={shape.stages}", f"CHUNK={chunk_of(g)}",
        f"SHARED_NBYTES={shared_nbytes(g, shape)}",
        f"OWN_PERCENT={shape.own_percent}", f"PATIENCE_NS={patience_ns}",
    )  # fmt: skip


def source() -> str:
    """The whole program."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in SOURCES)


def takes(geometry: SliceGeometry, device: torch.device) -> bool:
    """Whether the kernel serves slices of this geometry on this device."""
    return (
        not interpreted()
        and device.type == "cuda"
        and geometry.format == "mxfp4"
        and torch.cuda.get_device_capability(device) >= CAPABILITY
        and _shape(geometry, device.index or 0) is not None
        and cuda_source.available()
    )


@cache
def _shape(geometry: SliceGeometry, device: int) -> Shape | None:
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return shape_for(geometry, most - LEFT_NBYTES)


@cache
def _kernel(
    device: int, geometry: SliceGeometry, act: Activation, shape: Shape
) -> cuda_source.Kernel:
    capability = torch.cuda.get_device_capability(device)
    program = cuda_source.compiled(source(), capability, defines(geometry, act, shape))
    nbytes = shared_nbytes(geometry, shape)
    return cuda_source.load(program, {"expert_whole": nbytes})["expert_whole"]


class WholeExperts:
    """The kernel of one model's layers on one device.

    Args:
        x_halves, h_halves: float16 [tokens, 2, hidden], [pairs, 2, intermediate], see ``expert_halves``.
        partial: float32 [pairs, slices, hidden], where results go.
        blocks: of the grid; one for each multiprocessor is all that fit.
    """

    def __init__(
        self,
        geometry: SliceGeometry,
        state: PlanState,
        arena: torch.Tensor,
        x_halves: torch.Tensor,
        h_halves: torch.Tensor,
        partial: torch.Tensor,
        act: Activation,
        blocks: int,
        shape: Shape | None = None,
    ) -> None:
        device = arena.device.index or 0
        self._shape = shape or _shape(geometry, device) or Shape()
        self._kernel = _kernel(device, geometry, act, self._shape)
        self._state, self._arena, self._blocks = state, arena, blocks
        self._x, self._h, self._partial = x_halves, h_halves, partial
        most = max(state.hits.shape[0], state.fetches.shape[0])
        self._done = torch.zeros(most + 3, dtype=torch.int32, device=arena.device)

    def compute(self, entries: torch.Tensor, which: int, *, overlaps: bool) -> None:
        """partial = weight * (down act(gate x, up x) + bias) of ``counts[which]`` entries.

        overlaps: it may start before the kernel ahead of it in the stream has ended
        """
        s = self._state
        tensors = (
            self._arena, entries, s.counts, s.pair_token, s.pair_weight, self._x, self._h,
            self._partial, self._done[3:], self._done[1:], self._done,
        )  # fmt: skip
        call = _Call(*(t.data_ptr() for t in tensors), which, len(entries))
        threads = 32 * self._shape.warps + 96
        self._kernel.launch((self._blocks, 1, 1), threads, call, overlaps=overlaps)
