"""The outcome of resolving, and what it is decided from."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.kv_formats import PoolShape
from headrace.core.status import Choice
from headrace.engine.expert_rates import StartingRates
from headrace.engine.memory_plan import MemoryPlan
from headrace.engine.vram_plan import VramPlan
from headrace.experts.chunk_choice import ChunkChoice


@dataclass(frozen=True)
class GpuSupport:
    """What of this installation could run on a GPU.

    missing: why its kernels cannot be used, None if they can. expert_formats: formats of experts that
    the expert cache serves; empty without one. known: the machine's rates, for a mixture's placement.
    """

    missing: str | None = "this process has not looked for GPU kernels"
    expert_formats: frozenset[str] = frozenset()
    known: StartingRates = field(default_factory=lambda: StartingRates({}))


@dataclass(frozen=True)
class Resolved:
    """Every choice, fixed for the engine's life; ``choices`` says why for each.

    device: "cpu" or "cuda". backend: "cpu", "triton" or "reference". dense_format: what matrices are
    converted to at load, None to leave them as stored. experts: "gpu" (all in GPU memory), "hybrid",
    "stream" or "cpu". slots: experts lie in slots of the expert cache, in ``vram.experts_nbytes``
    bytes; else they are part of the model. plan: host memory; vram: GPU memory. expert_ram_nbytes: host
    memory that the experts' slabs may take; pin_budget_nbytes and expert_disk as configured. expert_cpus:
    one for each thread of the CPU's experts, None: where the system puts them. kv_pool:
    what is allocated, on a GPU with the padding's block; kv_rank: residual scalars per token; kv_key:
    what cached prefixes depend on beside their tokens. chunks: how prompts are cut where experts are
    streamed, None: chunks as long as ``max_batch_tokens`` allows.
    """

    context: int
    kv_format: str
    kv_pool: PoolShape
    block_tokens: int
    max_batch_tokens: int
    max_num_seqs: int
    num_blocks: int
    threads: int
    backend: str
    experts: str
    plan: MemoryPlan
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()
    device: str = "cpu"
    gpu_index: int = 0
    dense_format: str | None = None
    slots: bool = False
    vram: VramPlan | None = None
    kv_rank: int = 0
    kv_key: str = ""
    expert_ram_nbytes: int = 0
    pin_budget_nbytes: int | None = None
    expert_disk: str | None = None
    expert_cpus: tuple[int, ...] | None = None
    chunks: ChunkChoice | None = None

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the KV pool, wherever it is."""
        return self.plan.kv_nbytes if self.vram is None else self.vram.kv_nbytes

    @property
    def memory(self) -> dict[str, dict[str, int]]:
        """Planned bytes by memory ("host", "gpu") and purpose, without what is reserved for others.

        "weights" of a host beside a GPU are the experts that are kept there.
        """
        plan, vram = self.plan, self.vram
        host = {"weights": plan.weights_nbytes, "kv": plan.kv_nbytes}
        found = {"host": {**host, "workspace": plan.workspace_nbytes}}
        if vram is not None:
            found["gpu"] = {
                "weights": vram.weights_nbytes,
                "experts": vram.experts_nbytes,
                "kv": vram.kv_nbytes,
                "workspace": vram.workspace_nbytes,
                "graphs": vram.graphs_nbytes,
                "context": vram.context_nbytes,
            }
        return found
