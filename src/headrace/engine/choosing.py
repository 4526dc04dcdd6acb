"""What choices have in common on every device: checks of single values, limits, context, KV pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.model_spec import ModelSpec
from headrace.core.words import counted
from headrace.engine.memory_plan import megabytes
from headrace.machine.probe import Machine

BLOCK_TOKENS = (16, 32, 64, 128)

# Sequences at once. Decoding reads the weights once for all of them, and each adds attention and
# sampling only; more than this wait, which shows in the queue and not in everybody's speed.
DEFAULT_MAX_NUM_SEQS = 16
# Small blocks lose fewer tokens at the end of a shared prefix (half a block on average), large ones
# make attention read longer runs: a head's keys in a block of 32 x 64 float32 are two 4 KiB pages.
DEFAULT_BLOCK_TOKENS = 32
# Sealed pages share a reference vector and scales: 2 % of 64 tokens, and pages of 32 to 128 are about
# equally accurate (docs/kv-cache.md).
DEFAULT_SEALED_BLOCK_TOKENS = 64
# What is free now is not free later: the rest of the system gets a tenth.
SYSTEM_SHARE = 10
# A context that holds no useful question and answer is refused rather than offered.
MIN_CONTEXT = 256

Chosen = Callable[[str, object, str], None]  # name, value, reason
T = TypeVar("T")


class Plan(Protocol):
    """A memory plan against a budget."""

    @property
    def headroom_nbytes(self) -> int: ...
    def describe(self) -> str: ...
    def require_fit(self, hint: str) -> None: ...


class Room(Protocol):
    """Memory as the KV pool sees it."""

    @property
    def block_tokens(self) -> int: ...

    def plan(self, kv_tokens: int, workspace: int, /) -> Plan: ...

    def tokens(self, workspace: int, share: int = 1, /) -> int:
        """Tokens of KV, in whole blocks, in 1 / ``share`` of what the rest of the plan leaves."""
        ...


def why(given: object, otherwise: str) -> str:
    """The reason of a choice: that it was given, or ours."""
    return otherwise if given is None else "as configured"


def one_of(name: str, value: T | None, allowed: tuple[T, ...]) -> T | None:
    """``value``, if it is None or allowed.

    Raises:
        ConfigError: it is neither.
    """
    if value is not None and value not in allowed:
        known = ", ".join(map(str, allowed))
        raise ConfigError(f"{name} is {value!r}; supported: {known}", param=name)
    return value


def positive(name: str, value: int | None) -> int | None:
    """``value``, if it is None or at least 1.

    Raises:
        ConfigError: it is less.
    """
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)
    return value


def choose_block_tokens(config: EngineConfig, chosen: Chosen, *, sealed: bool = False) -> int:
    """Tokens of a KV block. ``sealed``: blocks are quantised as a whole."""
    given = one_of("--block-tokens", config.block_tokens, BLOCK_TOKENS)
    size = given or (DEFAULT_SEALED_BLOCK_TOKENS if sealed else DEFAULT_BLOCK_TOKENS)
    reason = "a shared prefix loses half a block on average, attention reads runs"
    if sealed:
        reason = "what a page shares costs 2 %"
    chosen("block_tokens", size, why(given, reason))
    return size


def batch_limits(
    config: EngineConfig, default_tokens: int, reason: str, chosen: Chosen
) -> tuple[int, int]:
    """Sequences at once and tokens of a step; ``default_tokens`` for ``reason``."""
    seqs = positive("--max-num-seqs", config.max_num_seqs)
    batch = positive("--max-batch-tokens", config.max_batch_tokens)
    if seqs is None:
        seqs = min(DEFAULT_MAX_NUM_SEQS, batch or DEFAULT_MAX_NUM_SEQS)
        chosen("max_num_seqs", seqs, "more wait, so that those that run keep their speed")
    else:
        chosen("max_num_seqs", seqs, "as configured")
    if batch is None:
        batch = max(default_tokens, seqs)
        chosen("max_batch_tokens", batch, reason)
    else:
        chosen("max_batch_tokens", batch, "as configured")
    if batch < seqs:
        raise ConfigError(
            f"--max-batch-tokens is {batch}, less than one token for each of --max-num-seqs {seqs}",
            hint="raise the first or lower the second",
            param="--max-batch-tokens",
        )
    return seqs, batch


def host_budget(config: EngineConfig, machine: Machine, chosen: Chosen) -> int:
    """Bytes of host memory that all of our processes may use, mapped weights included.

    Raises:
        ConfigError: more is configured than the machine has.
    """
    total, available = machine.memory.usable_total_nbytes, machine.memory.usable_available_nbytes
    if config.ram_budget_nbytes is None:
        budget = available - available // SYSTEM_SHARE
        chosen(
            "ram_budget",
            megabytes(budget),
            f"what is available now, less 1/{SYSTEM_SHARE} for others",
        )
        return budget
    if config.ram_budget_nbytes > total:
        raise ConfigError(
            f"--ram-budget is {megabytes(config.ram_budget_nbytes)}; this machine (or its container) "
            f"has {megabytes(total)}",
            hint="give less, or leave it out",
            param="--ram-budget",
        )
    chosen("ram_budget", megabytes(config.ram_budget_nbytes), "as configured")
    return config.ram_budget_nbytes


def require_expert_store(config: EngineConfig, where: str | None) -> None:
    """Refuse what is only about experts in host memory where none are kept there.

    Args:
        where: where the experts lie instead; None if they are in host memory.

    Raises:
        ConfigError: names the flag.
    """
    given = {
        "--pin-budget": config.pin_budget_nbytes,
        "--expert-disk": config.expert_disk,
        "--expert-slots": config.expert_slots,
    }
    for flag, value in given.items():
        if value is not None and where is not None:
            raise ConfigError(
                f"{flag} is given, but no experts are kept in host memory for a GPU: {where}",
                hint=f"leave {flag} out, or choose --experts hybrid or stream",
                param=flag,
            )


def choose_context(
    config: EngineConfig,
    spec: ModelSpec,
    room: Room,
    workspace: Callable[[int], int],
    chosen: Chosen,
) -> int:
    """Tokens that a sequence may hold.

    Args:
        workspace: bytes of the largest step, by context.

    Raises:
        ConfigError: what is configured is more than the model has, or contradicts itself.
        DoesNotFitError: not even a small one fits.
    """
    wanted = positive("--context", config.context)
    pool = positive("--kv-tokens", config.kv_tokens)
    if wanted is not None and wanted > spec.max_context:
        raise ConfigError(
            f"--context is {wanted}; the model's own limit is {counted(spec.max_context, 'token')}",
            hint=f"give at most --context {spec.max_context}",
            param="--context",
        )
    if wanted is not None and pool is not None and pool < wanted:
        raise ConfigError(
            f"--kv-tokens is {pool}, less than one sequence of --context {wanted}",
            hint="raise --kv-tokens or lower --context",
            param="--kv-tokens",
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
        larger = "raise --ram-budget" if config.ram_budget_nbytes is not None else "free memory"
        plan.require_fit(f"choose a smaller model or format, or {larger}")
        raise DoesNotFitError(f"no context of {smallest} tokens fits: {plan.describe()}")
    chosen("context", fits, f"what fits in memory; the model's own limit is {spec.max_context}")
    return fits


def choose_pool(
    config: EngineConfig,
    room: Room,
    *,
    context: int,
    seqs: int,
    workspace: int,
    share: int,
    chosen: Chosen,
) -> int:
    """Blocks of the KV pool: at least one whole sequence, by default in 1 / ``share`` of the room."""
    size = room.block_tokens
    if config.kv_tokens is not None:
        blocks = -(-config.kv_tokens // size)
        chosen("kv_tokens", blocks * size, "as configured, in whole blocks")
        return blocks
    one = -(-context // size)
    part = room.tokens(workspace, share) // size
    blocks = max(one, min(one * seqs, part))
    if blocks == one * seqs:
        reason = "the whole context for every sequence"
    elif blocks == one:
        reason = "one whole context"
    else:
        reason = f"1/{share} of the memory that the rest leaves"
    chosen("kv_tokens", blocks * size, reason)
    return blocks
