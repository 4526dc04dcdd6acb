"""Which slices of a prompt chunk stay in the cache."""

from __future__ import annotations

import torch

# In a work list, where a slice is to stay: a slot, nowhere, or as the device decides by the routing.
NOWHERE = -1
ASK_DEVICE = -2


def choose_kept(uses: torch.Tensor, slots: torch.Tensor, streamed: torch.Tensor) -> torch.Tensor:
    """Slots that streamed slices of a layer take over: int32 [keys], -1: none.

    The most used of the streamed replace the least used of the resident where the chunk used them
    more than twice as often: what a prompt uses is likely in its answer, but small differences are
    chance, and what decoding has learnt counts, too.

    uses: int [keys], tokens of each slice's expert; slots: int32 [keys], -1: not resident; streamed:
    bool [keys]. Waits for nothing.
    """
    resident = slots >= 0
    most = torch.where(streamed, uses, -1).sort(descending=True, stable=True).indices
    huge = torch.iinfo(uses.dtype).max
    least = torch.where(resident, uses, huge).sort(stable=True).indices
    both = streamed[most] & resident[least]
    better = both & (uses[most] > 2 * uses[least])
    dest = torch.full_like(slots, -1)
    return dest.scatter_(0, most, torch.where(better, slots[least], -1))
