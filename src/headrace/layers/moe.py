"""The mixture of experts: routing, experts, residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from headrace.formats.base import PackedTensor
from headrace.layers.norm import Norm
from headrace.layers.router import Router
from headrace.ops.expert_records import RouterView, Rows
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.registry import OpSet

RoutingObserver = Callable[[int, torch.Tensor], None]


class MixtureExecutor(Protocol):
    """Computes the chosen experts of every mixture of a model, wherever their weights are.

    ``layer`` counts the mixtures, from 0: in a model whose first layer is dense, the second layer's
    mixture is number 0. x: float32 [T, D]; ids: int32 [T, k], -1 contributes nothing; weights:
    float32 [T, k]. Returns float32 [T, D], which the caller may change.
    """

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, /
    ) -> torch.Tensor: ...


@runtime_checkable
class LongChunks(Protocol):
    """An executor that needs little memory for a long chunk."""

    def add_to(
        self, layer: int, x: Rows, ids: torch.Tensor,
        weights: torch.Tensor, out: torch.Tensor, /,
    ) -> None:  # fmt: skip
        """Add the mixture's sum to ``out``, float32 [T, D]. x: makes rows of its input, float32 [n, D],
        from rows of ``out`` as they are before."""
        ...


@runtime_checkable
class Foresight(Protocol):
    """An executor that can use a layer's attention to bring experts, of a decoding step."""

    def foresee(
        self, layer: int, x: torch.Tensor, router: RouterView, valid: torch.Tensor | None, /
    ) -> None:
        """x: float32 [T, D], the layer's input; valid: bool [T], rows that count; None: all. The
        mixture's call must follow."""
        ...

    def normed(self, layer: int, x: torch.Tensor, /) -> None:
        """x as the mixture's call will have it, float32 [T, D] of any length, before its router is asked;
        that call must follow."""
        ...

    def attended(self, layer: int, x: torch.Tensor, valid: torch.Tensor | None, /) -> None:
        """Just before the mixture's call, of any length: x is the state after the layer's attention,
        before its norm."""
        ...


@runtime_checkable
class AddsResidual(Protocol):
    """An executor that adds the layer's residual, float32 [T, D], to its sum for nothing; ``__call__`` in all
    else."""

    def with_residual(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor,
        /,
    ) -> torch.Tensor: ...


class InMemoryExperts:
    """All experts where the rest of the model is: one ``ops.moe`` call for each mixture."""

    __slots__ = ("_act", "_experts", "_ops")

    def __init__(self, ops: OpSet, experts: Sequence[ExpertWeights], act: Activation) -> None:
        self._ops = ops
        self._experts = tuple(experts)
        self._act = act

    @property
    def weights(self) -> tuple[ExpertWeights, ...]:
        """Every mixture's experts, in order."""
        return self._experts

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``MixtureExecutor``."""
        return self._ops.moe(x, ids, weights, self._experts[layer], self._act)


class Mixture:
    """sum of weight * expert(x) over the chosen experts, + residual.

    Args:
        layer: number of the layer in the model, what ``on_routing`` is told.
        index: number of the mixture among the mixtures, what ``experts`` is told.
    """

    __slots__ = (
        "_experts",
        "_foresight",
        "_index",
        "_layer",
        "_long",
        "_router",
        "on_computed",
        "on_routing",
    )

    def __init__(self, layer: int, index: int, router: Router, experts: MixtureExecutor) -> None:
        self._layer = layer
        self._index = index
        self._router = router
        self._experts = experts
        self._foresight = experts if isinstance(experts, Foresight) else None
        self._long = experts if isinstance(experts, LongChunks) else None
        self.on_routing: RoutingObserver | None = None
        self.on_computed: Callable[[], None] | None = None  # once all of it is launched

    def foresight(self, norm: Norm) -> Callable[[torch.Tensor, torch.Tensor | None], None] | None:
        """What to tell a decoding step's layer input, and which rows count, before attention; None
        where nobody wants to know. ``norm``: the one before this mixture."""
        executor, index = self._foresight, self._index
        if executor is None:
            return None
        router = self._router.view(norm)
        return lambda x, valid: executor.foresee(index, x, router, valid)

    @property
    def router_weight(self) -> PackedTensor:
        """[E, D] as stored."""
        return self._router.weight

    @property
    def experts(self) -> ExpertWeights | None:
        """This mixture's experts where they are in memory; None where an executor keeps them."""
        if isinstance(self._experts, InMemoryExperts):
            return self._experts.weights[self._index]
        return None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x (normalised) and residual: float32 [T, D] -> float32 [T, D].

        valid: bool [T], False for rows that no expert is to be computed for; None: all of them.
        """
        if self._foresight is not None:
            self._foresight.normed(self._index, x)
        ids, weights = self._router(x)
        if valid is not None:
            ids = ids.masked_fill(~valid.unsqueeze(1), -1)
        if self.on_routing is not None:
            self.on_routing(self._layer, ids)
        if self._foresight is not None:
            self._foresight.attended(self._index, residual, valid)
        if isinstance(self._experts, AddsResidual):
            out = self._experts.with_residual(self._index, x, ids, weights, residual)
        else:
            out = self._experts(self._index, x, ids, weights).add_(residual)
        if self.on_computed is not None:
            self.on_computed()
        return out

    def add_to(self, residual: torch.Tensor, norm: Norm, pieces: Sequence[slice]) -> None:
        """``residual += mixture(norm(residual))`` of a long chunk, float32 [T, D].

        pieces: rows whose normalised form may exist at a time.
        """
        routed = [self._router(norm(residual[rows])) for rows in pieces]
        ids, weights = (torch.cat(one) for one in zip(*routed))
        if self.on_routing is not None:
            self.on_routing(self._layer, ids)
        if self._long is not None:
            self._long.add_to(
                self._index, lambda rows: norm(residual[rows]), ids, weights, residual
            )
        else:
            for rows in pieces:
                x = norm(residual[rows])
                residual[rows] += self._experts(self._index, x, ids[rows], weights[rows])
        if self.on_computed is not None:
            self.on_computed()
