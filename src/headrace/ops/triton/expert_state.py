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

from headrace.core.errors import ConfigError, InternalError
from headrace.ops.triton.expert_plan import expert_plan
from headrace.ops.triton.expert_rank import begin_step, rank_victims
from headrace.ops.triton.overlap import can_overlap

NUM_COUNTS = 8
# After them in ``totals``: nanoseconds of fetches, waits for the CPU, nanoseconds of them; chunks
# prefetched, chunks of them that were needed, nanoseconds of prefetches.
NUM_TOTALS = NUM_COUNTS + 6
NUM_STATES = 9
COPY_WORDS = 2048  # 8-byte words that a program of gather or prefetch moves at a time
NUM_COUNTERS = 3  # of an expert, cache_policy.HALF_LIVES
NUM_CONSTANTS = 7  # before the turns
# Slots ranked by one program; few, so that thousands of slots fill the GPU. Each meets all others
# in chunks whose loads are waited for: long ones, as many as 128 threads hold counts for.
RANK_MINE = 8
RANK_CHUNK = 512
BEGIN_CHUNK = 256  # experts
LEAST_PLAN_WARPS, MOST_PLAN_WARPS = 4, 16
# One program is alone on its multiprocessor; left to itself ptxas spills at 32 registers.
REGISTERS_OF_SM, MOST_REGISTERS = 65536, 255
MOST_SLICES = 31  # ``on_gpu`` is an int32 with a bit for each
SMALLEST_AXIS = 2  # Triton's scans want more than one element


@dataclass(frozen=True)
class PlanGeometry:
    """Sizes of the plan; the same as ``plan_oracle.PlanShape`` plus those of a step.

    window: units of the ranking that compete to be a layer's victims (``ValueConstants.window``)
    request: int32 offsets of header, items, pair_token and pair_weight in the request block
    max_prefetch: slices prefetched for a layer at most, 0 or a power of two up to 16; slice_nbytes: needed
        for them

    Raises:
        ConfigError: more slices than the kernels count.
        InternalError: another number of prefetches.
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
    max_prefetch: int = 0
    slice_nbytes: int = 0
    prefetch_programs: int = 16  # as many as gather; a power of two
    numbered: bool = False  # whether the CPU is told when the x of a single token is there

    def __post_init__(self) -> None:
        if self.max_prefetch not in (0, 1, 2, 4, 8, 16):
            raise InternalError(f"{self.max_prefetch} prefetches, expected 0 or a power of two")
        if self.max_prefetch and self.prefetch_programs & (self.prefetch_programs - 1):
            raise InternalError(f"{self.prefetch_programs} programs, expected a power of two")
        if self.num_slices > MOST_SLICES:
            raise ConfigError(
                f"experts in {self.num_slices} slices, the GPU's kernels take {MOST_SLICES}",
                hint="lay them out with fewer slices",
            )

    @property
    def max_uses(self) -> int:
        return self.max_tokens * self.top_k

    @property
    def slice_chunks(self) -> int:
        """Chunks in which a slice is copied."""
        return max(-(-self.slice_nbytes // (8 * COPY_WORDS)), 1)

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
    counters: torch.Tensor
    values: torch.Tensor
    last_use: torch.Tensor
    constants: torch.Tensor
    victims: torch.Tensor
    scratch: torch.Tensor
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
    foreseen: torch.Tensor
    place_of: torch.Tensor
    arrived: torch.Tensor
    origins: torch.Tensor
    homes: torch.Tensor
    block: torch.Tensor | None


def new_plan_state(
    geometry: PlanGeometry,
    constants: Sequence[float],
    device: torch.device,
    block: torch.Tensor | None,
) -> PlanState:
    """A cold cache. constants: ``ValueConstants.table()``; block: int32, the request block, or None.

    Raises:
        InternalError: not one turn for each layer.
    """
    g = geometry
    if len(constants) != NUM_CONSTANTS + g.num_layers:
        raise InternalError(f"{len(constants)} constants of a policy for {g.num_layers} layers")
    rows = g.num_layers * g.num_experts

    def ints(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    places = max(g.max_prefetch, 1)
    return PlanState(
        geometry=g,
        slot_of=ints(rows * g.num_slices, value=-1),
        owner_of=ints(max(g.num_slots, 1), value=-1),
        counters=torch.zeros(NUM_COUNTERS, rows, device=device),
        values=torch.zeros(rows, device=device),
        last_use=ints(rows),
        constants=torch.tensor(list(constants), dtype=torch.float32, device=device),
        victims=torch.arange(max(g.num_slots, 1), dtype=torch.int32, device=device),
        scratch=ints(2 * g.window + g.max_fetch),
        split=ints(g.num_layers, g.max_missing + 1),
        state=ints(NUM_STATES),
        counts=ints(NUM_COUNTS),
        hits=ints(g.max_missing, 4),
        fetches=ints(max(g.max_fetch, 1), 4),
        pair_token=ints(g.max_uses),
        pair_weight=torch.zeros(g.max_uses, device=device),
        pair_of=ints(g.max_uses, value=-1),
        on_gpu=ints(g.max_uses),
        totals=torch.zeros(NUM_TOTALS, dtype=torch.int64, device=device),
        foreseen=ints(g.prefetch_programs, places),
        place_of=ints(g.num_experts * g.num_slices, value=-1),
        arrived=ints(g.prefetch_programs),
        origins=ints(max(g.max_fetch, 1), value=-1),
        homes=ints(places, value=-1),
        block=block,
    )


def start_step(state: PlanState) -> None:
    """Advance the clock, age the counters and rank the victims; once a step, before its first layer."""
    g = state.geometry
    rows = state.values.numel()
    begin_step[(-(-rows // BEGIN_CHUNK),)](
        state.counters, state.values, state.constants, state.state, rows, BEGIN_CHUNK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if g.num_slots and g.max_fetch:
        rank_victims[(-(-g.num_slots // RANK_MINE),)](
            state.owner_of, state.values, state.victims, state.state, g.num_slices, g.num_slots,
            RANK_MINE, RANK_CHUNK, num_warps=4,
        )  # fmt: skip


def plan_layer(state: PlanState, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Plan one layer. ids: int32 [T, k]; weights: float32 [T, k]; both contiguous."""
    g, uses = state.geometry, ids.numel()
    size = power_of_two(uses)
    warps = _plan_warps(size, _chunk(g.window))
    overlap = can_overlap(ids.device)
    block = state.counts if state.block is None else state.block
    expert_plan[(1,)](
        ids, weights, state.slot_of, state.owner_of, state.counters, state.values, state.last_use,
        state.constants, state.victims, state.scratch, state.split, state.state, state.counts,
        state.hits, state.fetches, state.pair_token, state.pair_weight, state.pair_of,
        state.on_gpu, state.totals, state.place_of, state.arrived, state.origins, state.homes, block,
        layer,
        uses, g.top_k, g.num_layers, g.num_experts, g.num_slices, g.num_slots, g.max_fetch,
        g.max_missing + 1, state.block is not None, *g.request, size, power_of_two(g.num_slices),
        power_of_two(max(g.max_fetch, 1)), g.window, power_of_two(g.window), _chunk(g.window),
        g.max_prefetch, g.prefetch_programs, g.slice_chunks, 32 * warps,
        g.numbered and uses == g.top_k, overlap,
        num_warps=warps,
        maxnreg=min(MOST_REGISTERS, REGISTERS_OF_SM // (32 * warps)), enable_fp_fusion=False,
        launch_pdl=overlap,
    )  # fmt: skip


def _chunk(window: int) -> int:
    """Places of the ranking looked at together: one chunk mostly holds ``window`` victims, though
    some of its slots were taken, or used, earlier in the step."""
    return power_of_two(window + window // 2)


def _plan_warps(uses: int, chunk: int) -> int:
    """One place of the ranking for each thread: with two, loads and sums want different layouts and
    the kernel has half as many instructions again and twice the barriers."""
    return min(MOST_PLAN_WARPS, max(LEAST_PLAN_WARPS, uses // 8, chunk // 32))


def power_of_two(size: int) -> int:
    return max(SMALLEST_AXIS, 1 << (size - 1).bit_length())
