"""One slice of an expert for many tokens: weights to bfloat16, then cuBLAS's matrix products."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.ops.records import Activation
from headrace.ops.triton.expert_blocks import scaled_tile
from headrace.ops.triton.expert_geometry import SliceGeometry
from headrace.ops.triton.expert_rows import gated, power_of_two

BLOCKS = 128  # of 32 weights, that a program unpacks
COLS = 512  # activations of a program
ROWS, UNPACK_COLS = 16, 256  # that a program unpacks of other formats


@triton.jit
def mxfp4_unpack(codes, scales, out, num_blocks, BLOCKS: tl.constexpr):
    """out, bfloat16 [num_blocks * 32] = the weights, exactly."""
    b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    ok = (b < num_blocks)[:, None]
    i = tl.arange(0, 16)[None, :]
    code = tl.load(codes + b[:, None].to(tl.int64) * 16 + i, mask=ok, other=0).to(tl.int32)
    # Twice the values are integers: half of the scale.
    scale = power_of_two(tl.load(scales + b, mask=b < num_blocks, other=0))[:, None] * 0.5
    both = tl.interleave(_twice(code & 15), _twice(code >> 4)).to(tl.float32) * scale
    at = b[:, None].to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, both.to(tl.bfloat16), mask=ok)


@triton.jit
def _twice(code):
    m = code & 7
    value = tl.where(m < 4, m, tl.where(m < 6, 2 * m - 4, 4 * m - 16))
    return tl.where(code > 7, -value, value)


@triton.jit
def unpack_rows(
    piece, out, num_rows, AT_CODES: tl.constexpr, AT_SCALES: tl.constexpr,
    AT_FACTORS: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, PAIRED: tl.constexpr, FACTORS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out, bfloat16 [num_rows, K] = a matrix of a slice, rounded once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLS
    w = scaled_tile(
        piece, row, row < num_rows, first, AT_CODES, AT_SCALES, AT_FACTORS, CODE_STRIDE,
        SCALE_STRIDE, FORMAT, PAIRED, FACTORS, K, ROWS, COLS,
    )  # fmt: skip
    k = first + tl.arange(0, COLS)
    inside = (row < num_rows)[:, None] & (k < K)[None, :]
    tl.store(out + row[:, None] * K + k[None, :], w.to(tl.bfloat16), mask=inside)


@triton.jit
def gate_rows(
    y, bias, out, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out, bfloat16 [n, WIDTH] = act of y, bfloat16 [n, 2 * WIDTH], gate and up in turn."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = c < WIDTH
    gate = tl.load(y + row * (2 * WIDTH) + 2 * c, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(y + row * (2 * WIDTH) + 2 * c + 1, mask=ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias + 2 * c, mask=ok, other=0.0)
        up += tl.load(bias + 2 * c + 1, mask=ok, other=0.0)
    tl.store(out + row * WIDTH + c, gated(gate, up, CLAMPED, ALPHA, LIMIT).to(tl.bfloat16), mask=ok)


def slice_product(
    geometry: SliceGeometry, piece: torch.Tensor, x: torch.Tensor, act: Activation
) -> torch.Tensor:
    """What a slice adds for x: float32 [n, hidden] -> float32 [n, hidden].

    piece: uint8 [slice_nbytes], on the device. Activations are rounded to bfloat16, as all matrix
    products of many rows do on a GPU.
    """
    g = geometry
    gate_up = _matrix(g, piece, 0, 2 * g.width, g.hidden)
    down = _matrix(g, piece, 1, g.hidden, g.width)
    y = x.to(torch.bfloat16) @ gate_up.T
    inner = torch.empty(x.shape[0], g.width, dtype=torch.bfloat16, device=x.device)
    bias = _floats(piece, g.gate_up[2], 2 * g.width) if g.has_bias else inner
    gate_rows[(x.shape[0], triton.cdiv(g.width, COLS))](
        y, bias, inner, g.width, g.has_bias, act.kind == "swiglu_clamped", act.alpha, act.limit, COLS,
        num_warps=4,
    )  # fmt: skip
    out = (inner @ down.T).float()
    return out.add_(_floats(piece, g.down[2], g.hidden)) if g.has_bias else out


def _floats(piece: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return piece[at : at + 4 * count].view(torch.float32)


def _matrix(
    g: SliceGeometry, piece: torch.Tensor, which: int, rows: int, cols: int
) -> torch.Tensor:
    """bfloat16 [rows, cols]. which: 0 gate and up in turn, 1 down."""
    at = (g.gate_up, g.down)[which]
    place = g.places[which] if g.places else None
    fmt = g.format if place is None else place.format
    if fmt == "bf16":
        return piece[at[0] : at[0] + 2 * rows * cols].view(torch.bfloat16).view(rows, cols)
    out = torch.empty(rows, cols, dtype=torch.bfloat16, device=piece.device)
    if place is not None and fmt != "mxfp4":
        unpack_rows[(triton.cdiv(rows, ROWS), triton.cdiv(cols, UNPACK_COLS))](
            piece, out, rows, *at[:2], place.factors, place.code_stride, place.scale_stride, fmt,
            which == 0, place.factor_kind, cols, ROWS, UNPACK_COLS, num_warps=4,
        )  # fmt: skip
        return out
    blocks = rows * cols // 32
    mxfp4_unpack[(triton.cdiv(blocks, BLOCKS),)](
        piece[at[0] :], piece[at[1] :], out, blocks, BLOCKS, num_warps=4
    )
    return out
