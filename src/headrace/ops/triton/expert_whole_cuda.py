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
RESULTS, BEYOND = 4, 64  # of the source
# Activations that a warp holds are 16 registers a unit, beside some 70 others.
MOST_UNITS = 6
# Left of a multiprocessor's shared memory for the small kernels beside this one (fetches over PCIe).
LEFT_NBYTES = 12 << 10
# Until a block computes what it waits for. Beyond what any fetch beside it takes (some 300 us).
PATIENCE_NS = 5_000_000


@dataclass(frozen=True)
class Shape:
    """Compile-time choices.

    warps: that multiply; stages: tiles of gate and up on their way; chunks: runs of down's tiles on their
    way, of ``chunk`` tiles each
    """

    warps: int = 8
    stages: int = 3
    chunks: int = 7
    chunk: int = 4


class _Call(ctypes.Structure):
    """``Call`` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "arena", "entries", "counts", "pair_token", "pair_weight", "x", "h", "partial", "done",
            "passed",
        )),
        ("which", ctypes.c_int),
    )  # fmt: skip


def shared_nbytes(hidden: int, width: int, shape: Shape) -> int:
    """Bytes of the kernel's ``Shared``."""
    gate_up = _up(ROWS * (hidden // 2 + hidden // BLOCK))
    down = _up(shape.chunk * ROWS * (width // 2 + width // BLOCK))
    barriers = 2 * (shape.stages + shape.chunks + RESULTS) + 1
    rest = BEYOND + RESULTS * shape.warps * ROWS * 4 + 8 * barriers
    return _up(shape.stages * gate_up + shape.chunks * down + rest)


def _up(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def shape_for(hidden: int, width: int, most_nbytes: int) -> Shape | None:
    """The measured shape, with fewer bytes on their way where ``most_nbytes`` are too few; None: no
    shape serves."""
    shape = Shape()
    if -(-hidden // UNIT) > MOST_UNITS // 2 * shape.warps or -(-width // UNIT) > MOST_UNITS:
        return None
    while shared_nbytes(hidden, width, shape) > most_nbytes:
        if shape.chunks > 2:
            shape = replace(shape, chunks=shape.chunks - 1)
        elif shape.stages > 2:
            shape = replace(shape, stages=shape.stages - 1)
        else:
            return None
    return shape


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
        f"WARPS={shape.warps}", f"STAGES={shape.stages}", f"CHUNKS={shape.chunks}",
        f"CHUNK={shape.chunk}", f"SHARED_NBYTES={shared_nbytes(g.hidden, g.width, shape)}",
        f"PATIENCE_NS={patience_ns}",
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
    return shape_for(geometry.hidden, geometry.width, most - LEFT_NBYTES)


@cache
def _kernel(
    device: int, geometry: SliceGeometry, act: Activation, shape: Shape
) -> cuda_source.Kernel:
    capability = torch.cuda.get_device_capability(device)
    program = cuda_source.compiled(source(), capability, defines(geometry, act, shape))
    nbytes = shared_nbytes(geometry.hidden, geometry.width, shape)
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
        self._done = torch.zeros(most + 1, dtype=torch.int32, device=arena.device)

    def compute(self, entries: torch.Tensor, which: int, *, overlaps: bool) -> None:
        """partial = weight * (down act(gate x, up x) + bias) of ``counts[which]`` entries.

        overlaps: it may start before the kernel ahead of it in the stream has ended
        """
        s = self._state
        tensors = (
            self._arena, entries, s.counts, s.pair_token, s.pair_weight, self._x, self._h,
            self._partial, self._done[1:], self._done,
        )  # fmt: skip
        call = _Call(*(t.data_ptr() for t in tensors), which)
        threads = 32 * self._shape.warps + 64
        self._kernel.launch((self._blocks, 1, 1), threads, call, overlaps=overlaps)
