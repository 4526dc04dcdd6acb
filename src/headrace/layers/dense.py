"""The dense gated feed-forward."""

from __future__ import annotations

import torch

from headrace.formats.base import PackedTensor
from headrace.layers.norm import Norm
from headrace.ops.records import Activation, DenseBlock
from headrace.ops.registry import OpSet


class DenseFeedForward:
    """down(act(gate(x), up(x))) + residual; gate, up [I, D], down [D, I] as stored.

    ``post_norm`` normalises what ``down`` gives, before the residual is added.
    """

    __slots__ = ("_act", "_down", "_gate", "_ops", "_post_norm", "_up")

    def __init__(
        self,
        ops: OpSet,
        gate: PackedTensor,
        up: PackedTensor,
        down: PackedTensor,
        act: Activation,
        post_norm: Norm | None = None,
    ) -> None:
        self._ops = ops
        self._post_norm = post_norm
        self._gate, self._up, self._down, self._act = gate, up, down, act

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x (normalised) and residual: float32 [T, D] -> float32 [T, D]."""
        inner = self._ops.gated_linear(x, self._gate, self._up, self._act)
        if self._post_norm is not None:
            return self._post_norm(self._ops.linear(inner, self._down)).add_(residual)
        return self._ops.linear(inner, self._down, None, residual)

    @property
    def is_block(self) -> bool:
        """Whether ``block`` tells everything: ``ops.dense_block`` has no second norm."""
        return self._post_norm is None

    @property
    def weights(self) -> tuple[PackedTensor, PackedTensor, PackedTensor]:
        """gate, up, down as stored."""
        return self._gate, self._up, self._down

    def block(self, norm: Norm) -> DenseBlock:
        """This layer behind ``norm`` as one operation, for ``ops.dense_block``."""
        return DenseBlock(norm.weight, norm.eps, self._gate, self._up, self._down, self._act)
