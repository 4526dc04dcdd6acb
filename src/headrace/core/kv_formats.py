"""The formats of the KV cache as plain data, and how many bytes each takes.

*Plain* formats store every token at once, as it comes. *Sealed* formats keep a page (a KV block) in
bf16 while it fills and quantise it as a whole, once, when its last row is written: the bytes of a
sealed page depend on its keys and values only, so it can be shared, copied and swapped like any
other. ``docs/kv-cache.md`` has the definition, ``headrace.ops.records.SealedKV`` the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# NVFP4: elements that share an E4M3 scale.
KEY_GROUP = 16
# Rows of a sequence's first page whose keys stay in bf16. A sink (the first token) lacks the outlier
# channels of the others, so that centring would add them to it (docs/kv-cache.md, accuracy).
FIRST_TOKENS = 16
# Residual scalars per token: KL stops falling at about four (docs/kv-cache.md, accuracy).
MAX_RANK = 4
# The unit of residual codes, in key scales g: |U^T (k - k^)| <= sqrt(256) * max error, and an error is at
# most one step of the largest E4M3 scale (448 g), so 16 * 448 g is never exceeded by heads up to 256.
RESIDUAL_UNIT = 16.0
MAX_HEAD_DIM = 256
# What is taken where nobody chose one: what tensor cores multiply, and what activations are on a CPU.
DEFAULT_ON_GPU, DEFAULT_ON_CPU = "bf16", "f32"


@dataclass(frozen=True)
class KVFormat:
    """One format of cached keys and values.

    keys: how keys are stored in full pages; values are fp8 in sealed formats.
    centred: keys are stored relative to a bf16 reference vector per page
    first_tokens: rows of a sequence's first page whose keys stay in bf16
    max_rank: residual scalars per token where directions were calibrated, else none
    """

    name: str
    keys: Literal["f32", "bf16", "fp8", "nvfp4"]
    centred: bool = False
    first_tokens: int = 0
    max_rank: int = 0

    @property
    def sealed(self) -> bool:
        return self.keys in ("fp8", "nvfp4")

    @property
    def element_nbytes(self) -> int:
        """Bytes of a number in a page that is not full: bf16 where the format is sealed."""
        return 4 if self.keys == "f32" else 2

    def key_nbytes(self, head_dim: int, rank: int) -> int:
        """Bytes of one token's key of one head in a full page, without what the page shares."""
        if self.keys == "nvfp4":
            return head_dim // 2 + head_dim // KEY_GROUP + rank
        return head_dim * (1 if self.keys == "fp8" else self.element_nbytes)

    def page_nbytes(self, block_tokens: int, head_dim: int, rank: int = 0) -> int:
        """Bytes of one full page of one key/value head, everything included."""
        value = 1 if self.sealed else self.element_nbytes
        nbytes = block_tokens * (self.key_nbytes(head_dim, rank) + value * head_dim)
        if self.sealed:
            nbytes += 2 * 4  # float32 scales of keys and values
        if self.centred:
            nbytes += 2 * head_dim
        return nbytes


FORMATS: dict[str, KVFormat] = {
    f.name: f
    for f in (
        KVFormat("f32", "f32"),
        KVFormat("bf16", "bf16"),
        KVFormat("fp8", "fp8"),
        KVFormat("nvfp4k-fp8v", "nvfp4", True, FIRST_TOKENS, MAX_RANK),
    )
}


@dataclass(frozen=True)
class PoolShape:
    """How large a KV pool is beside its full pages: rows of pages that are not full, and firsts.

    num_blocks: pages of the pool
    num_first: pages 0 to ``num_first - 1`` may be the first of a sequence (``first_keys``)
    num_own: open pages of each layer that live from step to step
    num_shared: open pages that live within one layer of one step, shared by all layers
    """

    num_blocks: int
    block_tokens: int
    num_first: int = 0
    num_own: int = 0
    num_shared: int = 0


# Pages that may start a sequence, as a share of the pool: bf16 keys for 16 tokens of a page in 32
# cost one percent at 64 tokens a page. Prompts that share a beginning share the page.
FIRST_SHARE = 32


def pool_shape(
    kv_format: KVFormat,
    num_blocks: int,
    block_tokens: int,
    *,
    max_num_seqs: int,
    max_batch_tokens: int,
) -> PoolShape:
    """The pool for a format and the limits of a step.

    A sequence has one open page. One that leaves its open page and enters another within one step
    holds both until the step is done, for which it needs two tokens of the step. One shared page is there
    at least: rows that pad a captured step write to it.
    """
    if not kv_format.sealed:
        return PoolShape(num_blocks, block_tokens)
    first = min(num_blocks, max(max_num_seqs, -(-num_blocks // FIRST_SHARE)))
    return PoolShape(
        num_blocks,
        block_tokens,
        num_first=first if kv_format.first_tokens else 0,
        num_own=max_num_seqs + min(max_num_seqs, max_batch_tokens // 2),
        num_shared=max(max_batch_tokens // block_tokens, 1),
    )


def pool_nbytes(
    kv_format: KVFormat,
    shape: PoolShape,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    rank: int = 0,
) -> int:
    """Bytes of a pool over all layers: exactly what ``kv.storage`` allocates."""
    per_head = kv_format.page_nbytes(shape.block_tokens, head_dim, rank) * shape.num_blocks
    per_head += shape.num_first * kv_format.first_tokens * head_dim * 2
    open_page = 2 * shape.block_tokens * head_dim * 2
    per_head += shape.num_own * open_page
    per_head += rank * head_dim * 4  # the residual directions
    return num_kv_heads * (num_layers * per_head + shape.num_shared * open_page)
