"""Products of few rows (a decoding step): bound by reading the weights, so one kernel reads them once.

Weight rows are the M of the tensor cores' product and the activations its N, padded to 16: row i of
the result is the same bits alone and among sixteen, since sums along K run in one order.
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

MAX_ROWS = 16  # the N that the activations are padded to
MAX_GROUP = 3  # q, k and v

# A tile is what one program multiplies at a time. 16 rows give the 2,880 rows of a gpt-oss output
# projection 180 programs for 132 multiprocessors; three of them fit on one, with three stages of 16 x 128
# x 2 bytes in flight each, which hides the latency of memory (4.8 TB/s x 0.7 us / 132 = 25 KB a
# multiprocessor). Many rows get larger tiles, which read the activations less often.
_TILE_K = 128
_SMALL_ROWS, _LARGE_ROWS = 16, 32
_MANY_ROWS = 16384


@triton.jit
def weight_tile_product(
    x, weight, stride, row, first_row, num_rows, num_tokens, cols,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """weight[first_row : first_row + ROWS] x^T: float32 [ROWS, TOKENS]."""
    token = tl.arange(0, TOKENS)
    inside = (first_row + row < num_rows)[:, None]
    base = weight + (first_row + row).to(tl.int64)[:, None] * stride
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, cols, TILE):
        k = start + tl.arange(0, TILE)
        w = tl.load(base + k[None, :], mask=inside & (k < cols)[None, :], other=0.0)
        within = (k < cols)[:, None] & (token < num_tokens)[None, :]
        value = tl.load(x + token[None, :] * cols + k[:, None], mask=within, other=0.0)
        acc = tl.dot(w, value.to(w.dtype), acc)
    return acc


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
    TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Up to three matrices with the same input; programs are dealt out to one after the other."""
    pid = tl.program_id(0)
    tiles0, tiles1 = tl.cdiv(rows0, ROWS), tl.cdiv(rows1, ROWS)
    row = tl.arange(0, ROWS)
    if pid < tiles0:
        first = pid * ROWS
        acc = weight_tile_product(
            x, w0, stride0, row, first, rows0, num_tokens, cols, TOKENS, ROWS, TILE
        )
        store_rows(
            acc, o0, b0, residual, first + row, rows0, num_tokens, HAS_B0, HAS_RESIDUAL, TOKENS
        )
    elif pid < tiles0 + tiles1:
        first = (pid - tiles0) * ROWS
        acc = weight_tile_product(
            x, w1, stride1, row, first, rows1, num_tokens, cols, TOKENS, ROWS, TILE
        )
        store_rows(acc, o1, b1, residual, first + row, rows1, num_tokens, HAS_B1, False, TOKENS)
    else:
        first = (pid - tiles0 - tiles1) * ROWS
        acc = weight_tile_product(
            x, w2, stride2, row, first, rows2, num_tokens, cols, TOKENS, ROWS, TILE
        )
        store_rows(acc, o2, b2, residual, first + row, rows2, num_tokens, HAS_B2, False, TOKENS)


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
):  # fmt: skip
    first, row = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    g = weight_tile_product(
        x, gate, gate_stride, row, first, num_rows, num_tokens, cols, TOKENS, ROWS, TILE
    )
    u = weight_tile_product(
        x, up, up_stride, row, first, num_rows, num_tokens, cols, TOKENS, ROWS, TILE
    )
    store_rows(
        activated(g, u, alpha, limit, CLAMPED), out, out, out, first + row, num_rows, num_tokens,
        False, False, TOKENS,
    )  # fmt: skip


def _tile_rows(total: int) -> int:
    return _LARGE_ROWS if total >= _MANY_ROWS else _SMALL_ROWS


def linear_few(
    x: torch.Tensor,
    weights: Sequence[PackedTensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Up to three products of one input x: float32 [T, K], T at most 16; 16-bit weights [Ni, K].

    residual: float32 [T, N0], added to the first. Returns float32 [T, Ni] each.
    """
    x = x.contiguous()
    outs = tuple(torch.empty(x.shape[0], w.rows, device=x.device) for w in weights)
    missing = MAX_GROUP - len(weights)
    data = [w.parts["data"] for w in weights]
    rows = [w.rows for w in weights] + [0] * missing
    tile = _tile_rows(sum(rows))
    pointers = (*data, *[data[0]] * missing, *(x if b is None else b for b in biases))
    pointers += (*[x] * missing, *outs, *[outs[0]] * missing)
    has = [b is not None for b in biases] + [False] * missing
    linear_kernel[(sum(triton.cdiv(n, tile) for n in rows),)](
        x, *pointers, x if residual is None else residual.contiguous(), x.shape[0], x.shape[1],
        *rows, *(d.stride(0) for d in data), *[0] * missing,
        HAS_B0=has[0], HAS_B1=has[1], HAS_B2=has[2], HAS_RESIDUAL=residual is not None,
        TOKENS=MAX_ROWS, ROWS=tile, TILE=_TILE_K, num_warps=4, num_stages=4,
    )  # fmt: skip
    return outs


def gated_few(
    x: torch.Tensor, gate: PackedTensor, up: PackedTensor, act: Activation
) -> torch.Tensor:
    """act(x gate^T, x up^T) in one kernel; x: float32 [T, K], T at most 16. Returns [T, I]."""
    x = x.contiguous()
    rows = gate.rows
    out = torch.empty(x.shape[0], rows, device=x.device)
    g, u = gate.parts["data"], up.parts["data"]
    tile = _tile_rows(rows)
    gated_kernel[(triton.cdiv(rows, tile),)](
        x, g, u, out, x.shape[0], x.shape[1], rows, g.stride(0), u.stride(0), act.alpha, act.limit,
        CLAMPED=act.kind == "swiglu_clamped", TOKENS=MAX_ROWS, ROWS=tile, TILE=_TILE_K,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
