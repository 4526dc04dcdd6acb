"""Where every byte of a model goes on a machine that nobody has yet: VRAM, host memory, disk.

Order of preference: everything in VRAM; experts in host memory with a cache of them in VRAM; what host
memory cannot hold on the disk; everything in host memory, computed by the CPU. Integers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from headrace.core.kv_formats import DEFAULT_ON_GPU
from headrace.core.plan_spec import PlanSpec
from headrace.core.step import PIECE_ROWS
from headrace.engine import vram_plan
from headrace.engine.memory_plan import RESERVE_NBYTES
from headrace.explain.step_cost import KV_BITS
from headrace.machine.profile import MachineProfile

# VRAM that is not the model's: the CUDA context, kernels and captured graphs, as the engine counts them.
VRAM_RESERVE_NBYTES = vram_plan.CONTEXT_NBYTES + vram_plan.RESERVE_NBYTES
# Host memory that the operating system and other programs keep. Estimate.
SYSTEM_RESERVE_NBYTES = 3 * 10**9
# Share of one memory for both that the GPU may use: macOS's default limit. Estimate.
UNIFIED_GPU_SHARE = 0.75
# Tokens of the longest prefill chunk, which sets the workspace: what the engine takes on a GPU
# (resolve_gpu.DEFAULT_MAX_BATCH_TOKENS) where no experts travel for each.
CHUNK_TOKENS = 2048
# The same where the CPU computes (resolve.DEFAULT_MAX_BATCH_TOKENS), in float32.
CPU_CHUNK_TOKENS = 512
_GPU_ELEMENT, _CPU_ELEMENT = 2, 4

Mode = Literal["vram", "ram", "disk", "cpu", "none"]


@dataclass(frozen=True)
class Workload:
    """What the plan is for.

    kv_format: of the cache; kv_on_cpu: of one that the CPU computes with, "" for the same
    prompt: tokens that are prefilled for the time to the first token
    """

    context: int
    concurrency: int = 1
    kv_format: str = DEFAULT_ON_GPU
    prompt: int = 2048
    kv_on_cpu: str = ""


@dataclass(frozen=True)
class Layout:
    """Bytes by tier ("vram", "ram", "disk") and purpose, against what each tier has.

    slots: experts that the cache in VRAM holds; resident: their share of all experts
    short: bytes that are missing, by tier, where ``mode`` is "none"; for "disk" what memory cannot hold
    chunk: tokens of a prompt's chunk at most
    kv_format: of the KV cache
    """

    mode: Mode
    used: dict[str, dict[str, int]]
    capacity: dict[str, int]
    slots: int = 0
    resident: float = 1.0
    ram_share: float = 1.0
    short: dict[str, int] = field(default_factory=dict[str, int])
    chunk: int = CHUNK_TOKENS
    kv_format: str = DEFAULT_ON_GPU

    @property
    def short_nbytes(self) -> int:
        """Bytes missing in all."""
        return sum(self.short.values())

    def total(self, tier: str) -> int:
        return sum(self.used.get(tier, {}).values())

    def free(self, tier: str) -> int:
        """What the tier has left; negative where it is short."""
        return self.capacity.get(tier, 0) - self.total(tier)


def workspace_nbytes(
    spec: PlanSpec,
    workload: Workload,
    chunk: int = CHUNK_TOKENS,
    element_nbytes: int = _GPU_ELEMENT,
) -> int:
    """Bytes of the largest step's intermediate results: an upper bound, for one layer at a time.

    Rows of a piece of a prefill chunk, in bfloat16 on a GPU: residual, normalised, attention's output and
    the next residual; queries, keys and values of the widest kind; the chosen experts' gates, ups and
    outputs. Then float32 logits of each sequence. A longer chunk keeps, of all of its rows, the residual in
    float32, what experts read, and one expert's activations (``engine.vram_plan.long_chunk_nbytes``).
    """
    tokens = min(chunk, max(workload.prompt, workload.concurrency))
    rest, tokens = max(tokens - PIECE_ROWS, 0), min(tokens, PIECE_ROWS)
    width = max(k.heads * (k.score_dim + k.value_dim) + k.cached for k in spec.attention)
    inner = max(
        spec.dense_weights // spec.hidden if spec.dense_layers else 0,
        spec.num_experts_per_token * (spec.expert_weights // spec.hidden) if spec.sparse else 0,
    )
    rows = 4 * spec.hidden + max(width, inner + spec.num_experts_per_token * spec.hidden)
    kept = 6 * spec.hidden + 2 * (spec.expert_weights // (3 * spec.hidden) if spec.sparse else 0)
    return element_nbytes * tokens * rows + rest * kept + 8 * workload.concurrency * spec.vocab


def lay_out(
    spec: PlanSpec, machine: MachineProfile, workload: Workload, chunk: int = CHUNK_TOKENS
) -> Layout:
    """Put the model on the machine. chunk: of prompts, where experts travel for each."""
    found = None if machine.gpu is None else _on_gpu(spec, machine, workload, chunk)
    return found or _without_gpu(spec, machine, workload)


def _kv(spec: PlanSpec, workload: Workload, kv_format: str) -> dict[str, int]:
    bits = KV_BITS[kv_format]
    return {"KV cache": workload.concurrency * spec.kv_nbytes(workload.context, bits)}


def _on_gpu(
    spec: PlanSpec, machine: MachineProfile, workload: Workload, chunk: int
) -> Layout | None:
    """With what the GPU computes in its memory; None where that does not fit."""
    assert machine.gpu is not None
    vram, ram = capacities(machine)
    weights, made = spec.nbytes(), workload.kv_format
    fixed = _kv(spec, workload, made) | {"workspace": workspace_nbytes(spec, workload)}
    outside = {k: n for k, n in weights.items() if n and k not in ("experts", "embedding")}
    host = {"reserve": RESERVE_NBYTES}
    capacity = {"vram": vram, "ram": ram}
    on_gpu = {**outside, **fixed, "reserve": VRAM_RESERVE_NBYTES}
    # A tied embedding is the output head too, so it has to be where the head is computed.
    table = {"embedding": weights["embedding"]}
    on_host = {} if spec.tied else table
    if spec.tied:
        on_gpu |= table
    everything = {**on_gpu, **table}
    if spec.sparse:
        everything["experts"] = weights["experts"]
    if sum(everything.values()) <= vram:
        used = {"vram": everything, "ram": host}
        return Layout("vram", used, capacity, _experts(spec), kv_format=made)
    if not spec.sparse:
        return None
    streamed = {**on_gpu, "workspace": workspace_nbytes(spec, workload, chunk)}
    shared = machine.gpu.unified
    found = _offloaded(spec, streamed, {**on_host, **host}, capacity, shared=shared)
    return None if found is None else replace(found, chunk=chunk, kv_format=made)


def _without_gpu(spec: PlanSpec, machine: MachineProfile, workload: Workload) -> Layout:
    """All of it in host memory, computed by the CPU; or nowhere, and what is missing."""
    vram, ram = capacities(machine)
    made = workload.kv_on_cpu or workload.kv_format
    weights = {k: n for k, n in spec.nbytes().items() if n}
    workspace = workspace_nbytes(spec, workload, CPU_CHUNK_TOKENS, _CPU_ELEMENT)
    fixed = {"workspace": workspace, "reserve": RESERVE_NBYTES}
    everything = weights | _kv(spec, workload, made) | fixed
    capacity = {"vram": vram, "ram": ram}
    short = sum(everything.values()) - ram + system_lack(machine)
    used = {"ram": everything}
    if short <= 0:
        chunk = CPU_CHUNK_TOKENS
        return Layout("cpu", used, capacity, resident=0.0, chunk=chunk, kv_format=made)
    on_host = Layout("none", used, capacity, resident=0.0, short={"ram": short}, kv_format=made)
    if machine.gpu is None:
        return on_host
    fixed = {"workspace": workspace_nbytes(spec, workload), "reserve": RESERVE_NBYTES}
    wanted = weights | _kv(spec, workload, workload.kv_format) | fixed
    on_gpu = replace(
        _too_small(spec, wanted, capacity, system_lack(machine)), kv_format=workload.kv_format
    )
    # A dense model wants everything in one of the two: the smaller lack counts.
    return on_host if not spec.sparse and short < on_gpu.short_nbytes else on_gpu


def fewer_at_once(spec: PlanSpec, machine: MachineProfile, workload: Workload) -> dict[int, Layout]:
    """Layouts with fewer of the sequences at a time, the others waiting, by how many run.

    What admission makes of a load whose KV cache would push weights out of VRAM: the most sequences beside
    all weights in VRAM, the most that a GPU with experts in host memory takes, and fewer, which leave more
    slots to the experts. These are the same for every load, so that a larger one is not the slower.
    """

    def laid_out(count: int) -> Layout:
        return lay_out(spec, machine, replace(workload, concurrency=count))

    counts = {n for n in _round_counts(workload.concurrency) if n < workload.concurrency}
    for modes in (("vram",), ("vram", "ram", "disk")):
        low, high = 0, workload.concurrency
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if laid_out(middle).mode in modes else (low, middle)
        counts |= {low} - {0}
    found = {count: laid_out(count) for count in counts}
    whole = max((n for n, layout in found.items() if layout.mode == "vram"), default=0)
    return {n: one for n, one in found.items() if n == whole or one.mode in ("ram", "disk")}


def _round_counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: up to ``most``."""
    powers = [1 << i for i in range(most.bit_length())]
    return sorted(n for n in {*powers, *(3 * p for p in powers)} if n <= most)


def system_lack(machine: MachineProfile) -> int:
    """Bytes that host memory has too few for the system alone, on the smallest of machines."""
    if machine.gpu is not None and machine.gpu.unified:
        return 0
    return max(0, SYSTEM_RESERVE_NBYTES - machine.host.memory_nbytes)


def _too_small(
    spec: PlanSpec, everything: dict[str, int], capacity: dict[str, int], lack_nbytes: int
) -> Layout:
    """What a model wants of a GPU and its host that it does not fit, and what is missing; ``lack_nbytes``:
    by the system itself.

    A mixture wants its experts in host memory and the rest in VRAM, a dense model everything in VRAM.
    """
    gpu = {k: n for k, n in everything.items() if k not in ("experts", "reserve")}
    gpu["reserve"] = VRAM_RESERVE_NBYTES
    host = {"reserve": RESERVE_NBYTES}
    if spec.sparse:
        host["experts"] = everything["experts"]
        if not spec.tied:
            host["embedding"] = gpu.pop("embedding")
        gpu["expert slots"] = spec.num_experts_per_token * spec.expert_nbytes
    lack = {
        "vram": max(0, sum(gpu.values()) - capacity["vram"]),
        "ram": max(0, sum(host.values()) - capacity["ram"] + lack_nbytes),
    }
    if not spec.sparse:
        lack = {"vram": lack["vram"]}
    short = {tier: nbytes for tier, nbytes in lack.items() if nbytes}
    return Layout("none", {"vram": gpu, "ram": host}, capacity, resident=0.0, short=short)


def _experts(spec: PlanSpec) -> int:
    return spec.moe_layers * spec.num_experts


def _offloaded(
    spec: PlanSpec,
    on_gpu: dict[str, int],
    host: dict[str, int],
    capacity: dict[str, int],
    *,
    shared: bool = False,
) -> Layout | None:
    """Experts in host memory (and on disk), a cache of them in VRAM; None without room for a layer's, or for
    what has to lie in host memory.

    shared: both are one memory, where an expert that the GPU reads is not kept a second time.
    """
    room = capacity["vram"] - sum(on_gpu.values())
    slots = min(_experts(spec), max(0, room) // spec.expert_nbytes)
    beside = capacity["ram"] - sum(host.values())
    if slots < spec.num_experts_per_token or beside < 0:
        return None
    pool = (_experts(spec) - (slots if shared else 0)) * spec.expert_nbytes
    used = {"vram": {**on_gpu, "expert slots": slots * spec.expert_nbytes}}
    resident = slots / _experts(spec)
    if beside >= pool:
        used["ram"] = {**host, "experts": pool}
        return Layout("ram", used, capacity, slots, resident)
    kept = beside // spec.expert_nbytes * spec.expert_nbytes
    used["ram"] = {**host, "experts": kept}
    used["disk"] = {"experts": pool - kept}
    everything = _experts(spec) * spec.expert_nbytes
    return Layout(
        "disk", used, capacity, slots, resident, kept / everything, {"ram": pool - beside}
    )


def capacities(machine: MachineProfile) -> tuple[int, int]:
    """Bytes of VRAM and of host memory that a plan may use."""
    host = machine.host.memory_nbytes
    if machine.gpu is None:
        return 0, max(0, host - SYSTEM_RESERVE_NBYTES)
    if machine.gpu.unified:
        vram = round(machine.gpu.memory_nbytes * UNIFIED_GPU_SHARE)
        return vram, max(0, machine.gpu.memory_nbytes - vram - SYSTEM_RESERVE_NBYTES)
    return machine.gpu.memory_nbytes, max(0, host - SYSTEM_RESERVE_NBYTES)
