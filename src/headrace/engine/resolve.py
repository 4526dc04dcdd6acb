"""Configuration + model + machine -> choices, each with its reason. Plain Python, decided once."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.config import DEVICES, EXPERT_MODES, EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.kv_formats import DEFAULT_ON_CPU
from headrace.core.model_sizes import ModelSizes
from headrace.core.model_spec import ModelSpec
from headrace.core.status import Choice
from headrace.engine.choosing import (
    BLOCK_TOKENS,
    Chosen,
    batch_limits,
    choose_block_tokens,
    choose_context,
    choose_pool,
    host_budget,
    one_of,
    require_expert_store,
)
from headrace.engine.kv_choice import KVPool, KVSupport, choose_kv
from headrace.engine.memory_plan import (
    RESERVE_NBYTES,
    MemoryPlan,
    megabytes,
    workspace_nbytes,
)
from headrace.engine.resolve_gpu import resolve_on_gpu
from headrace.engine.resolved import GpuSupport, Resolved
from headrace.machine.probe import Machine
from headrace.machine.threads import choose_threads

__all__ = ["BACKENDS", "BLOCK_TOKENS", "GpuSupport", "Resolved", "resolve"]

BACKENDS = ("triton", "cpu", "reference")
HOST_BACKENDS = ("cpu", "reference")

# Tokens of a step: a matrix product on a CPU is bound by arithmetic, not by reading the weights,
# well below 512 rows, so a longer chunk would only keep the decoding neighbours waiting longer.
DEFAULT_MAX_BATCH_TOKENS = 512
# A server that remembers prefixes fills its KV pool sooner or later. A quarter of what the weights
# leave keeps the pages of mapped weights, and other programs, in memory.
DEFAULT_KV_SHARE = 4
# A plan that leaves less than a twentieth of its budget is worth a warning.
LOW_HEADROOM_SHARE = 20


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    weights_nbytes: int,
    *,
    missing_kernels: str | None = None,
    sizes: ModelSizes | None = None,
    gpu: GpuSupport | None = None,
    kv: KVSupport | None = None,
) -> Resolved:
    """Choose everything, or refuse before a weight is read.

    Args:
        config: what the user chose.
        spec: the model.
        machine: as probed.
        weights_nbytes: bytes of all weight files.
        missing_kernels: why the C++ kernels cannot be used, None if they can.
        sizes: how the weights are stored; needed to choose a GPU.
        gpu: what of this installation could run on one.
        kv: what is there for KV formats that seal pages.

    Raises:
        ConfigError: a value is not possible here, or two contradict each other.
        DoesNotFitError: the model does not fit the memory.
    """
    one_of("--experts", config.experts, EXPERT_MODES)
    sizes = sizes or ModelSizes(weights_nbytes)
    support = gpu or GpuSupport()
    reason = _why_not_gpu(config, machine, support)
    warnings: tuple[str, ...] = ()
    if reason is None:
        try:
            return resolve_on_gpu(config, spec, machine, sizes, support, kv or KVSupport())
        except DoesNotFitError as error:
            if _insists_on_gpu(config):
                raise
            reason = f"{machine.gpus[0].name} is not used: {error.message}"
            warnings = (f"computing on the CPU: {error.message}",)
    elif machine.gpus and config.device == "auto" and config.backend is None:
        warnings = (f"computing on the CPU: {reason}",)
    return _resolve_on_cpu(
        config,
        spec,
        machine,
        weights_nbytes,
        _Host(missing_kernels, reason, warnings, kv or KVSupport()),
    )


@dataclass(frozen=True)
class _Host:
    """Why the CPU: missing C++ kernels, the reason against a GPU, warnings so far."""

    missing_kernels: str | None
    reason: str
    warnings: tuple[str, ...]
    kv: KVSupport


def _resolve_on_cpu(
    config: EngineConfig, spec: ModelSpec, machine: Machine, weights_nbytes: int, host: _Host
) -> Resolved:
    choices: list[Choice] = []

    def chosen(name: str, value: object, reason: str) -> None:
        choices.append(Choice(name, str(value), reason))

    chosen("device", "cpu", host.reason)
    require_expert_store(config, "everything runs on the CPU")
    _experts_on_cpu(config, spec, host.reason, chosen)
    backend = _backend(config, host.missing_kernels, chosen)
    threads = choose_threads(machine.cpu, config.threads, measured=machine.measured_threads)
    chosen("threads", threads.threads, threads.reason)
    kv = choose_kv(
        config, spec, host.kv, backend, (DEFAULT_ON_CPU, "activations are float32 on a CPU"), chosen
    )
    block_tokens = choose_block_tokens(config, chosen, sealed=kv.format.sealed)
    seqs, batch = batch_limits(
        config,
        DEFAULT_MAX_BATCH_TOKENS,
        "larger chunks gain nothing on a CPU and delay others",
        chosen,
    )
    budget = host_budget(config, machine, chosen)

    def workspace(context: int) -> int:
        return workspace_nbytes(
            spec,
            context=context,
            max_batch_tokens=batch,
            max_num_seqs=seqs,
            backend=backend,
        )

    pool = KVPool(spec, kv, block_tokens, seqs, batch)
    room = _HostRoom(pool, block_tokens, weights_nbytes, budget)
    context = choose_context(config, spec, room, workspace, chosen)
    num_blocks = choose_pool(
        config,
        room,
        context=context,
        seqs=seqs,
        workspace=workspace(context),
        share=DEFAULT_KV_SHARE,
        chosen=chosen,
    )
    plan = room.plan(num_blocks * block_tokens, workspace(context))
    plan.require_fit("give a smaller --context or a larger --ram-budget, or --kv-format bf16")
    chosen("memory", megabytes(plan.total_nbytes), plan.describe())
    missing = host.missing_kernels
    return Resolved(
        context=context,
        kv_format=kv.format.name,
        kv_pool=pool.shape(num_blocks),
        kv_rank=kv.rank,
        kv_key=kv.key,
        block_tokens=block_tokens,
        max_batch_tokens=batch,
        max_num_seqs=seqs,
        num_blocks=num_blocks,
        threads=threads.threads,
        backend=backend,
        experts="cpu",
        plan=plan,
        choices=tuple(choices),
        warnings=(
            *host.warnings,
            *kv.warnings,
            *threads.warnings,
            *_warnings(config, backend, missing, plan),
        ),
    )


def _warnings(
    config: EngineConfig, backend: str, missing_kernels: str | None, plan: MemoryPlan
) -> tuple[str, ...]:
    found: list[str] = []
    if backend == "reference" and config.backend is None:
        found.append(f"computing with plain PyTorch, which is many times slower: {missing_kernels}")
    if plan.headroom_nbytes < plan.budget_nbytes // LOW_HEADROOM_SHARE:
        found.append(
            f"little memory is left: {plan.describe()}; when other programs take more, the system "
            "will swap and everything slows down"
        )
    return tuple(found)


@dataclass(frozen=True)
class _HostRoom:
    """Host memory as the KV pool sees it."""

    pool: KVPool
    block_tokens: int
    weights_nbytes: int
    budget_nbytes: int

    def plan(self, kv_tokens: int, workspace: int) -> MemoryPlan:
        return MemoryPlan(
            weights_nbytes=self.weights_nbytes,
            kv_nbytes=self.pool.nbytes(-(-kv_tokens // self.block_tokens)),
            workspace_nbytes=workspace,
            reserve_nbytes=RESERVE_NBYTES,
            budget_nbytes=self.budget_nbytes,
        )

    def tokens(self, workspace: int, share: int = 1) -> int:
        """See ``choosing.Room``."""
        empty = self.plan(0, workspace)
        free = max(0, empty.headroom_nbytes + empty.kv_nbytes)
        return self.pool.blocks_in(free // share) * self.block_tokens


def _why_not_gpu(config: EngineConfig, machine: Machine, support: GpuSupport) -> str | None:
    """Why the CPU computes; None to try the GPU.

    Raises:
        ConfigError: a GPU is asked for and cannot be used, or asked for and ruled out at once.
    """
    device = one_of("--device", config.device, DEVICES)
    backend = one_of("--backend", config.backend, BACKENDS)
    if device == "cpu" or (device == "auto" and backend in HOST_BACKENDS):
        reason = "as configured" if device == "cpu" else f"backend {backend!r} is configured"
    elif not machine.gpus:
        reason = "no GPU was found"
    elif support.missing is not None:
        reason = f"{machine.gpus[0].name} is not used: {support.missing}"
    else:
        if backend == "cpu":
            raise ConfigError(
                "--backend is cpu, but --device is cuda",
                hint="leave one of them out",
                param="--backend",
            )
        return None
    asked = {
        "--device": device == "cuda",
        "--experts": config.experts in ("gpu", "stream", "hybrid"),
        "--vram-budget": config.vram_budget_nbytes is not None,
        "--dense-format": config.dense_format is not None,
        "--backend": backend == "triton",
    }
    values = {
        "--device": device,
        "--experts": config.experts,
        "--vram-budget": megabytes(config.vram_budget_nbytes or 0),
        "--dense-format": config.dense_format,
        "--backend": backend,
    }
    for flag, wanted in asked.items():
        if wanted:
            why_not = "--device is cpu" if device == "cpu" else reason
            raise ConfigError(
                f"{flag} {values[flag]} needs a GPU: {why_not}",
                hint="leave it out, or run `headrace doctor` to see what is missing",
                param=flag,
            )
    return reason


def _insists_on_gpu(config: EngineConfig) -> bool:
    """Whether the user asked for something that only a GPU has."""
    return (
        config.device == "cuda"
        or config.experts in ("gpu", "stream", "hybrid")
        or config.vram_budget_nbytes is not None
        or config.dense_format is not None
        or config.backend == "triton"
    )


def _experts_on_cpu(config: EngineConfig, spec: ModelSpec, reason: str, chosen: Chosen) -> None:
    if config.experts == "cpu":
        reason = "as configured"
    elif spec.moe is None:
        reason = "the model has no experts"
    chosen("experts", "cpu", reason)


def _backend(config: EngineConfig, missing_kernels: str | None, chosen: Chosen) -> str:
    forced = config.backend
    if forced == "cpu" and missing_kernels is not None:
        raise ConfigError(
            f"--backend is cpu, but {missing_kernels}",
            hint="install with a C++20 compiler at hand, or leave it out",
            param="--backend",
        )
    if forced is not None:
        chosen("backend", forced, "as configured")
        return forced
    if missing_kernels is None:
        chosen("backend", "cpu", "the C++ kernels are there")
        return "cpu"
    chosen("backend", "reference", f"plain PyTorch, slow: {missing_kernels}")
    return "reference"
