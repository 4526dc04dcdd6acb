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
from headrace.engine.choosing import Chosen, one_of, why


@dataclass(frozen=True)
class KVSupport:
    """What is there for sealed formats.

    backends: those with kernels for sealed pages
    directions: hash of the residual directions stored for these weights, None if there are none
    """

    backends: frozenset[str] = frozenset({"reference"})
    directions: str | None = None


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
    usable = frozenset(n for n in FORMATS if _obstacle(FORMATS[n], spec, support, backend) is None)
    if given == "auto":
        rank = 0 if support.directions is None else MAX_RANK
        name, reason = smallest_that_holds(spec.family, rank=rank, usable=usable)
        reason = f"auto: {reason}"
    else:
        name = given or default[0]
        reason = why(given, default[1])
    made = FORMATS[name]
    obstacle = _obstacle(made, spec, support, backend)
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


def _obstacle(made: KVFormat, spec: ModelSpec, support: KVSupport, backend: str) -> str | None:
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
