"""All experts on the CPU, from slabs: what a layer's mixture calls where there is no GPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.experts.items import items_of
from headrace.ops.expert_records import CpuExperts, SliceLayout
from headrace.ops.records import Activation


class CpuExecutor:
    """``layers.moe.MixtureExecutor`` over the slabs of every mixture.

    Args:
        kernels: ``ops.registry.cpu_experts()``.
        bases: address of the first slab of each mixture; the caller keeps the memory.
    """

    def __init__(
        self,
        kernels: CpuExperts,
        layout: SliceLayout,
        bases: Sequence[int],
        num_experts: int,
        act: Activation,
    ) -> None:
        self._kernels = kernels
        self._layout = layout
        self._bases = tuple(bases)
        self._num_experts = num_experts
        self._act = act

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x: float32 [T, D]; ids: int32 [T, k]; weights: float32 [T, k] -> float32 [T, D]."""
        work = items_of(ids, weights, self._layout.num_slices)
        return self._kernels.run_now(
            self._layout,
            self._bases[layer],
            self._num_experts,
            self._act,
            x,
            work.items,
            work.pair_token,
            work.pair_weight,
        )
