"""Configuration + model + machine -> choices, each with its reason. Plain Python, decided once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headrace.core.config import EXPERT_MODES, KV_FORMATS, EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.model_spec import ModelSpec
from headrace.core.status import Choice
from headrace.engine.memory_plan import (
    KV_ELEMENT_NBYTES,
    RESERVE_NBYTES,
    MemoryPlan,
    kv_nbytes,
    workspace_nbytes,
)
from headrace.machine.probe import Machine
from headrace.machine.threads import choose_threads

BLOCK_TOKENS = (16, 32, 64, 128)
BACKENDS = ("cpu", "reference")

# Sequences at once. Decoding reads the weights once for all of them, and each adds attention and
# sampling only; more than this wait, which shows in the queue and not in everybody's speed.
DEFAULT_MAX_NUM_SEQS = 16
# Tokens of a step: a matrix product on a CPU is bound by arithmetic, not by reading the weights,
# well below 512 rows, so a longer chunk would only keep the decoding neighbours waiting longer.
DEFAULT_MAX_BATCH_TOKENS = 512
# Small blocks lose fewer tokens at the end of a shared prefix (half a block on average), large ones
# make attention read longer runs: a head's keys in a block of 32 x 64 float32 are two 4 KiB pages.
DEFAULT_BLOCK_TOKENS = 32
# A server that remembers prefixes fills its KV pool sooner or later. A quarter of what the weights
# leave keeps the pages of mapped weights, and other programs, in memory.
DEFAULT_KV_SHARE = 4
# What is free now is not free later: the rest of the system gets a tenth.
SYSTEM_SHARE = 10
# A plan that leaves less than a twentieth of its budget is worth a warning.
LOW_HEADROOM_SHARE = 20
# A context that holds no useful question and answer is refused rather than offered.
MIN_CONTEXT = 256


@dataclass(frozen=True)
class Resolved:
    """Every choice, fixed for the engine's life; ``choices`` says why for each."""

    context: int
    kv_format: str
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

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    weights_nbytes: int,
    *,
    missing_kernels: str | None = None,
) -> Resolved:
    """Choose everything, or refuse before a weight is read.

    Args:
        config: what the user chose.
        spec: the model.
        machine: as probed.
        weights_nbytes: bytes of all weight files.
        missing_kernels: why the C++ kernels cannot be used, None if they can.

    Raises:
        ConfigError: a value is not possible here, or two contradict each other.
        DoesNotFitError: the model does not fit the memory.
    """
    choices: list[Choice] = []

    def chosen(name: str, value: object, reason: str) -> None:
        choices.append(Choice(name, str(value), reason))

    experts = _experts(config, spec, machine, chosen)
    backend = _backend(config, missing_kernels, chosen)
    threads = choose_threads(machine.cpu, config.threads)
    chosen("threads", threads.threads, threads.reason)
    kv_format = _one_of("--kv-format", config.kv_format, KV_FORMATS)
    chosen("kv_format", kv_format or "f32", _why(kv_format, "activations are float32 on a CPU"))
    kv_format = kv_format or "f32"
    block_tokens = _one_of("block_tokens", config.block_tokens, BLOCK_TOKENS)
    chosen(
        "block_tokens",
        block_tokens or DEFAULT_BLOCK_TOKENS,
        _why(block_tokens, "a shared prefix loses half a block on average, attention reads runs"),
    )
    block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
    seqs, batch = _batch_limits(config, chosen)
    budget = _budget(config, machine, chosen)

    def workspace(context: int) -> int:
        return workspace_nbytes(
            spec,
            context=context,
            max_batch_tokens=batch,
            max_num_seqs=seqs,
            backend=backend,
        )

    room = _Room(spec, kv_format, block_tokens, weights_nbytes, budget)
    context = _context(config, spec, room, workspace, chosen)
    num_blocks = _pool(config, room, context, seqs, workspace(context), chosen)
    plan = room.plan(num_blocks * block_tokens, workspace(context))
    plan.require_fit("give a smaller --context or a larger --ram-budget, or --kv-format bf16")
    chosen("memory", f"{plan.total_nbytes} bytes", plan.describe())
    return Resolved(
        context=context,
        kv_format=kv_format,
        block_tokens=block_tokens,
        max_batch_tokens=batch,
        max_num_seqs=seqs,
        num_blocks=num_blocks,
        threads=threads.threads,
        backend=backend,
        experts=experts,
        plan=plan,
        choices=tuple(choices),
        warnings=(*threads.warnings, *_warnings(config, backend, missing_kernels, plan)),
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


Chosen = Callable[[str, object, str], None]


@dataclass(frozen=True)
class _Room:
    """Memory as the KV pool sees it."""

    spec: ModelSpec
    kv_format: str
    block_tokens: int
    weights_nbytes: int
    budget_nbytes: int

    def plan(self, kv_tokens: int, workspace: int) -> MemoryPlan:
        return MemoryPlan(
            weights_nbytes=self.weights_nbytes,
            kv_nbytes=kv_nbytes(self.spec, kv_tokens, self.kv_format),
            workspace_nbytes=workspace,
            reserve_nbytes=RESERVE_NBYTES,
            budget_nbytes=self.budget_nbytes,
        )

    def tokens(self, workspace: int, share: int = 1) -> int:
        """Tokens of KV, in whole blocks, in 1 / ``share`` of what the rest of the plan leaves."""
        per_token = self.spec.kv_nbytes_per_token(KV_ELEMENT_NBYTES[self.kv_format])
        free = max(0, self.plan(0, workspace).headroom_nbytes)
        return free // share // per_token // self.block_tokens * self.block_tokens


def _why(given: object, otherwise: str) -> str:
    return otherwise if given is None else "as configured"


T = TypeVar("T")


def _one_of(name: str, value: T | None, allowed: tuple[T, ...]) -> T | None:
    if value is not None and value not in allowed:
        known = ", ".join(map(str, allowed))
        raise ConfigError(f"{name} is {value!r}; supported: {known}", param=name)
    return value


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)
    return value


def _experts(config: EngineConfig, spec: ModelSpec, machine: Machine, chosen: Chosen) -> str:
    mode = _one_of("--experts", config.experts, EXPERT_MODES)
    if machine.gpus:
        reason = f"{machine.gpus[0].name} is not used: this release computes on the CPU"
    else:
        reason = "no GPU was found"
    if mode in ("gpu", "stream", "hybrid"):
        raise ConfigError(
            f"--experts {mode} needs a GPU: {reason}",
            hint="leave it out, or give --experts cpu",
            param="--experts",
        )
    if config.vram_budget_nbytes is not None:
        raise ConfigError(
            f"--vram-budget is {config.vram_budget_nbytes} bytes, but {reason}",
            hint="leave it out; --ram-budget limits host memory",
            param="--vram-budget",
        )
    if spec.moe is None:
        reason = "the model has no experts"
    chosen("experts", "cpu", "as configured" if mode == "cpu" else reason)
    return "cpu"


def _backend(config: EngineConfig, missing_kernels: str | None, chosen: Chosen) -> str:
    forced = _one_of("backend", config.backend, BACKENDS)
    if forced == "cpu" and missing_kernels is not None:
        raise ConfigError(
            f"backend is 'cpu', but {missing_kernels}",
            hint="install with a C++20 compiler at hand, or leave it out",
            param="backend",
        )
    if forced is not None:
        chosen("backend", forced, "as configured")
        return forced
    if missing_kernels is None:
        chosen("backend", "cpu", "the C++ kernels are there")
        return "cpu"
    chosen("backend", "reference", f"plain PyTorch, slow: {missing_kernels}")
    return "reference"


def _batch_limits(config: EngineConfig, chosen: Chosen) -> tuple[int, int]:
    """Sequences at once and tokens of a step."""
    seqs = _positive("max_num_seqs", config.max_num_seqs)
    batch = _positive("max_batch_tokens", config.max_batch_tokens)
    if seqs is None:
        seqs = min(DEFAULT_MAX_NUM_SEQS, batch or DEFAULT_MAX_NUM_SEQS)
        chosen("max_num_seqs", seqs, "more wait, so that those that run keep their speed")
    else:
        chosen("max_num_seqs", seqs, "as configured")
    if batch is None:
        batch = max(DEFAULT_MAX_BATCH_TOKENS, seqs)
        chosen("max_batch_tokens", batch, "larger chunks gain nothing on a CPU and delay others")
    else:
        chosen("max_batch_tokens", batch, "as configured")
    if batch < seqs:
        raise ConfigError(
            f"max_batch_tokens is {batch}, less than one token for each of max_num_seqs {seqs}",
            param="max_batch_tokens",
        )
    return seqs, batch


def _budget(config: EngineConfig, machine: Machine, chosen: Chosen) -> int:
    """Bytes of host memory that all of our processes may use, mapped weights included."""
    total, available = machine.memory.usable_total_nbytes, machine.memory.usable_available_nbytes
    if config.ram_budget_nbytes is None:
        budget = available - available // SYSTEM_SHARE
        chosen("ram_budget", budget, f"what is available now, less 1/{SYSTEM_SHARE} for others")
        return budget
    if config.ram_budget_nbytes > total:
        raise ConfigError(
            f"--ram-budget is {config.ram_budget_nbytes} bytes; this machine (or its container) "
            f"has {total}",
            hint="give less, or leave it out",
            param="--ram-budget",
        )
    chosen("ram_budget", config.ram_budget_nbytes, "as configured")
    return config.ram_budget_nbytes


def _context(
    config: EngineConfig,
    spec: ModelSpec,
    room: _Room,
    workspace: Callable[[int], int],
    chosen: Chosen,
) -> int:
    wanted = _positive("--context", config.context)
    pool = _positive("kv_tokens", config.kv_tokens)
    if wanted is not None and wanted > spec.max_context:
        raise ConfigError(
            f"--context is {wanted}; the model's own limit is {spec.max_context} tokens",
            hint=f"give at most --context {spec.max_context}",
            param="--context",
        )
    if wanted is not None and pool is not None and pool < wanted:
        raise ConfigError(
            f"kv_tokens is {pool}, less than one sequence of --context {wanted}",
            hint="raise kv_tokens or lower --context",
            param="kv_tokens",
        )
    if wanted is not None:
        chosen("context", wanted, "as configured")
        return wanted
    if pool is not None and pool < spec.max_context:
        chosen("context", pool, "the KV pool's size, as configured")
        return pool
    fits = room.tokens(workspace(spec.max_context))
    if fits >= spec.max_context:
        chosen("context", spec.max_context, "the model's own limit")
        return spec.max_context
    # The workspace shrinks with the context; what fits beside a smaller one is a little more.
    fits = room.tokens(workspace(max(fits, MIN_CONTEXT)))
    smallest = min(MIN_CONTEXT, spec.max_context)
    if fits < smallest:
        plan = room.plan(smallest, workspace(smallest))
        plan.require_fit("choose a smaller model or format, or free memory")
        raise DoesNotFitError(f"no context of {smallest} tokens fits: {plan.describe()}")
    chosen("context", fits, f"what fits in memory; the model's own limit is {spec.max_context}")
    return fits


def _pool(
    config: EngineConfig, room: _Room, context: int, seqs: int, workspace: int, chosen: Chosen
) -> int:
    """Blocks of the KV pool: at least one whole sequence."""
    size = room.block_tokens
    if config.kv_tokens is not None:
        blocks = -(-config.kv_tokens // size)
        chosen("kv_tokens", blocks * size, "as configured, in whole blocks")
        return blocks
    one = -(-context // size)
    share = room.tokens(workspace, DEFAULT_KV_SHARE) // size
    blocks = max(one, min(one * seqs, share))
    if blocks == one * seqs:
        reason = "the whole context for every sequence"
    elif blocks == one:
        reason = "one whole context"
    else:
        reason = f"1/{DEFAULT_KV_SHARE} of the memory that the rest leaves"
    chosen("kv_tokens", blocks * size, reason + "; pages are touched on first use")
    return blocks
