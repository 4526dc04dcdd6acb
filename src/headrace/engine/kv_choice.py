"""Which format the KV cache has, and how large it is. Plain Python, decided once."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.config import KV_FORMATS, EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.kv_accuracy import smallest_that_holds
from headrace.core.kv_formats import (
    FORMATS,
    KEY_GROUP,
    MAX_HEAD_DIM,
    MAX_RANK,
    KVFormat,
    PoolShape,
    pool_nbytes,
    pool_shape,
)
from headrace.core.model_spec import ModelSpec
from headrace.engine.choosing import DEFAULT_SEALED_BLOCK_TOKENS, Chosen, one_of, why

# Shared memory that a prefill program over sealed pages takes where heads are above 128, by tokens of a
# page: what Triton 3.6 says of prefill_nvfp4k_fp8v with 64 rows and heads of 256 (fp8 takes less). Smaller
# heads and smaller pages take 97,284 bytes at most; every GPU since Ampere has 101,376.
_WIDE_DIM = 128
# Keys are multiplied in two halves, and a product on tensor cores has at least 16 columns.
_LEAST_DIM = 32
_WIDE_SHARED_NBYTES = {64: 126_980, 128: 186_372}


@dataclass(frozen=True)
class KVSupport:
    """What is there for sealed formats.

    backends: those with kernels for sealed pages
    directions: hash of the residual directions stored for these weights, None if there are none
    shared_nbytes: shared memory that a program on the GPU may have, None if that is not known
    """

    backends: frozenset[str] = frozenset({"reference"})
    directions: str | None = None
    shared_nbytes: int | None = None


@dataclass(frozen=True)
class KVChoice:
    """The format; ``rank``: residual scalars per token; ``key``: what cached prefixes depend on."""

    format: KVFormat
    rank: int
    key: str
    warnings: tuple[str, ...] = ()


def choose_kv(
    config: EngineConfig,
    spec: ModelSpec,
    support: KVSupport,
    backend: str,
    default: tuple[str, str],
    chosen: Chosen,
) -> KVChoice:
    """Choose the format. ``default``: the one for None, and why.

    Raises:
        ConfigError: the format is unknown, or nothing here can compute with it.
    """
    given = one_of("--kv-format", config.kv_format, KV_FORMATS)
    block_tokens = config.block_tokens or DEFAULT_SEALED_BLOCK_TOKENS

    def obstacle_of(made: KVFormat) -> str | None:
        return _obstacle(made, spec, support, backend, block_tokens)

    usable = frozenset(name for name, made in FORMATS.items() if obstacle_of(made) is None)
    if given == "auto":
        rank = 0 if support.directions is None else MAX_RANK
        name, reason = smallest_that_holds(spec.family, rank=rank, usable=usable)
        reason = f"auto: {reason}"
    else:
        name = given or default[0]
        reason = why(given, default[1])
    made = FORMATS[name]
    obstacle = obstacle_of(made)
    if obstacle is not None:
        raise ConfigError(
            f"--kv-format {name}: {obstacle}",
            hint=f"supported here: {', '.join(n for n in FORMATS if n in usable)}",
            param="--kv-format",
        )
    chosen("kv_format", name, reason)
    warnings: tuple[str, ...] = ()
    rank = 0
    if made.max_rank:
        if support.directions is None:
            reason = "no residual directions are stored for these weights"
            warnings += (
                f"{name} without residual scalars, which is less accurate: {reason}; "
                f"`headrace calibrate {config.model}` measures them once",
            )
        else:
            rank, reason = made.max_rank, f"directions {support.directions}"
        chosen("kv_residuals", rank, reason)
    key = f"{name}/{support.directions}" if rank else name
    return KVChoice(made, rank, key, warnings)


def _obstacle(
    made: KVFormat, spec: ModelSpec, support: KVSupport, backend: str, block_tokens: int
) -> str | None:
    """Why a format cannot be used, None if it can."""
    if not made.sealed:
        return None
    if backend not in support.backends:
        return f"the {backend} back-end has no kernel for it"
    if spec.head_dim % KEY_GROUP or spec.head_dim > MAX_HEAD_DIM:
        return (
            f"heads of {spec.head_dim} are not supported: multiples of {KEY_GROUP} up to "
            f"{MAX_HEAD_DIM} are"
        )
    if backend == "triton" and spec.head_dim < _LEAST_DIM:
        return f"heads of {spec.head_dim} are not supported on a GPU: those of {_LEAST_DIM} or more are"
    needed = _WIDE_SHARED_NBYTES.get(block_tokens, 0) if spec.head_dim > _WIDE_DIM else 0
    have = support.shared_nbytes
    if backend == "triton" and have is not None and needed > have:
        return (
            f"heads of {spec.head_dim} in blocks of {block_tokens} tokens take {needed} bytes of shared "
            f"memory, this GPU's programs have {have}; blocks of 32 tokens do (--block-tokens 32)"
        )
    return None


@dataclass(frozen=True)
class KVPool:
    """The size of a pool, for the memory plan."""

    spec: ModelSpec
    choice: KVChoice
    block_tokens: int
    max_num_seqs: int
    max_batch_tokens: int

    def shape(self, num_blocks: int) -> PoolShape:
        return pool_shape(
            self.choice.format,
            num_blocks,
            self.block_tokens,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
        )

    def nbytes(self, num_blocks: int) -> int:
        """Bytes of ``num_blocks`` blocks over all layers, open pages included."""
        return pool_nbytes(
            self.choice.format,
            self.shape(num_blocks),
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            rank=self.choice.rank,
        )

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that do not depend on the number of blocks."""
        return self.nbytes(0)

    def blocks_in(self, nbytes: int) -> int:
        """The most blocks whose pool takes at most ``nbytes``."""
        blocks = max(0, nbytes - self.fixed_nbytes) // (self.nbytes(1) - self.fixed_nbytes)
        if self.choice.format.first_tokens:  # one block may have first keys, few of many do
            per_many = (self.nbytes(1 << 20) - self.fixed_nbytes) / (1 << 20)
            blocks = int(max(0, nbytes - self.fixed_nbytes) / per_many)
            while blocks and self.nbytes(blocks) > nbytes:
                blocks -= 1
        return blocks
