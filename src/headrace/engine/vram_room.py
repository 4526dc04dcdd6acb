"""The GPU's memory as the choice of the KV pool sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.core.model_spec import ModelSpec
from headrace.engine.kv_choice import KVPool
from headrace.engine.vram_plan import VramPlan


@dataclass(frozen=True)
class GpuRoom:
    """GPU memory as the KV pool sees it: one block more than the pool is needed for padding.

    share: of the free memory the pool gets at most 1 / ``share``.
    """

    spec: ModelSpec
    pool: KVPool
    block_tokens: int
    empty: VramPlan
    share: int = 1

    def with_experts(self, nbytes: int) -> GpuRoom:
        return replace(self, empty=replace(self.empty, experts_nbytes=nbytes))

    def with_batch(self, tokens: int) -> GpuRoom:
        return replace(self, pool=replace(self.pool, max_batch_tokens=tokens))

    def plan(self, kv_tokens: int, workspace: int) -> VramPlan:
        return replace(
            self.empty,
            kv_nbytes=self.pool.nbytes(-(-kv_tokens // self.block_tokens)),
            workspace_nbytes=workspace,
        )

    def tokens(self, workspace: int, share: int = 1) -> int:
        """See ``choosing.Room``."""
        one = self.plan(self.block_tokens, workspace)  # the padding's block
        free = max(0, one.headroom_nbytes + self.pool.fixed_nbytes)
        return self.pool.blocks_in(free // max(share, self.share)) * self.block_tokens
