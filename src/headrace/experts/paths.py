"""What a layer's experts go through in a decoding step.

``HybridExecutor`` calls these steps in this order; on a GPU they are kernels on streams
(``gpu_paths``), elsewhere done when the call returns (``host_paths``). Both decide by the same rules
(``plan_oracle``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.ops.expert_records import RouterView


@dataclass(frozen=True)
class ExpertCounts:
    """Slices of decoding steps by path since the start, and what became of the fetched ones.

    layers: plans made, one for each layer and step
    fetch_s: seconds in which PCIe was busy with ``fetched``
    cpu_nbytes, compute_s: what the CPU has read and how long it was busy, prompts' part included
    cpu_requests, cpu_square_nbytes, cpu_nbytes_s: see ``ops.expert_records.ServiceStats``; 0 without one
    prefetched_nbytes, prefetch_s: what was sent before a plan, and PCIe's seconds for it; rounded up to
        chunks
    ahead_nbytes: those of ``fetched`` that had arrived so
    stalls, stall_s: layers for which everything else was done before the CPU was, and those waits
    """

    hits: int = 0
    fetched: int = 0
    computed: int = 0
    admitted: int = 0
    layers: int = 0
    fetch_s: float = 0.0
    cpu_nbytes: int = 0
    compute_s: float = 0.0
    stalls: int = 0
    stall_s: float = 0.0
    prefetched_nbytes: int = 0
    ahead_nbytes: int = 0
    prefetch_s: float = 0.0
    cpu_requests: int = 0
    cpu_square_nbytes: float = 0.0
    cpu_nbytes_s: float = 0.0

    @property
    def looked_up(self) -> int:
        return self.hits + self.fetched + self.computed

    @property
    def hit_rate(self) -> float:
        """Share of looked-up slices that lay in a slot."""
        return self.hits / self.looked_up if self.looked_up else 0.0


@dataclass(frozen=True)
class CacheView:
    """The cache between steps, copied to the host.

    values: float32 [layers * experts], what the policy gives each expert; slot_of: int32, of every key;
    owner_of: int32, of every slot; -1: none
    """

    values: npt.NDArray[np.float32]
    slot_of: npt.NDArray[np.int32]
    owner_of: npt.NDArray[np.int32]


class ExpertPaths(Protocol):
    """The steps of a layer: guess and prefetch, or not; prepare; plan; then gather beside hits, fetched,
    await_cpu; combine."""

    def begin_step(self) -> None:
        """Advance the clock and rank the slots; once a step, before its first layer."""
        ...

    def can_foresee(self, router: RouterView) -> bool:
        """Whether a layer's routing can be guessed with this router."""
        ...

    def guess(self, x: torch.Tensor, router: RouterView) -> torch.Tensor:
        """The router's logits of x, float32 [T, D], before its norm: float32 [T, E], valid until the next
        guess."""
        ...

    def prefetch(
        self, layer: int, guessed: torch.Tensor, top_k: int, valid: torch.Tensor | None
    ) -> None:
        """Bring what is missing of the surest experts until the layer's plan, the next one, is made.
        valid: bool [T], rows that count; None: all."""
        ...

    def prepare(self, layer: int, x: torch.Tensor) -> None:
        """Give x, float32 [T, D], to all paths."""
        ...

    def publish(self, layer: int, x: torch.Tensor) -> None:
        """``prepare`` of a single token on another stream, beside the router and the plan."""
        ...

    def plan(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Decide, and let the CPU begin. ids: int32 [T, k]; weights: float32 [T, k]."""
        ...

    def gather(self, layer: int) -> None:
        """Bring what is fetched into its slots, and what was prefetched and stays."""
        ...

    def hits(self, x: torch.Tensor) -> None: ...
    def fetched(self, x: torch.Tensor) -> None: ...
    def await_cpu(self) -> None: ...

    def combine(self, num_tokens: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all paths and of ``residual``, float32 [T, D], contiguous."""
        ...

    def set_split(self, tables: Sequence[Sequence[int]]) -> None:
        """For each layer, slices to fetch of m missing ones, by m."""
        ...

    def fill(self, keys: Sequence[int]) -> None:
        """Put these slices (``plan_oracle``'s keys) into slots 0, 1, ..., and nothing into the others;
        between steps."""
        ...

    def counts(self) -> ExpertCounts: ...

    def post_counts(self) -> None:
        """Send the counters to the host as they are behind the work queued so far."""
        ...

    def posted_counts(self) -> ExpertCounts:
        """``counts`` at the oldest point that was posted; waits for that only."""
        ...

    def view(self) -> CacheView:
        """The cache as it is; between steps."""
        ...

    def slots_used(self) -> int:
        """Slots that hold a slice."""
        ...

    def replace(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """For each (slot, old, new): the slot that held key ``old`` (-1: nothing) now holds ``new``."""
        ...

    def slot(self, number: int) -> torch.Tensor:
        """A slot's bytes, uint8 [slice_nbytes]."""
        ...

    def slots(self, first: int, count: int) -> torch.Tensor:
        """See ``chunk.SlotTable``, as the next three."""
        ...

    def residency(self) -> npt.NDArray[np.int32]: ...
    def lend(self, count: int) -> None: ...
    def move(self, layer: int, changes: Sequence[tuple[int, int, int]]) -> None: ...
