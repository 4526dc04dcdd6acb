"""Halves of a decoder layer as one operation: fewer launches, and activations rounded where they are made.

A decoding step of 16-bit weights takes the fused way: what is multiplied next is written in the weights'
type at once, and queries turn in the kernel that fills the cache (or, where its pages are sealed, in that
of the keys). Everything else goes operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.formats.base import PackedTensor
from headrace.ops.records import AttentionBatch, AttentionBlock, DenseBlock, LayerCache, SealedKV
from headrace.ops.registry import BLOCKS
from headrace.ops.triton import products, rows
from headrace.ops.triton.attention_decode import attention_decode
from headrace.ops.triton.attention_prefill import attention_prefill
from headrace.ops.triton.few_rows import MAX_ROWS, gated_few, linear_few
from headrace.ops.triton.sealed_append import sealed_append
from headrace.ops.triton.sealed_decode import sealed_attention_decode
from headrace.ops.triton.sealed_prefill import sealed_attention_prefill

_HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Places of the parts, for marks.
_NORM, _QKV, _ROPE, _APPEND, _ATTENTION, _OUTPUT = range(len(BLOCKS["attention_block"]))
_DENSE_NORM, _GATED, _DOWN = range(len(BLOCKS["dense_block"]))

Mark = Callable[[int], None]


def _nobody(part: int) -> None:
    """Marks of a block that nobody watches."""


def attention_block(
    x: torch.Tensor,
    block: AttentionBlock,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    mark: Mark = _nobody,
) -> torch.Tensor:
    """x + o(attention(norm(x))), keys and values appended first: float32 [T, D] -> same."""
    heads, kv_heads, dim = block.heads
    dtype = _fused_dtype(x, block.weights) if batch.decode else None
    normed = rows.rmsnorm(x, block.norm, block.eps, dtype or torch.float32)
    mark(_NORM)
    group = linear_few if dtype is not None else products.linear_group
    q, k, v = group(normed, block.weights[:3], block.biases[:3])
    mark(_QKV)
    if block.q_norm is not None:
        q = rows.rmsnorm(q.view(-1, block.q_norm.numel()), block.q_norm, block.eps)
    if block.k_norm is not None:
        k = rows.rmsnorm(k.view(-1, block.k_norm.numel()), block.k_norm, block.eps)
    q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
    shape = (block.scale, block.window, block.sinks)
    if isinstance(cache, SealedKV):
        rows.rope_pair(q, k, block.table, batch.positions)
        mark(_ROPE)
        sealed_append(k, v, cache, batch)
        mark(_APPEND)
        attend = sealed_attention_decode if batch.decode else sealed_attention_prefill
        mixed = attend(q, cache, batch, *shape)
    else:
        output = block.weights[3].parts["data"] if dtype is not None else None
        rows.rope_append(q, k, v, block.table, batch, cache, output)
        mark(_ROPE)
        if not batch.decode:
            mixed = attention_prefill(q, cache, batch, *shape)
        else:
            mixed = attention_decode(q, cache, batch, *shape, dtype or torch.float32)
    mark(_ATTENTION)
    flat = mixed.view(x.shape[0], -1)
    if dtype is not None:
        out = linear_few(flat, block.weights[3:], block.biases[3:], x)[0]
    else:
        out = products.linear(flat, block.weights[3], block.biases[3], x)
    mark(_OUTPUT)
    return out


def dense_block(x: torch.Tensor, block: DenseBlock, *, mark: Mark = _nobody) -> torch.Tensor:
    """x + down(act(gate(norm(x)), up(norm(x)))): float32 [T, D] -> same."""
    dtype = _fused_dtype(x, (block.gate, block.up, block.down))
    normed = rows.rmsnorm(x, block.norm, block.eps, dtype or torch.float32)
    mark(_DENSE_NORM)
    if dtype is None:
        inner = products.gated_linear(normed, block.gate, block.up, block.act)
        mark(_GATED)
        out = products.linear(inner, block.down, None, x)
    else:
        inner = gated_few(normed, block.gate, block.up, block.act, dtype)
        mark(_GATED)
        out = linear_few(inner, (block.down,), (None,), x)[0]
    mark(_DOWN)
    return out


def _fused_dtype(x: torch.Tensor, weights: tuple[PackedTensor, ...]) -> torch.dtype | None:
    """The one 16-bit type of all weights, if the rows are few."""
    formats = {w.format for w in weights}
    if len(formats) > 1 or not 0 < x.shape[0] <= MAX_ROWS:
        return None
    return _HALVES.get(formats.pop())
