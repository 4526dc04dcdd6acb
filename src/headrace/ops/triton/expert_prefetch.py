"""Launches of the prefetch kernels (``expert_foresight``), in the order in which a layer needs them."""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch

from headrace.ops.expert_records import RouterView
from headrace.ops.triton.expert_foresight import (
    expert_prefetch,
    guess_logits,
    settle_prefetches,
)
from headrace.ops.triton.expert_state import (
    COPY_WORDS,
    PREFETCH_PROGRAMS,
    PlanState,
    choose,
)
from headrace.ops.triton.router import router_topk

GUESS_ROWS = 2  # experts of a program: 64 programs for 128 experts read a router within 3 us
GUESS_TILE = 1024
PREFETCH_WARPS = 8
SETTLE_PROGRAMS = 32  # of each slice; a slice is copied in some microseconds
FORMATS = ("f32", "f16", "bf16")  # of routers


class PrefetchLauncher:
    """The prefetches of one model on one device; see ``expert_launch.ExpertLauncher``'s arguments."""

    def __init__(self, state: PlanState, arena: torch.Tensor, bases: torch.Tensor) -> None:
        self._state, self._arena, self._bases = state, arena, bases
        g = state.geometry
        self._logits = torch.zeros(g.max_tokens, g.num_experts, device=arena.device)
        self._first_slot = g.num_slots + g.max_fetch

    def guess(self, x: torch.Tensor, router: RouterView) -> torch.Tensor:
        """x: float32 [T, D], before the norm. Returns int32 [T, k], the surest expert first."""
        weight, g = router.weight.parts["data"], self._state.geometry
        tokens, experts = x.shape[0], g.num_experts
        logits = self._logits[:tokens]
        guess_logits[(-(-experts // GUESS_ROWS), tokens)](
            x, router.scale, weight, logits if router.bias is None else router.bias, logits,
            weight.stride(0), experts, router.eps, x.shape[1], router.bias is not None, GUESS_ROWS,
            GUESS_TILE, num_warps=4,
        )  # fmt: skip
        return router_topk(logits, router.top_k, "topk_softmax", False)[0]

    def choose(self, layer: int, guesses: torch.Tensor, valid: torch.Tensor | None) -> None:
        """See ``expert_state.choose``."""
        choose(self._state, layer, guesses, valid)

    def prefetch(self, layer: int) -> None:
        """Copy what was chosen until the layer's plan has been made."""
        s = self._state
        expert_prefetch[(PREFETCH_PROGRAMS,)](
            self._bases, self._arena, s.foreseen, s.arrived, s.state, s.totals, layer,
            self._first_slot, s.geometry.slice_nbytes, COPY_WORDS, 32 * PREFETCH_WARPS,
            num_warps=PREFETCH_WARPS,
        )  # fmt: skip

    def settle(self) -> None:
        """After the layer's gather: give what stays its slot."""
        s, g = self._state, self._state.geometry
        settle_prefetches[(g.max_prefetch, SETTLE_PROGRAMS)](
            self._arena, s.state, s.arrived, s.homes, s.totals, self._first_slot, g.max_prefetch,
            PREFETCH_PROGRAMS, g.slice_nbytes, COPY_WORDS, num_warps=8,
        )  # fmt: skip
