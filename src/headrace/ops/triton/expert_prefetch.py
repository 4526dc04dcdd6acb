"""Launches of the prefetch kernels (``expert_foresight``)."""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.ops.expert_records import RouterView
from headrace.ops.triton.expert_foresight import expert_prefetch, guess_logits
from headrace.ops.triton.expert_state import (
    COPY_WORDS,
    PlanState,
    power_of_two,
)
from headrace.ops.triton.router import router_topk

GUESS_ROWS = 2  # experts of a program: 64 programs for 128 experts read a router within 3 us
GUESS_TILE = 1024
PREFETCH_WARPS = 8
FORMATS = ("f32", "f16", "bf16")  # of routers


class PrefetchLauncher:
    """The prefetches of one model on one device; see ``expert_launch.ExpertLauncher``'s arguments.

    Args:
        host_nbytes: of each layer's slices, at most a slot's.
    """

    def __init__(
        self,
        state: PlanState,
        arena: torch.Tensor,
        bases: torch.Tensor,
        host_nbytes: Sequence[int],
    ) -> None:
        self._state, self._arena, self._bases = state, arena, bases
        self._host_nbytes = tuple(host_nbytes)
        g = state.geometry
        self._logits = torch.zeros(g.max_tokens, g.num_experts, device=arena.device)
        self._first_slot = g.num_slots + g.max_fetch

    def guess(self, x: torch.Tensor, router: RouterView) -> torch.Tensor:
        """x: float32 [T, D], before the norm. Returns the router's logits of it, float32 [T, E]."""
        weight, tokens = router.weight.parts["data"], x.shape[0]
        experts, logits = self._state.geometry.num_experts, self._logits[: x.shape[0]]
        guess_logits[(-(-experts // GUESS_ROWS), tokens)](
            x, router.scale, weight, logits if router.bias is None else router.bias, logits,
            weight.stride(0), experts, router.eps, x.shape[1], router.bias is not None, GUESS_ROWS,
            GUESS_TILE, num_warps=4,
        )  # fmt: skip
        return logits

    def prefetch(
        self, layer: int, logits: torch.Tensor, top_k: int, valid: torch.Tensor | None = None
    ) -> None:
        """Choose by these logits, float32 [T, E], and copy until the layer's plan has been made. valid:
        bool [T], rows that count; None: all."""
        s, g, tokens = self._state, self._state.geometry, logits.shape[0]
        guesses = s.counts  # found by the kernel
        if tokens > 1:
            guesses = router_topk(logits, top_k, "topk_softmax", False)[0]
        expert_prefetch[(g.prefetch_programs,)](
            logits, guesses, guesses if valid is None else valid, s.slot_of, s.state, s.foreseen,
            s.place_of, s.arrived, self._bases, self._arena, s.totals, layer, tokens, top_k,
            g.num_experts, g.num_slices, g.max_prefetch, valid is not None,
            power_of_two(tokens * top_k), power_of_two(g.num_slices), power_of_two(g.num_experts),
            self._first_slot, g.slice_nbytes, self._host_nbytes[layer], COPY_WORDS, 32 * PREFETCH_WARPS,
            num_warps=PREFETCH_WARPS,
        )  # fmt: skip
