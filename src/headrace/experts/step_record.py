"""One decoding step of an executor, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertStep:
    """Slices of one decoding step by path, and what the paths were busy for.

    num_layers: that have experts; uses: of slices by tokens, all paths together; slice_flops: of one use
    (a multiply-add is two)
    """

    hits: int
    fetched: int
    computed: int
    fetch_s: float
    compute_s: float
    num_layers: int
    uses: int
    slice_flops: int
    slice_nbytes: int
