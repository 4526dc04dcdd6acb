"""The choice of experts."""

from __future__ import annotations

import torch

from headrace.core.model_spec import MoeSpec
from headrace.layers.linear import Linear
from headrace.ops.registry import OpSet


class Router:
    """Scores every expert and keeps the k best."""

    __slots__ = ("_k", "_linear", "_normalize", "_scoring", "_topk")

    def __init__(self, ops: OpSet, linear: Linear, spec: MoeSpec) -> None:
        self._topk = ops.router_topk
        self._linear = linear
        self._k = spec.num_experts_per_token
        self._scoring = spec.scoring
        self._normalize = spec.normalize

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: float32 [T, D] -> ids int32 [T, k], weights float32 [T, k]."""
        return self._topk(self._linear(x), self._k, self._scoring, self._normalize)
