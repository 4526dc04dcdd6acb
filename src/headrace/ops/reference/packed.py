"""Rows of packed weights as float32, a bounded amount at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace.formats.base import FP8_BLOCK_ROWS, PackedTensor, dequantize

# Elements that are unpacked at once: 2^22 floats are 16 MiB, so that a vocabulary-sized matrix does
# not need a float32 copy of itself.
CHUNK_ELEMENTS = 1 << 22

_FLOATS = ("f32", "f16", "bf16")


def to_float(packed: PackedTensor) -> torch.Tensor:
    """Return ``packed`` as float32 of its logical shape; float32 weights are not copied."""
    if packed.format in _FLOATS:
        return packed.parts["data"].float()
    return dequantize(packed)


def row_chunks(packed: PackedTensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (start, stop, float32 [stop - start, cols]) over the rows of a matrix."""
    step = max(CHUNK_ELEMENTS // packed.cols // FP8_BLOCK_ROWS, 1) * FP8_BLOCK_ROWS
    for start in range(0, packed.rows, step):
        stop = min(start + step, packed.rows)
        yield start, stop, to_float(packed.row_range(start, stop))


def gather_rows(packed: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """Return rows ``ids`` (int64 [T]) as float32 [T, cols]."""
    if packed.format == "fp8_e4m3":
        rows = [to_float(_fp8_row(packed, int(i))) for i in ids]
        return torch.cat(rows) if rows else torch.zeros(0, packed.cols)
    parts = {
        name: part if name == "global_scale" else part.index_select(-2, ids)
        for name, part in packed.parts.items()
    }
    return to_float(PackedTensor(packed.format, (len(ids), packed.cols), parts))


def _fp8_row(packed: PackedTensor, row: int) -> PackedTensor:
    """One row with its row of block scales; 1-row matrices need only the first row of blocks."""
    scale = packed.parts["scale"]
    if scale.ndim == 2:
        block = row // FP8_BLOCK_ROWS
        scale = scale[block : block + 1]
    parts = {"codes": packed.parts["codes"][row : row + 1], "scale": scale}
    return PackedTensor(packed.format, (1, packed.cols), parts)
