"""Records that operations take beside plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.formats.base import PackedTensor


@dataclass(frozen=True)
class LayerKV:
    """The paged keys and values of one layer.

    keys, values: [num_blocks, kv_heads, block_tokens, head_dim], float32 or bfloat16. Token ``t``
    of a sequence lies in block ``block_table[t // block_tokens]``, row ``t % block_tokens``.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True)
class SealedKV:
    """The paged keys and values of one layer, quantised page by page.

    P = tokens of a page (block), D = head_dim, b = block, h = key/value head, t = row in the page.
    A page that is full lies in the tensors indexed by block; one that is not, and those that are
    filled within the step, lie in bf16 in an *open* page (``OpenBatch``).

    key_codes: uint8 [num_blocks, Hkv, P, D / 2], NVFP4: byte i holds channel i in its low nibble and
        channel i + D / 2 in its high one; or uint8 [num_blocks, Hkv, P, D], E4M3, for ``fp8``
    key_scales: uint8 [num_blocks, Hkv, P, D / 16] or None: E4M3; scale j belongs to the bytes 8 j to
        8 j + 7, that is to channels 8 j ... 8 j + 7 and D / 2 + 8 j ... D / 2 + 8 j + 7
    key_residuals: uint8 [num_blocks, Hkv, P, R] or None: E4M3, in units of 16 g
    key_refs: bfloat16 [num_blocks, Hkv, D] or None: the page's reference vector r
    value_codes: uint8 [num_blocks, Hkv, D, P], E4M3, transposed
    page_scales: float32 [num_blocks, Hkv, 2]: key scale g and value scale, both powers of two
    first_keys: bfloat16 [num_first, Hkv, 16, D] or None: keys of rows 0 to 15 of a page that is its
        sequence's first, by block (such blocks have ids below num_first); their codes are zero
    directions: float32 [Hkv, R, D] or None: the rows of U^T
    open_keys, open_values: bfloat16 [num_shared + layers * num_own, Hkv, P, D]: the open pages of
        all layers; slot n of this layer is row n where n < num_shared, else n + open_offset

    The key that a reader of a full page sees, with codes c, scales s and residuals e::

        k = r + g * s * E2M1[c] + U (16 g e),   v = value_scale * E4M3[value code]
    """

    key_codes: torch.Tensor
    key_scales: torch.Tensor | None
    key_residuals: torch.Tensor | None
    key_refs: torch.Tensor | None
    value_codes: torch.Tensor
    page_scales: torch.Tensor
    first_keys: torch.Tensor | None
    directions: torch.Tensor | None
    open_keys: torch.Tensor
    open_values: torch.Tensor
    num_shared: int
    open_offset: int

    @property
    def block_tokens(self) -> int:
        return self.key_codes.shape[2]

    @property
    def head_dim(self) -> int:
        return self.value_codes.shape[2]

    @property
    def rank(self) -> int:
        return 0 if self.key_residuals is None else self.key_residuals.shape[3]


LayerCache = LayerKV | SealedKV


@dataclass(frozen=True)
class OpenBatch:
    """Where a step's rows lie while their pages fill; only for ``SealedKV``.

    rows: int64 [T], where each row's key goes: open slot * P + row in the page
    pages: int32 [S, W], the open slot of each page that the sequence writes to in this step, from
        that of its first new row on; unused entries are 0. Decoding has W = 1.
    seals: int32 [N, 3], the pages that become full: block, open slot, and 1 if it is the first page
        of its sequence, else 0. Rows whose block is negative are padding.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    seals: torch.Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch: the rows of sequence ``s`` are ``query_start[s]`` to ``query_start[s + 1]``.

    Its rows are the last tokens of the sequence: row ``r`` has position ``positions[r]`` and sees
    the keys of positions 0 to ``positions[r]`` (those within the window, if there is one).

    query_start: int32 [S + 1]
    context_lens: int32 [S], tokens of each sequence once this step's are appended
    block_tables: int32 [S, max_blocks], unused entries are 0
    positions: int64 [T]
    slots: int64 [T], where each row's key goes: block * block_tokens + row in the block
    decode: every sequence has exactly one row
    valid: bool [T], False for rows that pad a captured batch: their keys go to a block of nobody's,
        and no expert is computed for them. None: every row counts.
    open: where the rows of pages that are not full lie, for caches whose pages are sealed
    pieces: of a long batch, its rows in parts whose keys are appended and attended one after the other, so
        that what attention needs for each row is short-lived; empty: all rows at once
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    decode: bool
    valid: torch.Tensor | None = None
    open: OpenBatch | None = None
    pieces: tuple[AttentionBatch, ...] = ()


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position, float32 [max positions, dim / 2], attention factor included."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool  # pairs (0, 1), (2, 3), ...; else (0, dim / 2), (1, dim / 2 + 1), ...


@dataclass(frozen=True)
class Activation:
    """The gated activation. ``silu``: silu(g) * u. ``gelu_tanh``: gelu(g) * u with the tanh form,
    g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))). ``swiglu_clamped`` (gpt-oss): with
    g = min(gate, limit) and u = clamp(up, -limit, limit): g * sigmoid(alpha * g) * (u + 1)."""

    kind: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class AttentionBlock:
    """One layer's attention with its norm and residual: what ``ops.attention_block`` needs.

    norm: float32 [D]; q [H * hd, D], k, v [Hkv * hd, D], o [D, H * hd] as stored; biases float32 or
    None; q_norm, k_norm: float32 [hd] (each head) or [rows] (the whole row), or None
    """

    norm: torch.Tensor
    eps: float
    weights: tuple[PackedTensor, PackedTensor, PackedTensor, PackedTensor]  # q, k, v, o
    biases: tuple[torch.Tensor | None, ...]  # of the same
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    table: RopeTable
    heads: tuple[int, int, int]  # H, Hkv, head_dim
    scale: float
    window: int | None
    sinks: torch.Tensor | None


@dataclass(frozen=True)
class DenseBlock:
    """One layer's dense feed-forward with its norm and residual: for ``ops.dense_block``."""

    norm: torch.Tensor
    eps: float
    gate: PackedTensor
    up: PackedTensor
    down: PackedTensor
    act: Activation


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's experts, each matrix a view into the checkpoint; biases float32 or None.

    Interleaved gate/up rows (gpt-oss) arrive as two row-strided views of one tensor, so that no
    operation needs to know about it.

    gate, up: [intermediate, hidden]; down: [hidden, intermediate], one per expert
    gate_bias, up_bias: [experts, intermediate]; down_bias: [experts, hidden]
    """

    gate: Sequence[PackedTensor]
    up: Sequence[PackedTensor]
    down: Sequence[PackedTensor]
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


# How a token is chosen, five numbers of a row: temperature (0: the largest logit, -1: not at all), min_p,
# top_k (0: off), top_p, and the uniform number in [0, 1) that picks.
Rule = tuple[float, float, float, float, float]
GREEDY_RULE: Rule = (0.0, 0.0, 0.0, 1.0, 0.0)
NO_RULE: Rule = (-1.0, 0.0, 0.0, 1.0, 0.0)
