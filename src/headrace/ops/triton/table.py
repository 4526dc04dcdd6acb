"""The operations of this package, with their tolerances."""

from __future__ import annotations

from headrace.ops.registry import Op
from headrace.ops.triton import block, mixture, products, router, rows, sampling
from headrace.ops.triton.attention_decode import attention_decode
from headrace.ops.triton.attention_prefill import attention_prefill
from headrace.ops.triton.sealed_append import sealed_append
from headrace.ops.triton.sealed_decode import sealed_attention_decode
from headrace.ops.triton.sealed_prefill import sealed_attention_prefill

# float32 element by element; exp and rsqrt of the GPU err by a few units in the last place.
_ELEMENT = 3e-6
# Activations are rounded to bfloat16 (2^-9 relative) before they are multiplied; errors of K products
# add up like sqrt(K) against a sum that does, too. The tests' worst of a few thousand values is 4 units.
_PRODUCT = 1e-2
# Query and probabilities are rounded to a bfloat16 cache's type.
_ATTENTION = 1e-2

OPS: tuple[Op, ...] = (
    Op("embed", "triton", rows.embed, 0.0),
    Op("rmsnorm", "triton", rows.rmsnorm, _ELEMENT),
    Op("linear", "triton", products.linear, _PRODUCT),
    Op("linear_group", "triton", products.linear_group, _PRODUCT),
    Op("gated_linear", "triton", products.gated_linear, _PRODUCT),
    Op("rope", "triton", rows.rope, _ELEMENT),
    Op("kv_append", "triton", rows.kv_append, 0.0),
    Op("attention_prefill", "triton", attention_prefill, _ATTENTION),
    Op("attention_decode", "triton", attention_decode, _ATTENTION),
    Op("sealed_append", "triton", sealed_append, 0.0),
    Op("sealed_attention_prefill", "triton", sealed_attention_prefill, _ATTENTION),
    Op("sealed_attention_decode", "triton", sealed_attention_decode, _ATTENTION),
    Op("router_topk", "triton", router.router_topk, _ELEMENT),
    Op("moe", "triton", mixture.moe, 2 * _PRODUCT),
    Op(
        "attention_block",
        "triton",
        block.attention_block,
        3 * _PRODUCT,
        marks_parts=True,
        takes_sealed=True,
    ),
    Op("dense_block", "triton", block.dense_block, 3 * _PRODUCT, marks_parts=True),
    Op("route", "triton", router.route, _PRODUCT),
    Op("sample", "triton", sampling.sample, 0.0),
)
