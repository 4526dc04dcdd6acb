"""Where the parts of a slice lie: what the expert kernels must know of ``experts.slab``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixPlace:
    """What the general kernels must know of a matrix beside its parts' offsets.

    code_stride, scale_stride: bytes between two rows of the codes, and of scales that are apart (else 0)
    factors: bytes from the slice's start of float32 that multiply; factor_kind: 0 there are none, 1 one
    a matrix, 2 one for each 128 x 128 weights
    """

    format: str
    code_stride: int
    scale_stride: int = 0
    factors: int = 0
    factor_kind: int = 0


@dataclass(frozen=True)
class SliceGeometry:
    """What the kernels must know of a layer's slabs: byte offsets of the parts in a slice.

    format: of gate and up; slice_nbytes: of a slot; gate_up, down: (weights, scales, bias), 0 where there
    is no such part; places: more of both matrices, for the kernels of any format; host_nbytes: of a
    slice in host memory, 0: as long as a slot
    """

    format: str
    hidden: int
    width: int
    num_slices: int
    slice_nbytes: int
    has_bias: bool
    gate_up: tuple[int, int, int]
    down: tuple[int, int, int]
    places: tuple[MatrixPlace, ...] = ()
    host_nbytes: int = 0
