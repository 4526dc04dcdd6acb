"""A matrix with its bias."""

from __future__ import annotations

import torch

from headrace.formats.base import PackedTensor
from headrace.ops.registry import OpSet


class Linear:
    """x W^T + bias; weight [N, K] as stored, bias float32 [N] or None."""

    __slots__ = ("_ops", "bias", "weight")

    def __init__(self, ops: OpSet, weight: PackedTensor, bias: torch.Tensor | None = None) -> None:
        self._ops = ops
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: float32 [T, K], residual: float32 [T, N] -> float32 [T, N]."""
        return self._ops.linear(x, self.weight, self.bias, residual)
