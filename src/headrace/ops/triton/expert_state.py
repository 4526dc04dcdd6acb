"""The tensors that the expert cache's kernels share, and the launches of the plan.

One ``PlanState`` serves all layers and all batch sizes; every tensor keeps its address, so that
captured graphs stay valid.
"""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.ops.triton.expert_plan import begin_step, expert_plan, rank_victims

NUM_COUNTS = 8
RANK_MINE = 32  # slots ranked by one program; small, so that thousands of slots fill the GPU
RANK_CHUNK = 128
SMALLEST_AXIS = 2  # Triton's scans want more than one element


@dataclass(frozen=True)
class PlanGeometry:
    """Sizes of the plan; the same as ``plan_oracle.PlanShape`` plus those of a step.

    request: int32 offsets of header, items, pair_token and pair_weight in the request block
    """

    num_layers: int
    num_experts: int
    num_slices: int
    num_slots: int
    max_fetch: int
    window: int
    max_tokens: int
    top_k: int
    request: tuple[int, int, int, int]

    @property
    def max_uses(self) -> int:
        return self.max_tokens * self.top_k

    @property
    def max_missing(self) -> int:
        """Most slices that a layer can miss."""
        return min(self.max_uses, self.num_experts) * self.num_slices


@dataclass(frozen=True)
class PlanState:
    """Device tensors by the names of ``expert_plan``; ``block`` is pinned memory or None without a CPU
    service."""

    geometry: PlanGeometry
    slot_of: torch.Tensor
    owner_of: torch.Tensor
    score: torch.Tensor
    last_use: torch.Tensor
    decay: torch.Tensor
    victims: torch.Tensor
    split: torch.Tensor
    state: torch.Tensor
    counts: torch.Tensor
    hits: torch.Tensor
    fetches: torch.Tensor
    pair_token: torch.Tensor
    pair_weight: torch.Tensor
    pair_of: torch.Tensor
    on_gpu: torch.Tensor
    totals: torch.Tensor
    block: torch.Tensor | None


def new_plan_state(
    geometry: PlanGeometry,
    decay: Sequence[float],
    device: torch.device,
    block: torch.Tensor | None,
) -> PlanState:
    """A cold cache. block: int32, the request block, or None."""
    g = geometry
    rows = g.num_layers * g.num_experts

    def ints(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return PlanState(
        geometry=g,
        slot_of=ints(rows * g.num_slices, value=-1),
        owner_of=ints(max(g.num_slots, 1), value=-1),
        score=torch.zeros(rows, device=device),
        last_use=ints(rows),
        decay=torch.tensor(list(decay), dtype=torch.float32, device=device),
        victims=torch.arange(max(g.num_slots, 1), dtype=torch.int32, device=device),
        split=ints(g.num_layers, g.max_missing + 1),
        state=ints(4),
        counts=ints(NUM_COUNTS),
        hits=ints(g.max_missing, 4),
        fetches=ints(max(g.max_fetch, 1), 4),
        pair_token=ints(g.max_uses),
        pair_weight=torch.zeros(g.max_uses, device=device),
        pair_of=ints(g.max_uses, value=-1),
        on_gpu=ints(g.max_uses),
        totals=torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device),
        block=block,
    )


def start_step(state: PlanState) -> None:
    """Advance the clock and rank the victims; once a step, before its first layer."""
    g = state.geometry
    begin_step[(1,)](state.state, num_warps=1)
    if g.num_slots and g.max_fetch:
        rank_victims[(-(-g.num_slots // RANK_MINE),)](
            state.owner_of, state.score, state.last_use, state.decay, state.victims, state.state,
            g.num_slices, g.num_slots, state.decay.shape[0], RANK_MINE, RANK_CHUNK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def plan_layer(state: PlanState, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Plan one layer. ids: int32 [T, k]; weights: float32 [T, k]; both contiguous."""
    g, uses = state.geometry, ids.numel()
    size = _power_of_two(uses)
    block = state.counts if state.block is None else state.block
    expert_plan[(1,)](
        ids, weights, state.slot_of, state.owner_of, state.score, state.last_use, state.decay,
        state.victims, state.split, state.state, state.counts, state.hits, state.fetches,
        state.pair_token, state.pair_weight, state.pair_of, state.on_gpu, state.totals, block, layer,
        uses, g.top_k, g.num_experts, g.num_slices, g.num_slots, g.max_fetch,
        state.decay.shape[0], g.max_missing + 1, state.block is not None, *g.request,
        size, _power_of_two(g.num_slices), _power_of_two(g.window),
        num_warps=8 if size >= 64 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def _power_of_two(size: int) -> int:
    return max(SMALLEST_AXIS, 1 << (size - 1).bit_length())
