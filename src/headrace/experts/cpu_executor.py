"""All experts on the CPU, from slabs: what a layer's mixture calls where there is no GPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.errors import InternalError
from headrace.experts.items import items_of
from headrace.ops.expert_records import CpuExperts, SliceLayout
from headrace.ops.records import Activation


class CpuExecutor:
    """``layers.moe.MixtureExecutor`` over the slabs of every mixture.

    Args:
        kernels: ``ops.registry.cpu_experts()``.
        layouts: of each mixture.
        slabs: of each mixture, uint8 [experts, num_slices, slice_nbytes] on the host.
    """

    def __init__(
        self,
        kernels: CpuExperts,
        layouts: Sequence[SliceLayout],
        slabs: Sequence[torch.Tensor],
        act: Activation,
    ) -> None:
        for layout, one in zip(layouts, slabs, strict=True):
            expected = (layout.num_slices, layout.slice_nbytes)
            if one.dtype is not torch.uint8 or one.shape[1:] != expected or not one.is_contiguous():
                raise InternalError(
                    f"slabs of a mixture: found {one.dtype} {list(one.shape)}, expected contiguous "
                    f"uint8 [experts, {expected[0]}, {expected[1]}]"
                )
        self._kernels = kernels
        self._layouts = tuple(layouts)
        self._slabs = tuple(slabs)
        self._act = act

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x: float32 [T, D]; ids: int32 [T, k]; weights: float32 [T, k] -> float32 [T, D]."""
        layout = self._layouts[layer]
        work = items_of(ids, weights, layout.num_slices)
        return self._kernels.run_now(
            layout,
            self._slabs[layer].data_ptr(),
            len(self._slabs[layer]),
            self._act,
            x,
            work.items,
            work.pair_token,
            work.pair_weight,
        )
