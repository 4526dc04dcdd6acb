"""From a router's choice to the items of a request: which slices of which experts, for which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Items:
    """What ``experts.request_block`` holds of one layer's choice.

    items: int32 [M, 4], ascending by (expert, slice): expert, slice, first pair, pairs. The slices of
        an expert share its pairs.
    pair_token: int32 [P], ascending within an expert; pair_weight: float32 [P]
    """

    items: torch.Tensor
    pair_token: torch.Tensor
    pair_weight: torch.Tensor


def items_of(ids: torch.Tensor, weights: torch.Tensor, num_slices: int) -> Items:
    """All slices of all chosen experts.

    ids: int32 [T, k], -1 chooses nothing, an expert that a row names twice counts once with both
    weights; weights: float32 [T, k].
    """
    num_tokens, k = ids.shape
    token = torch.arange(num_tokens).repeat_interleave(k)
    expert, weight = ids.reshape(-1).long(), weights.reshape(-1)
    used = expert >= 0
    keys, place = torch.unique(expert[used] * num_tokens + token[used], return_inverse=True)
    pair_weight = torch.zeros(len(keys)).index_add_(0, place, weight[used])
    experts, counts = torch.unique_consecutive(keys // max(num_tokens, 1), return_counts=True)
    firsts = torch.cumsum(counts, 0) - counts
    items = torch.empty((len(experts), num_slices, 4), dtype=torch.int32)
    items[:, :, 0] = experts[:, None]
    items[:, :, 1] = torch.arange(num_slices)
    items[:, :, 2] = firsts[:, None]
    items[:, :, 3] = counts[:, None]
    tokens = (keys % max(num_tokens, 1)).to(torch.int32)
    return Items(items.reshape(-1, 4), tokens, pair_weight)
