"""The CPU's work list of a prompt chunk."""

from __future__ import annotations

import torch

from headrace.experts.cpu_share import work_of

IDS = torch.tensor([[2, 0], [-1, 2], [1, 2]], dtype=torch.int32)
WEIGHTS = torch.tensor([[0.5, 0.25], [9.0, 0.125], [1.0, 2.0]])


def test_items_of_the_wanted_slices_with_their_experts_tokens() -> None:
    found = work_of(IDS, WEIGHTS, [1, 4, 5], 2)
    # Expert 0: token 0; expert 1: token 2; expert 2: tokens 0, 1, 2.
    assert found.pair_token.tolist() == [0, 2, 0, 1, 2]
    assert found.pair_weight.tolist() == [0.25, 1.0, 0.5, 0.125, 2.0]
    assert found.items.tolist() == [[0, 1, 0, 1], [2, 0, 2, 3], [2, 1, 2, 3]]
    assert found.items.dtype == torch.int32


def test_an_expert_named_twice_counts_once_with_both_weights() -> None:
    ids = IDS.clone()
    ids[2] = 2
    found = work_of(ids, WEIGHTS, [4], 2)
    assert found.pair_token.tolist() == [0, 0, 1, 2]
    assert found.pair_weight.tolist() == [0.25, 0.5, 0.125, 3.0]
    assert found.items.tolist() == [[2, 0, 1, 3]]
