"""How a model's weights are stored, in the terms that planning needs."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.numeric import GROUPED_FORMATS


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

    @property
    def have_grouped_kernels(self) -> bool:
        """Whether the experts of each layer are of one format that has grouped kernels of its own."""
        kinds = [kind[:2] for kind in self.expert_kinds] or [(f, f) for f in self.expert_formats]
        return all(one == other and one in GROUPED_FORMATS for one, other in kinds)
