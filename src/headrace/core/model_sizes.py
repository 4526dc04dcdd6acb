"""How a model's weights are stored, in the terms that planning needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSizes:
    """Bytes and formats of a checkpoint.

    total_nbytes: all weights as stored, of which expert_nbytes are experts' matrices. The formats are
    those of matrices: of experts, and of everything else that is not a vector.
    """

    total_nbytes: int
    expert_nbytes: int = 0
    expert_formats: frozenset[str] = frozenset()
    dense_formats: frozenset[str] = frozenset({"bf16"})
