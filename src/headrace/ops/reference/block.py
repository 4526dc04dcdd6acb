"""Halves of a decoder layer as one operation: what they mean, operation by operation."""

from __future__ import annotations

import time
from array import array

import torch

from headrace.ops.records import AttentionBatch, AttentionBlock, DenseBlock, LayerKV
from headrace.ops.reference.attention import attention, kv_append, rope
from headrace.ops.reference.dense import gated_linear, linear, linear_group, rmsnorm


class Laps:
    """Adds the seconds between its calls to the parts that they end; without ``seconds``, nothing."""

    def __init__(self, seconds: array[float] | None) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def end(self, part: int) -> None:
        if self._seconds is not None:
            now = time.perf_counter()
            self._seconds[part] += now - self._last
            self._last = now


def attention_block(
    x: torch.Tensor,
    block: AttentionBlock,
    cache: LayerKV,
    batch: AttentionBatch,
    seconds: array[float] | None = None,
) -> torch.Tensor:
    """x + o(attention(norm(x))), keys and values appended first: float32 [T, D] -> same.

    seconds: doubles, one for each of ``registry.BLOCKS["attention_block"]``, that grow by the parts' times.
    """
    laps = Laps(seconds)
    heads, kv_heads, dim = block.heads
    normed = rmsnorm(x, block.norm, block.eps)
    laps.end(0)
    q, k, v = linear_group(normed, block.weights[:3], block.biases[:3])
    laps.end(1)
    if block.q_norm is not None:
        q = rmsnorm(q.reshape(-1, block.q_norm.numel()), block.q_norm, block.eps)
    if block.k_norm is not None:
        k = rmsnorm(k.reshape(-1, block.k_norm.numel()), block.k_norm, block.eps)
    laps.end(0)
    q = rope(q.reshape(-1, heads, dim), block.table, batch.positions)
    k = rope(k.reshape(-1, kv_heads, dim), block.table, batch.positions)
    laps.end(2)
    kv_append(k, v.reshape(-1, kv_heads, dim), cache, batch.slots)
    laps.end(3)
    mixed = attention(q, cache, batch, block.scale, block.window, block.sinks)
    laps.end(4)
    out = linear(mixed.reshape(x.shape[0], -1), block.weights[3], block.biases[3], x)
    laps.end(5)
    return out


def dense_block(
    x: torch.Tensor, block: DenseBlock, seconds: array[float] | None = None
) -> torch.Tensor:
    """x + down(act(gate(norm(x)), up(norm(x)))): float32 [T, D] -> same.

    seconds: doubles, one for each of ``registry.BLOCKS["dense_block"]``, that grow by the parts' times.
    """
    laps = Laps(seconds)
    normed = rmsnorm(x, block.norm, block.eps)
    laps.end(0)
    inner = gated_linear(normed, block.gate, block.up, block.act)
    laps.end(1)
    out = linear(inner, block.down, None, x)
    laps.end(2)
    return out
