"""The operations of this back-end, as the registry reads them."""

from __future__ import annotations

from headrace.ops.cpu.attention import attention, kv_append
from headrace.ops.cpu.block import attention_block, dense_block
from headrace.ops.cpu.linear import embed, gated_linear, linear, linear_group, moe
from headrace.ops.cpu.rows import rmsnorm, rope, router_topk
from headrace.ops.cpu.sealed import sealed_append, sealed_attention
from headrace.ops.registry import Op

# Largest difference to a float64 oracle over the largest value. A float32 sum in 16 lanes over K up
# to 4,096 is off by up to K / 16 + 4 roundings of 2^-24 each in the worst case: 1.5e-5; seen: 1e-6.
SUM_TOLERANCE = 2e-5
ROW_TOLERANCE = 2e-6

OPS = (
    Op("embed", "cpu", embed, 0.0),
    Op("rmsnorm", "cpu", rmsnorm, ROW_TOLERANCE),
    Op("linear", "cpu", linear, SUM_TOLERANCE),
    Op("linear_group", "cpu", linear_group, SUM_TOLERANCE),
    Op("gated_linear", "cpu", gated_linear, SUM_TOLERANCE),
    Op("rope", "cpu", rope, ROW_TOLERANCE),
    Op("kv_append", "cpu", kv_append, 0.0),
    Op("attention_prefill", "cpu", attention, SUM_TOLERANCE),
    Op("attention_decode", "cpu", attention, SUM_TOLERANCE),
    Op("sealed_append", "cpu", sealed_append, 0.0),
    Op("sealed_attention_prefill", "cpu", sealed_attention, SUM_TOLERANCE),
    Op("sealed_attention_decode", "cpu", sealed_attention, SUM_TOLERANCE),
    Op("router_topk", "cpu", router_topk, ROW_TOLERANCE),
    Op("moe", "cpu", moe, SUM_TOLERANCE),
    # Two or three products in a row, each within its own.
    Op("attention_block", "cpu", attention_block, 3 * SUM_TOLERANCE, times_parts=True),
    Op("dense_block", "cpu", dense_block, 3 * SUM_TOLERANCE, times_parts=True),
)
