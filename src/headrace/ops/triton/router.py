"""The choice of experts, and the greedy choice of tokens."""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.core.errors import InternalError


@triton.jit
def router_topk_kernel(
    logits, ids, weights, num_experts, k,
    SOFTMAX_FIRST: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    value = tl.load(logits + row * num_experts + expert, mask=inside, other=0.0)
    bad = tl.sum((value != value).to(tl.int32), 0) > 0
    value = tl.where(bad, 0.0, value)
    free = inside
    place = tl.arange(0, K)
    chosen = tl.zeros((K,), tl.int32)
    scores = tl.full((K,), float("-inf"), tl.float32)
    for j in range(0, k):
        best = tl.max(tl.where(free, value, float("-inf")), 0)
        # the smallest id among equals
        winner = tl.min(tl.where(free & (value == best), expert, EXPERTS), 0)
        free = free & (expert != winner)
        chosen = tl.where(place == j, winner, chosen)
        scores = tl.where(place == j, best, scores)
    if SOFTMAX_FIRST:
        top = tl.max(tl.where(inside, value, float("-inf")), 0)
        total = tl.sum(tl.where(inside, tl.exp(value - top), 0.0), 0)
        weight = tl.exp(scores - top) / total
        if NORMALIZE:
            weight = weight / tl.sum(tl.where(place < k, weight, 0.0), 0)
    else:
        part = tl.exp(scores - tl.max(scores, 0))
        weight = part / tl.sum(part, 0)
    tl.store(ids + row * k + place, chosen, mask=place < k)
    tl.store(weights + row * k + place, tl.where(bad, 0.0, weight), mask=place < k)


def router_topk(
    logits: torch.Tensor, k: int, scoring: str, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for each row; see the reference for ties and rows of NaN.

    logits: float32 [T, E]. Returns ids int32 [T, k], by falling score, and weights float32 [T, k].
    """
    if scoring not in ("softmax_topk", "topk_softmax"):
        raise InternalError(f"router scoring {scoring!r} is unknown")
    logits = logits.contiguous()
    rows, experts = logits.shape
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, device=logits.device)
    router_topk_kernel[(rows,)](
        logits, ids, weights, experts, k,
        SOFTMAX_FIRST=scoring == "softmax_topk", NORMALIZE=normalize,
        EXPERTS=triton.next_power_of_2(experts), K=triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip
    return ids, weights
