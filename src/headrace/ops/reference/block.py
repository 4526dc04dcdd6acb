"""Halves of a decoder layer as one operation: what they mean, operation by operation."""

from __future__ import annotations

import torch

from headrace.ops.records import AttentionBatch, AttentionBlock, DenseBlock, LayerKV
from headrace.ops.reference.attention import attention, kv_append, rope
from headrace.ops.reference.dense import gated_linear, linear, linear_group, rmsnorm


def attention_block(
    x: torch.Tensor, block: AttentionBlock, cache: LayerKV, batch: AttentionBatch
) -> torch.Tensor:
    """x + o(attention(norm(x))), keys and values appended first: float32 [T, D] -> same."""
    heads, kv_heads, dim = block.heads
    normed = rmsnorm(x, block.norm, block.eps)
    q, k, v = linear_group(normed, block.weights[:3], block.biases[:3])
    if block.q_norm is not None:
        q = rmsnorm(q.reshape(-1, block.q_norm.numel()), block.q_norm, block.eps)
    if block.k_norm is not None:
        k = rmsnorm(k.reshape(-1, block.k_norm.numel()), block.k_norm, block.eps)
    q = rope(q.reshape(-1, heads, dim), block.table, batch.positions)
    k = rope(k.reshape(-1, kv_heads, dim), block.table, batch.positions)
    kv_append(k, v.reshape(-1, kv_heads, dim), cache, batch.slots)
    mixed = attention(q, cache, batch, block.scale, block.window, block.sinks)
    return linear(mixed.reshape(x.shape[0], -1), block.weights[3], block.biases[3], x)


def dense_block(x: torch.Tensor, block: DenseBlock) -> torch.Tensor:
    """x + down(act(gate(norm(x)), up(norm(x)))): float32 [T, D] -> same."""
    normed = rmsnorm(x, block.norm, block.eps)
    inner = gated_linear(normed, block.gate, block.up, block.act)
    return linear(inner, block.down, None, x)
