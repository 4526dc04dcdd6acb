"""Packed matrices for products of many rows, and rows of packed tables.

A prompt's products are bound by the tensor cores: a matrix is expanded to bfloat16 into scratch memory, a
band of rows at a time, and cuBLAS multiplies with it.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from headrace.core.block_planes import EXPAND_NBYTES
from headrace.formats.base import PackedTensor
from headrace.ops.triton.control import interpreted
from headrace.ops.triton.packed_few import planes
from headrace.ops.triton.unpack import weight_tile

_ROWS, _COLS, _WARPS = 16, 256, 4
_INTERPRETED_ROWS = 64  # its time goes with the number of operations


@triton.jit
def expand_kernel(
    codes, scales, out, num_rows, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out, bfloat16 [num_rows, K] = the matrix, rounded."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(1) * COLS
    inside = row < num_rows
    tile = weight_tile(
        codes, scales, row, inside, first, CODE_STRIDE, SCALE_STRIDE, FORMAT, K, ROWS, COLS
    )
    k = first + tl.arange(0, COLS)
    mask = inside[:, None] & (k < K)[None, :]
    tl.store(out + row[:, None] * K + k[None, :], tile.to(tl.bfloat16), mask=mask)


@triton.jit
def packed_embed_kernel(
    codes, scales, ids, out, count, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out, float32 [count, K]: rows ``ids`` of the table."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < count
    row = tl.load(ids + at, mask=inside, other=0)
    first = tl.program_id(1) * COLS
    tile = weight_tile(
        codes, scales, row, inside, first, CODE_STRIDE, SCALE_STRIDE, FORMAT, K, ROWS, COLS
    )
    k = first + tl.arange(0, COLS)
    mask = inside[:, None] & (k < K)[None, :]
    tl.store(out + at.to(tl.int64)[:, None] * K + k[None, :], tile, mask=mask)


def expanded(weight: PackedTensor) -> torch.Tensor:
    """The matrix, rounded to bfloat16: [N, K]."""
    codes, scales = planes(weight)
    out = torch.empty(weight.rows, weight.cols, dtype=torch.bfloat16, device=codes.device)
    rows = _INTERPRETED_ROWS if interpreted() else _ROWS
    expand_kernel[(triton.cdiv(weight.rows, rows), triton.cdiv(weight.cols, _COLS))](
        codes, scales, out, weight.rows, codes.stride(0), scales.stride(0), weight.format,
        weight.cols, rows, _COLS, num_warps=_WARPS,
    )  # fmt: skip
    return out


def bands(weight: PackedTensor) -> Iterator[PackedTensor]:
    """Rows of the matrix, as many at a time as fit the scratch memory once expanded."""
    step = max(EXPAND_NBYTES // (2 * weight.cols), 1)
    for start in range(0, weight.rows, step):
        yield weight.row_range(start, min(start + step, weight.rows))


def embed_packed(weight: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed table. weight: [V, D] in planes; ids: int64 [T]. Returns float32 [T, D]."""
    codes, scales = planes(weight)
    out = torch.empty(len(ids), weight.cols, device=ids.device)
    # A step of decoding looks up a row for each sequence.
    rows = 1 if len(ids) <= 4 else 4
    packed_embed_kernel[(triton.cdiv(len(ids), rows), triton.cdiv(weight.cols, _COLS))](
        codes, scales, ids, out, len(ids), codes.stride(0), scales.stride(0), weight.format,
        weight.cols, rows, _COLS, num_warps=1,
    )  # fmt: skip
    return out
