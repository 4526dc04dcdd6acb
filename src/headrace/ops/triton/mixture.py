"""Experts that are all in GPU memory as plain floats: the simple case, of any batch.

Few rows: one kernel for gate and up and one for down, a program for some rows of one (token, expert)
pair's matrix, then a sum over each token's experts in their order. Many rows: an expert's tokens
together, by cuBLAS; this waits for the GPU once, to learn which experts there are.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.reference import mixture as reference
from headrace.ops.reference.dense import activate
from headrace.ops.triton.few_rows import MAX_ROWS, activated
from headrace.ops.triton.products import gated_linear, linear

_FLOATS = ("f32", "f16", "bf16")
_ROWS, _TILE = 16, 256  # of a matrix, that a program multiplies at a time


@triton.jit
def pair_product(x, weight, stride, row, num_rows, cols, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Rows of a matrix times one vector in the matrix's type: float32 [ROWS]."""
    base = weight + row.to(tl.int64)[:, None] * stride
    acc = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, cols, TILE):
        k = start + tl.arange(0, TILE)
        inside = (row < num_rows)[:, None] & (k < cols)[None, :]
        w = tl.load(base + k[None, :], mask=inside, other=0.0)
        value = tl.load(x + k, mask=k < cols, other=0.0).to(w.dtype).to(tl.float32)
        acc += w.to(tl.float32) * value[None, :]
    return tl.sum(acc, 1)


@triton.jit
def pair_gated_kernel(
    x, ids, gate, up, gate_bias, up_bias, inner, k, cols, num_rows, num_experts,
    gate_expert, gate_row, up_expert, up_row, alpha, limit,
    HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    source = x + (pair // k).to(tl.int64) * cols
    g = pair_product(source, gate + expert * gate_expert, gate_row, row, num_rows, cols, ROWS, TILE)
    u = pair_product(source, up + expert * up_expert, up_row, row, num_rows, cols, ROWS, TILE)
    if HAS_BIAS:
        g += tl.load(gate_bias + expert * num_rows + row, mask=row < num_rows, other=0.0)
        u += tl.load(up_bias + expert * num_rows + row, mask=row < num_rows, other=0.0)
    tl.store(
        inner + pair.to(tl.int64) * num_rows + row, activated(g, u, alpha, limit, CLAMPED),
        mask=row < num_rows,
    )  # fmt: skip


@triton.jit
def pair_down_kernel(
    inner, ids, weights, down, down_bias, out, k, cols, num_rows, num_experts,
    down_expert, down_row,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS,), tl.float32)
    for j in range(0, k):
        pair = token * k + j
        expert = tl.load(ids + pair).to(tl.int64)
        if (expert >= 0) & (expert < num_experts):
            y = pair_product(
                inner + pair * cols, down + expert * down_expert, down_row, row, num_rows, cols,
                ROWS, TILE,
            )  # fmt: skip
            if HAS_BIAS:
                y += tl.load(down_bias + expert * num_rows + row, mask=row < num_rows, other=0.0)
            acc += y * tl.load(weights + pair)
        elif expert != -1:
            acc += float("nan")  # nobody can be told here; the sampler refuses such a row
    tl.store(out + token * num_rows + row, acc, mask=row < num_rows)


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    act: Activation,
) -> torch.Tensor:
    """The weighted sum of each row's experts; see the reference.

    An id that is no expert's raises where there are many rows; of few rows it makes its row NaN,
    since telling the host would mean to wait for the GPU.
    """
    stacks = [_stack(m) for m in (experts.gate, experts.up, experts.down)]
    if any(s is None for s in stacks):
        return reference.moe(x, ids, weights, experts, act)
    if x.shape[0] > MAX_ROWS:
        return _grouped(x, ids, weights, experts, act)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    tokens, k = ids.shape
    (gate, up, down) = (s for s in stacks if s is not None)
    rows, hidden, count = experts.gate[0].rows, x.shape[1], len(experts.gate)
    inner = torch.empty(tokens * k, rows, device=x.device)
    has_bias = experts.gate_bias is not None
    pair_gated_kernel[(tokens * k, triton.cdiv(rows, _ROWS))](
        x, ids, gate[0], up[0], experts.gate_bias if has_bias else x,
        experts.up_bias if has_bias else x, inner, k, hidden, rows, count,
        gate[1], gate[0].stride(0), up[1], up[0].stride(0), act.alpha, act.limit,
        HAS_BIAS=has_bias, CLAMPED=act.kind == "swiglu_clamped", ROWS=_ROWS, TILE=_TILE,
        num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(x)
    pair_down_kernel[(tokens, triton.cdiv(hidden, _ROWS))](
        inner, ids, weights, down[0], experts.down_bias if experts.down_bias is not None else x, out,
        k, rows, hidden, count, down[1], down[0].stride(0),
        HAS_BIAS=experts.down_bias is not None, ROWS=_ROWS, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return out


def _stack(matrices: Sequence[PackedTensor]) -> tuple[torch.Tensor, int] | None:
    """The first matrix and the elements from one to the next, if they lie at equal distances."""
    if any(m.format not in _FLOATS or m.format != matrices[0].format for m in matrices):
        return None
    data = [m.parts["data"] for m in matrices]
    size = data[0].element_size()
    step = (data[1].data_ptr() - data[0].data_ptr()) // size if len(data) > 1 else 0
    for i, tensor in enumerate(data):
        if tensor.data_ptr() != data[0].data_ptr() + i * step * size:
            return None
        if tensor.stride() != data[0].stride():
            return None
    return data[0], step


def _grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    act: Activation,
) -> torch.Tensor:
    """Expert by expert, its tokens together."""
    out = torch.zeros_like(x)
    for expert in sorted(reference.checked_ids(ids, len(experts.gate)) - {-1}):
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        some = x[row]
        if experts.gate_bias is None or experts.up_bias is None:
            inner = gated_linear(some, experts.gate[expert], experts.up[expert], act)
        else:
            gate = linear(some, experts.gate[expert], experts.gate_bias[expert])
            inner = activate(gate, linear(some, experts.up[expert], experts.up_bias[expert]), act)
        bias = None if experts.down_bias is None else experts.down_bias[expert]
        y = linear(inner, experts.down[expert], bias)
        out.index_add_(0, row, y * weights[row, place, None])
    return out
