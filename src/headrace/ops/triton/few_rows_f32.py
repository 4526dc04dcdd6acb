"""Products of few rows with float32 weights: the routers of a mixture, and models kept in float32.

Sums along K run in one order whatever the number of rows, which cuBLAS does not promise: it takes other
kernels for other sizes, and a routed expert would then depend on who shares the step.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.formats.base import PackedTensor
from headrace.ops.triton.control import interpreted

# Rows of x that a program takes. Always as many: with another number the compiler may add in another order.
_TOKENS = 4
# A router's matrix is small (128 x 2,880): a program for each row of it, so that the whole GPU reads it at
# once, and few trips around the loop, as nothing else hides their latency. A large matrix has programs
# enough, and shares each read of x between four of its rows. (rows, columns at once) of a program
# H200, 2026-11-30, in a graph, bias included, one / four / sixteen rows of x: 128 x 2,880 takes 3.0 / 3.4 /
# 5.7 us (cuBLAS and an addition 5.9 / 11.2 / 11.8), 5,120 x 2,880 takes 24 / 25 / 72 (21 / 27 / 51).
_SMALL_ROWS, _SMALL, _LARGE = 1024, (1, 1024), (4, 256)
_INTERPRETED = (
    64,
    128,
)  # the interpreter's time goes with the number of operations, not with their size
_WARPS = 4


@triton.jit(do_not_specialize=["num_tokens"])
def linear_f32_kernel(
    x, weight, bias, residual, out, num_tokens, cols, num_rows, stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    # Programs that read the same weights come one after the other.
    groups = tl.cdiv(num_tokens, TOKENS)
    token = tl.program_id(0) % groups * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    here, real = (token < num_tokens)[:, None], (row < num_rows)[:, None]
    own = x + token[:, None] * cols
    weights = weight + row.to(tl.int64)[:, None] * stride
    acc = tl.zeros((TOKENS, ROWS, TILE), tl.float32)
    for start in range(0, cols, TILE):
        k = (start + tl.arange(0, TILE))[None, :]
        w = tl.load(weights + k, mask=real & (k < cols), other=0.0)
        v = tl.load(own + k, mask=here & (k < cols), other=0.0)
        acc += v[:, None, :] * w[None, :, :]
    total = tl.sum(acc, 2)
    at = token[:, None] * num_rows + row[None, :]
    stored = here & (row < num_rows)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < num_rows, other=0.0)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=stored, other=0.0)
    tl.store(out + at, total, mask=stored)


def linear_few_f32(
    x: torch.Tensor,
    weight: PackedTensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T (+ bias) (+ residual), one launch.

    x: float32 [T, K], T at most 16; weight: float32 [N, K]; residual: float32 [T, N]. Returns float32
    [T, N].
    """
    data = weight.parts["data"]
    x = x.contiguous()
    tokens, num_rows = x.shape[0], weight.rows
    out = torch.empty(tokens, num_rows, device=x.device)
    rows, tile = _SMALL if num_rows <= _SMALL_ROWS else _LARGE
    if interpreted():
        rows, tile = _INTERPRETED
    linear_f32_kernel[(triton.cdiv(tokens, _TOKENS) * triton.cdiv(num_rows, rows),)](
        x, data, out if bias is None else bias, out if residual is None else residual.contiguous(),
        out, tokens, x.shape[1], num_rows, data.stride(0),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, TOKENS=_TOKENS, ROWS=rows,
        TILE=tile, num_warps=_WARPS,
    )  # fmt: skip
    return out
