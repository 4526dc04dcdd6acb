"""The choice of experts.

Of few rows scores and choice are one kernel: a program scores an expert for a row, and the last one of a
row to finish chooses. Each score is one program's sum whatever the batch is.
"""

# Kernels are Triton's language, not Python: their parameters have no Python types.
# pyright: basic, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.core.errors import InternalError
from headrace.formats.base import PackedTensor
from headrace.ops.triton.few_rows import MAX_ROWS
from headrace.ops.triton.overlap import can_overlap, wait_and_release
from headrace.ops.triton.products import linear

_FLOATS = ("f32", "f16", "bf16")
_COLS_OF_WARP = (
    2048  # few warps: the last program's choice is a chain of reductions over all of them
)
MAX_COLS = 16_384  # of a score, held in one program's registers


@triton.jit
def _choose(
    value, inside, expert, ids, weights, k, SOFTMAX_FIRST: tl.constexpr, NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the k best of scores ``value`` [EXPERTS] and their weights."""
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
    tl.store(ids + place, chosen, mask=place < k)
    tl.store(weights + place, tl.where(bad, 0.0, weight), mask=place < k)


@triton.jit
def router_topk_kernel(
    logits, ids, weights, num_experts, k,
    SOFTMAX_FIRST: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    value = tl.load(logits + row * num_experts + expert, mask=inside, other=0.0)
    _choose(
        value, inside, expert, ids + row * k, weights + row * k, k, SOFTMAX_FIRST, NORMALIZE,
        EXPERTS, K,
    )  # fmt: skip


@triton.jit
def route_kernel(
    x, weight, bias, logits, done, ids, weights, num_experts, cols, stride, k,
    HAS_BIAS: tl.constexpr, SOFTMAX_FIRST: tl.constexpr, NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Score expert ``program_id(0)`` for row ``program_id(1)``; the row's last program chooses.

    done: int32 for each row, 0 before and after.
    """
    mine, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, COLS)
    w = tl.load(weight + mine.to(tl.int64) * stride + at, mask=at < cols, other=0.0)
    wait_and_release(PDL)
    value = tl.load(x + row * cols + at, mask=at < cols, other=0.0).to(w.dtype).to(tl.float32)
    score = tl.sum(w.to(tl.float32) * value, 0)
    if HAS_BIAS:
        score += tl.load(bias + mine)
    tl.store(logits + row * num_experts + mine, score)
    tl.debug_barrier()
    if tl.atomic_add(done + row, 1, sem="acq_rel") == num_experts - 1:
        tl.store(done + row, 0)
        expert = tl.arange(0, EXPERTS)
        inside = expert < num_experts
        # Past the first-level cache, which knows nothing of other multiprocessors' scores.
        scores = tl.load(
            logits + row * num_experts + expert, mask=inside, other=0.0, cache_modifier=".cg"
        )
        _choose(
            scores, inside, expert, ids + row * k, weights + row * k, k, SOFTMAX_FIRST, NORMALIZE,
            EXPERTS, K,
        )  # fmt: skip


def router_topk(
    logits: torch.Tensor, k: int, scoring: str, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for each row; see the reference for ties and rows of NaN.

    logits: float32 [T, E]. Returns ids int32 [T, k], by falling score, and weights float32 [T, k].
    """
    _check(scoring)
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


def route(
    x: torch.Tensor,
    weight: PackedTensor,
    bias: torch.Tensor | None,
    k: int,
    scoring: str,
    normalize: bool,
    done: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``router_topk`` of ``linear(x, weight, bias)``, of few rows in one kernel.

    x: float32 [T, D]; weight: [E, D]; done: int32 zeros, one for each row, that calls running at
    the same time must not share. Returns ids int32 [T, k] and weights float32 [T, k].
    """
    rows, cols = x.shape
    if not 0 < rows <= min(MAX_ROWS, len(done)) or weight.format not in _FLOATS or cols > MAX_COLS:
        return router_topk(linear(x, weight, bias), k, scoring, normalize)
    _check(scoring)
    x, data, experts = x.contiguous(), weight.parts["data"], weight.rows
    logits = torch.empty(rows, experts, device=x.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, k, device=x.device)
    overlap = can_overlap(x.device)
    block = triton.next_power_of_2(cols)
    route_kernel[(experts, rows)](
        x, data, logits if bias is None else bias, logits, done, ids, weights,
        experts, cols, data.stride(0), k, HAS_BIAS=bias is not None,
        SOFTMAX_FIRST=scoring == "softmax_topk", NORMALIZE=normalize,
        EXPERTS=triton.next_power_of_2(experts), K=triton.next_power_of_2(k), COLS=block,
        PDL=overlap, num_warps=min(max(block // _COLS_OF_WARP, 1), 8), launch_pdl=overlap,
    )  # fmt: skip
    return ids, weights


def _check(scoring: str) -> None:
    if scoring not in ("softmax_topk", "topk_softmax"):
        raise InternalError(f"router scoring {scoring!r} is unknown")
