"""Attention with its projections, rotary embedding and cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.formats.base import PackedTensor
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm
from headrace.ops.records import AttentionBatch, AttentionBlock, LayerCache, RopeTable, SealedKV
from headrace.ops.registry import OpSet


@dataclass(frozen=True)
class AttentionShape:
    """Counts of one layer. ``window``: tokens that a row sees, None for all of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's weights: q [H * hd, D], k and v [Hkv * hd, D], o [D, H * hd] as stored.

    Biases float32 of the matrix's rows. q_norm and k_norm float32: [hd] (each head by itself) or
    the whole row's size. sinks float32 [H].
    """

    q: PackedTensor
    k: PackedTensor
    v: PackedTensor
    o: PackedTensor
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class Attention:
    """Projects, turns, stores and mixes; adds the residual in the output projection."""

    __slots__ = (
        "_biases",
        "_k_norm",
        "_o",
        "_ops",
        "_post_norm",
        "_q_norm",
        "_scale",
        "_shape",
        "_sinks",
        "_table",
        "_weights",
    )

    def __init__(
        self,
        ops: OpSet,
        weights: AttentionWeights,
        shape: AttentionShape,
        table: RopeTable,
        eps: float,
        *,
        post_norm: Norm | None = None,
        scale: float | None = None,
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._table = table
        self._weights = (weights.q, weights.k, weights.v)
        self._biases = (weights.q_bias, weights.k_bias, weights.v_bias)
        self._o = Linear(ops, weights.o, weights.o_bias)
        self._q_norm = None if weights.q_norm is None else Norm(ops, weights.q_norm, eps)
        self._k_norm = None if weights.k_norm is None else Norm(ops, weights.k_norm, eps)
        self._sinks = weights.sinks
        self._scale = shape.head_dim**-0.5 if scale is None else scale
        self._post_norm = post_norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, batch: AttentionBatch, cache: LayerCache
    ) -> torch.Tensor:
        """x (normalised) and residual: float32 [T, D] -> float32 [T, D]."""
        ops, shape, dim = self._ops, self._shape, self._shape.head_dim
        q, k, v = ops.linear_group(x, self._weights, self._biases)
        if self._q_norm is not None:
            q = self._normed(q, self._q_norm)
        if self._k_norm is not None:
            k = self._normed(k, self._k_norm)
        q = ops.rope(q.view(-1, shape.num_heads, dim), self._table, batch.positions)
        k = ops.rope(k.view(-1, shape.num_kv_heads, dim), self._table, batch.positions)
        v = v.view(-1, shape.num_kv_heads, dim)
        if isinstance(cache, SealedKV):
            ops.sealed_append(k, v, cache, batch)
            prefill, decode = ops.sealed_attention_prefill, ops.sealed_attention_decode
        else:
            ops.kv_append(k, v, cache, batch.slots)
            prefill, decode = ops.attention_prefill, ops.attention_decode
        attend = decode if batch.decode else prefill
        mixed = attend(q, cache, batch, self._scale, shape.window, self._sinks)
        mixed = mixed.view(x.shape[0], -1)
        if self._post_norm is not None:
            return self._post_norm(self._o(mixed)).add_(residual)
        return self._o(mixed, residual)

    @property
    def is_block(self) -> bool:
        """Whether ``block`` tells everything: ``ops.attention_block`` has no second norm."""
        return self._post_norm is None

    @property
    def weights(self) -> tuple[PackedTensor, PackedTensor, PackedTensor, PackedTensor]:
        """q, k, v, o as stored."""
        q, k, v = self._weights
        return q, k, v, self._o.weight

    def block(self, norm: Norm) -> AttentionBlock:
        """This layer behind ``norm`` as one operation, for ``ops.attention_block``."""
        shape = self._shape
        return AttentionBlock(
            norm=norm.weight,
            eps=norm.eps,
            weights=(*self._weights, self._o.weight),
            biases=(*self._biases, self._o.bias),
            q_norm=None if self._q_norm is None else self._q_norm.weight,
            k_norm=None if self._k_norm is None else self._k_norm.weight,
            table=self._table,
            heads=(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            scale=self._scale,
            window=shape.window,
            sinks=self._sinks,
        )

    def _normed(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalise [T, n * hd] in pieces of the norm's own width."""
        return norm(rows.view(-1, norm.width)).view(rows.shape)
