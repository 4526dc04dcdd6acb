"""The choice of experts."""

from __future__ import annotations

import torch

from headrace.core.model_spec import MoeSpec
from headrace.formats.base import PackedTensor
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm
from headrace.ops.expert_records import RouterView
from headrace.ops.registry import OpSet

_ROUTE_ROWS = 16  # of a decoding step


class Router:
    """Scores every expert and keeps the k best."""

    __slots__ = ("_done", "_k", "_linear", "_normalize", "_ops", "_scoring")

    def __init__(self, ops: OpSet, linear: Linear, spec: MoeSpec) -> None:
        self._ops = ops
        self._linear = linear
        self._k = spec.num_experts_per_token
        self._scoring = spec.scoring
        self._normalize = spec.normalize
        self._done: torch.Tensor | None = None  # counters of ``ops.route``
        if ops.has("route"):
            device = next(iter(linear.weight.parts.values())).device
            self._done = torch.zeros(_ROUTE_ROWS, dtype=torch.int32, device=device)

    @property
    def weight(self) -> PackedTensor:
        """[E, D] as stored."""
        return self._linear.weight

    def view(self, norm: Norm) -> RouterView:
        """What guesses this router's choice, ``norm`` being the one before it."""
        linear = self._linear
        return RouterView(linear.weight, linear.bias, norm.weight, norm.eps, self._k)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: float32 [T, D] -> ids int32 [T, k], weights float32 [T, k]."""
        if self._done is not None:
            weight, bias = self._linear.weight, self._linear.bias
            how = (self._k, self._scoring, self._normalize)
            return self._ops.route(x, weight, bias, *how, self._done)
        return self._ops.router_topk(self._linear(x), self._k, self._scoring, self._normalize)
