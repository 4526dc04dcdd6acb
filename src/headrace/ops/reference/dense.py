"""Embedding, normalisation and matrix products, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.errors import InternalError
from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation
from headrace.ops.reference.packed import gather_rows, row_chunks


def embed(weight: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """Look up token vectors.

    weight: [V, D]; ids: int64 [T]. Returns float32 [T, D].
    """
    return gather_rows(weight, ids)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    x: float32 [T, D]; weight: float32 [D]. Returns float32 [T, D].
    """
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(
    x: torch.Tensor,
    weight: PackedTensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T (+ bias) (+ residual).

    x: float32 [T, K]; weight: [N, K]; bias: float32 [N]; residual: float32 [T, N].
    Returns float32 [T, N].
    """
    out = torch.empty(x.shape[0], weight.rows, device=x.device)
    for start, stop, rows in row_chunks(weight):
        torch.mm(x, rows.T, out=out[:, start:stop])
    if bias is not None:
        out += bias
    if residual is not None:
        out += residual
    return out


def linear_group(
    x: torch.Tensor, weights: Sequence[PackedTensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Several ``linear`` of the same input.

    x: float32 [T, K]; weights: [Ni, K]; biases: float32 [Ni] or None. Returns float32 [T, Ni] each.
    """
    return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def activate(gate: torch.Tensor, up: torch.Tensor, act: Activation) -> torch.Tensor:
    """The gated activation of ``ops.records.Activation``, element by element."""
    if act.kind == "silu":
        return torch.nn.functional.silu(gate) * up
    if act.kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if act.kind == "swiglu_clamped":
        g = gate.clamp(max=act.limit)
        u = up.clamp(min=-act.limit, max=act.limit)
        return g * torch.sigmoid(act.alpha * g) * (u + 1)
    raise InternalError(f"activation {act.kind!r} is unknown")


def gated_linear(
    x: torch.Tensor, gate: PackedTensor, up: PackedTensor, act: Activation
) -> torch.Tensor:
    """act(x gate^T, x up^T).

    x: float32 [T, K]; gate, up: [I, K]. Returns float32 [T, I].
    """
    return activate(linear(x, gate), linear(x, up), act)
