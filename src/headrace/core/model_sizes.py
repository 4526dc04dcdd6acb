"""How a model's weights are stored, in the terms that planning needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSizes:
    """Bytes and formats of a checkpoint.

    total_nbytes: all weights as stored, of which expert_nbytes are experts' matrices. The formats are
    those of matrices: of experts, and of everything else that is not a vector.
    packed_nbytes: of everything but experts on a GPU that leaves matrices in blocks as they are stored, and
        makes other numbers bfloat16 (routers and vectors float32).
    expert_kinds: for each layer of experts the format of gate and up, that of down, and whether factors
    belong to blocks; empty where gate and up differ, or experts of a layer do.
    """

    total_nbytes: int
    expert_nbytes: int = 0
    expert_formats: frozenset[str] = frozenset()
    dense_formats: frozenset[str] = frozenset({"bf16"})
    packed_nbytes: int = 0
    expert_kinds: tuple[tuple[str, str, bool], ...] = ()
