"""Routing to experts and the experts themselves, in plain PyTorch."""

from __future__ import annotations

import torch

from headrace.core.errors import InternalError
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.reference.dense import activate, linear


def router_topk(
    logits: torch.Tensor, k: int, scoring: str, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for each row.

    logits: float32 [T, E]. ``scoring`` and ``normalize`` as in ``core.model_spec.MoeSpec``. Equal
    scores: the smaller id first. A row with a NaN gets ids 0 to k - 1 with weights 0: it
    contributes nothing, and no id is out of range.
    Returns ids int32 [T, k], by falling score, and weights float32 [T, k].
    """
    if scoring not in ("softmax_topk", "topk_softmax"):
        raise InternalError(f"router scoring {scoring!r} is unknown")
    bad = logits.isnan().any(-1, keepdim=True)
    clean = logits.masked_fill(bad, 0.0)
    # Softmax keeps the order, so both rules choose by logit; a stable sort keeps ties by id.
    values, ids = torch.sort(clean, dim=-1, descending=True, stable=True)
    ids = ids[:, :k]
    if scoring == "softmax_topk":
        weights = torch.softmax(clean, -1).gather(-1, ids)
        if normalize:
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        weights = torch.softmax(values[:, :k], -1)
    return ids.to(torch.int32), weights.masked_fill(bad, 0.0)


def checked_ids(ids: torch.Tensor, num_experts: int) -> set[int]:
    """The different ids of ``ids``, on the host.

    Raises:
        InternalError: one is neither -1 nor an expert's.
    """
    found = {int(i) for i in ids.flatten().cpu()}
    if found and not -1 <= min(found) <= max(found) < num_experts:
        raise InternalError(f"expert ids {min(found)} to {max(found)} of {num_experts} experts")
    return found


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    act: Activation,
) -> torch.Tensor:
    """The weighted sum of each row's experts.

    x: float32 [T, D]; ids: int32 [T, k], -1 contributes nothing; weights: float32 [T, k].
    Returns float32 [T, D].

    Raises:
        InternalError: an id is neither -1 nor an expert's.
    """
    out = torch.zeros_like(x)
    for expert in sorted(checked_ids(ids, len(experts.gate)) - {-1}):
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        y = _expert(x[row], expert, experts, act)
        out.index_add_(0, row, y * weights[row, place, None])
    return out


def _expert(x: torch.Tensor, expert: int, experts: ExpertWeights, act: Activation) -> torch.Tensor:
    def bias(of: torch.Tensor | None) -> torch.Tensor | None:
        return None if of is None else of[expert]

    gate = linear(x, experts.gate[expert], bias(experts.gate_bias))
    up = linear(x, experts.up[expert], bias(experts.up_bias))
    return linear(activate(gate, up, act), experts.down[expert], bias(experts.down_bias))
