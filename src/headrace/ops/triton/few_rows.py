"""Products of few rows (a decoding step): bound by reading the weights, so one kernel reads them once.

Weight rows are the M of the tensor cores' product and the activations its N, padded to 8 or 16: row i
of the result is the same bits alone and among sixteen, since sums along K run in one order.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation
from headrace.ops.triton.overlap import can_overlap, prefetch, wait_and_release

MAX_ROWS = 16  # the N that the activations are padded to; 8 where that is enough
MAX_GROUP = 3  # q, k and v

# A program is one warp with 16 weight rows, the M of one tensor core instruction: more warps would do
# the same rows again. 16 rows give the 2,880 of a gpt-oss output projection 180 programs for 132
# multiprocessors; four fit on one, with three stages of 16 x 256 x 2 bytes in flight each, against the
# 25 KB that hide the latency of memory (4.8 TB/s x 0.7 us / 132).
_ROWS, _WARPS, _TILE_K, _STAGES = 16, 1, 256, 4
_GATED_TILE_K = 128  # gate and up take as much shared memory together
LINE_VALUES = tl.constexpr(64)  # 16-bit weights of a line of 128 bytes
AHEAD_LINES = tl.constexpr(16)  # of a row: with 320 programs 10 MB, what memory gives in 2 us


@triton.jit
def weight_tile_product(
    x, weight, stride, row, first_row, num_rows, num_tokens, cols,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """weight[first_row : first_row + ROWS] x^T: float32 [ROWS, TOKENS]; x is of the weight's type."""
    token = tl.arange(0, TOKENS)
    inside = (first_row + row < num_rows)[:, None]
    base = weight + (first_row + row).to(tl.int64)[:, None] * stride
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, cols, TILE):
        k = start + tl.arange(0, TILE)
        w = tl.load(base + k[None, :], mask=inside & (k < cols)[None, :], other=0.0)
        within = (k < cols)[:, None] & (token < num_tokens)[None, :]
        value = tl.load(x + token[None, :] * cols + k[:, None], mask=within, other=0.0)
        acc = tl.dot(w, value, acc)
    return acc


@triton.jit
def ahead(weight, stride, first, num_rows, cols, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Ask for the first columns of a program's rows while the kernel before ends: memory is idle then,
    as what makes a row of activations is mostly one or a few programs."""
    if PDL:
        row = tl.minimum(first + tl.arange(0, ROWS), num_rows - 1)
        k = tl.minimum(tl.arange(0, AHEAD_LINES) * LINE_VALUES, cols - 1)
        prefetch(weight + row.to(tl.int64)[:, None] * stride + k[None, :], PDL)


@triton.jit
def store_rows(
    acc, out, bias, residual, row, num_rows, num_tokens,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TOKENS)
    inside = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    at = token[None, :] * num_rows + row[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=row < num_rows, other=0.0)[:, None]
    if HAS_RESIDUAL:
        acc += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, acc, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x, w0, w1, w2, b0, b1, b2, o0, o1, o2, residual, num_tokens, cols, rows0, rows1, rows2,
    stride0, stride1, stride2,
    HAS_B0: tl.constexpr, HAS_B1: tl.constexpr, HAS_B2: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to three matrices with the same input; programs are dealt out to one after the other."""
    pid = tl.program_id(0)
    end0 = tl.cdiv(rows0, ROWS)
    end1 = end0 + tl.cdiv(rows1, ROWS)
    if pid < end0:
        weight, stride, num_rows, first = w0, stride0, rows0, pid * ROWS
    elif pid < end1:
        weight, stride, num_rows, first = w1, stride1, rows1, (pid - end0) * ROWS
    else:
        weight, stride, num_rows, first = w2, stride2, rows2, (pid - end1) * ROWS
    row = tl.arange(0, ROWS)
    ahead(weight, stride, first, num_rows, cols, ROWS, PDL)
    wait_and_release(PDL)
    acc = weight_tile_product(
        x, weight, stride, row, first, num_rows, num_tokens, cols, TOKENS, ROWS, TILE
    )
    row += first
    if pid < end0:
        store_rows(acc, o0, b0, residual, row, rows0, num_tokens, HAS_B0, HAS_RESIDUAL, TOKENS)
    elif pid < end1:
        store_rows(acc, o1, b1, residual, row, rows1, num_tokens, HAS_B1, False, TOKENS)
    else:
        store_rows(acc, o2, b2, residual, row, rows2, num_tokens, HAS_B2, False, TOKENS)


@triton.jit
def activated(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """The gated activation of ops.records.Activation."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate / (1.0 + tl.exp(-alpha * gate))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up


@triton.jit(do_not_specialize=["num_tokens"])
def gated_kernel(
    x, gate, up, out, num_tokens, cols, num_rows, gate_stride, up_stride, alpha, limit,
    CLAMPED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    first, token = tl.program_id(0) * ROWS, tl.arange(0, TOKENS)
    ahead(gate, gate_stride, first, num_rows, cols, ROWS, PDL)
    ahead(up, up_stride, first, num_rows, cols, ROWS, PDL)
    wait_and_release(PDL)
    row = first + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    gate_row = gate + row.to(tl.int64)[:, None] * gate_stride
    up_row = up + row.to(tl.int64)[:, None] * up_stride
    g = tl.zeros((ROWS, TOKENS), tl.float32)
    u = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, cols, TILE):
        k = start + tl.arange(0, TILE)
        here = inside & (k < cols)[None, :]
        within = (k < cols)[:, None] & (token < num_tokens)[None, :]
        value = tl.load(x + token[None, :] * cols + k[:, None], mask=within, other=0.0)
        g = tl.dot(tl.load(gate_row + k[None, :], mask=here, other=0.0), value, g)
        u = tl.dot(tl.load(up_row + k[None, :], mask=here, other=0.0), value, u)
    value = activated(g, u, alpha, limit, CLAMPED).to(out.dtype.element_ty)
    stored = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    tl.store(out + token[None, :] * num_rows + row[:, None], value, mask=stored)


def linear_few(
    x: torch.Tensor,
    weights: Sequence[PackedTensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Up to three products of one input.

    x: [T, K], T at most 16, rounded to the weights' type if it is float32; weights: 16-bit [Ni, K];
    residual: float32 [T, N0], added to the first. Returns float32 [T, Ni] each.
    """
    data = [w.parts["data"] for w in weights]
    x = x.to(data[0].dtype).contiguous()
    outs = tuple(torch.empty(x.shape[0], w.rows, device=x.device) for w in weights)
    missing = MAX_GROUP - len(weights)
    rows = [w.rows for w in weights] + [0] * missing
    overlap = can_overlap(x.device)
    pointers = (*data, *[data[0]] * missing, *(outs[0] if b is None else b for b in biases))
    pointers += (*[outs[0]] * missing, *outs, *[outs[0]] * missing)
    has = [b is not None for b in biases] + [False] * missing
    linear_kernel[(sum(triton.cdiv(n, _ROWS) for n in rows),)](
        x, *pointers, outs[0] if residual is None else residual.contiguous(), x.shape[0],
        x.shape[1], *rows, *(d.stride(0) for d in data), *[0] * missing,
        HAS_B0=has[0], HAS_B1=has[1], HAS_B2=has[2], HAS_RESIDUAL=residual is not None,
        TOKENS=_tokens(x), ROWS=_ROWS, TILE=_TILE_K, PDL=overlap, num_warps=_WARPS,
        num_stages=_STAGES, launch_pdl=overlap,
    )  # fmt: skip
    return outs


def gated_few(
    x: torch.Tensor,
    gate: PackedTensor,
    up: PackedTensor,
    act: Activation,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """act(x gate^T, x up^T) in one kernel.

    x: [T, K], T at most 16, rounded to the weights' type if it is float32. Returns [T, I] of
    ``dtype``.
    """
    g, u = gate.parts["data"], up.parts["data"]
    x = x.to(g.dtype).contiguous()
    out = torch.empty(x.shape[0], gate.rows, device=x.device, dtype=dtype)
    overlap = can_overlap(x.device)
    gated_kernel[(triton.cdiv(gate.rows, _ROWS),)](
        x, g, u, out, x.shape[0], x.shape[1], gate.rows, g.stride(0), u.stride(0),
        act.alpha, act.limit, CLAMPED=act.kind == "swiglu_clamped",
        TOKENS=_tokens(x), ROWS=_ROWS, TILE=_GATED_TILE_K, PDL=overlap, num_warps=_WARPS,
        num_stages=_STAGES, launch_pdl=overlap,
    )  # fmt: skip
    return out


def _tokens(x: torch.Tensor) -> int:
    return MAX_ROWS // 2 if x.shape[0] <= MAX_ROWS // 2 else MAX_ROWS
