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
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    decode: bool
    valid: torch.Tensor | None = None


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position, float32 [max positions, dim / 2], attention factor included."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool  # pairs (0, 1), (2, 3), ...; else (0, dim / 2), (1, dim / 2 + 1), ...


@dataclass(frozen=True)
class Activation:
    """The gated activation. ``silu``: silu(g) * u. ``swiglu_clamped`` (gpt-oss): with
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
