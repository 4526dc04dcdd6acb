"""The mixture of experts: routing, experts, residual."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.layers.router import Router
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.registry import OpSet

RoutingObserver = Callable[[int, torch.Tensor], None]


class Mixture:
    """sum of weight * expert(x) over the chosen experts, + residual."""

    __slots__ = ("_act", "_experts", "_layer", "_moe", "_router", "on_routing")

    def __init__(
        self, ops: OpSet, layer: int, router: Router, experts: ExpertWeights, act: Activation
    ) -> None:
        self._moe = ops.moe
        self._layer = layer
        self._router = router
        self._experts = experts
        self._act = act
        self.on_routing: RoutingObserver | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x (normalised) and residual: float32 [T, D] -> float32 [T, D]."""
        ids, weights = self._router(x)
        if self.on_routing is not None:
            self.on_routing(self._layer, ids)
        return self._moe(x, ids, weights, self._experts, self._act).add_(residual)
