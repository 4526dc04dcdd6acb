"""From a router's choice to the items of a request: which slices of which experts, for which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
    expert = ids.reshape(-1).numpy().astype(np.int64)
    token = np.repeat(np.arange(num_tokens), k)
    used = expert >= 0
    keys, place = np.unique(expert[used] * num_tokens + token[used], return_inverse=True)
    pair_weight = np.zeros(len(keys), np.float32)
    np.add.at(pair_weight, place, weights.reshape(-1).numpy()[used])
    experts, firsts, counts = np.unique(
        keys // max(num_tokens, 1), return_index=True, return_counts=True
    )
    items = np.empty((len(experts), num_slices, 4), np.int32)
    items[:, :, 0] = experts[:, None]
    items[:, :, 1] = np.arange(num_slices)
    items[:, :, 2] = firsts[:, None]
    items[:, :, 3] = counts[:, None]
    tokens = (keys % max(num_tokens, 1)).astype(np.int32)
    tensor = torch.from_numpy  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Items(tensor(items.reshape(-1, 4)), tensor(tokens), tensor(pair_weight))
