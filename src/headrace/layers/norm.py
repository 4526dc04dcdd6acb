"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from headrace.ops.registry import OpSet


class Norm:
    """x / rms(x) * weight; weight float32 [D]."""

    __slots__ = ("_ops", "eps", "weight", "width")

    def __init__(self, ops: OpSet, weight: torch.Tensor, eps: float) -> None:
        self._ops = ops
        self.weight = weight
        self.eps = eps
        self.width = weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [T, D] -> float32 [T, D]."""
        return self._ops.rmsnorm(x, self.weight, self.eps)
