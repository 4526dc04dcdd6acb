"""Operations on rows of activations: RMSNorm, RoPE, routing."""

from __future__ import annotations

import torch

from headrace.core.errors import InternalError
from headrace.ops.cpu import _native
from headrace.ops.cpu.arguments import address, checked, in_range, rows_of
from headrace.ops.records import RopeTable

SCORINGS = ("softmax_topk", "topk_softmax")


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, along the last dimension: float32 [..., D] -> same."""
    size = weight.numel()
    x = rows_of(x, size, "x")
    out = torch.empty_like(x)
    where = address(weight, size, "weight")
    _native.rmsnorm(x.data_ptr(), where, x.numel() // size, size, eps, out.data_ptr())
    return out


def rope(x: torch.Tensor, table: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * table.cos.shape[1] dimensions of each head, in place; returns ``x``.

    x: float32 [T, H, head_dim], heads contiguous (tokens may be strided); positions: int64 [T]
    """
    tokens, heads, head = x.shape
    cos, sin = table.cos, table.sin
    rows, half = cos.shape
    strides = x.stride()
    if x.dtype is not torch.float32 or strides[1:] != (head, 1) or 2 * half > head:
        raise InternalError(
            f"rope: found {x.dtype} {list(x.shape)} with strides {list(strides)} and a table of "
            f"{2 * half} dimensions, expected float32 with contiguous heads"
        )
    positions = checked(positions, torch.int64, (tokens,), "positions")
    bad = _native.rope(
        x.data_ptr(),
        strides[0],
        tokens,
        heads,
        head,
        address(cos, rows * half, "cos"),
        address(sin, rows * half, "sin"),
        rows,
        half,
        table.interleaved,
        positions.data_ptr(),
    )
    in_range(bad, positions, f"0 to {rows - 1}", "positions")
    return x


def router_topk(
    logits: torch.Tensor, k: int, scoring: str, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each row and their weights; ties go to the smaller id.

    logits: float32 [T, E] -> (ids int32 [T, k], weights float32 [T, k]). ``scoring``: see
    ``core.model_spec.MoeSpec``. A row with NaN gets ids 0 to k - 1 with weights 0.
    """
    if scoring not in SCORINGS:
        raise InternalError(f"scoring {scoring!r}: expected one of {', '.join(SCORINGS)}")
    tokens, experts = logits.shape
    if not 1 <= k <= experts:
        raise InternalError(f"router_topk: k is {k}, expected 1 to {experts}")
    logits = rows_of(logits, experts, "logits")
    ids = torch.empty((tokens, k), dtype=torch.int32)
    weights = torch.empty((tokens, k), dtype=torch.float32)
    _native.router_topk(
        logits.data_ptr(),
        tokens,
        experts,
        k,
        scoring == "softmax_topk",
        normalize,
        ids.data_ptr(),
        weights.data_ptr(),
    )
    return ids, weights
