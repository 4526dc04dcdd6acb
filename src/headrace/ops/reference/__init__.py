"""Every operation in plain, readable PyTorch: the oracle of the parity tests, and the fallback."""

from headrace.ops.reference import attention, attention_lowbit, block, dense, mixture, sampling
from headrace.ops.registry import Op

# Largest |difference| / largest |value| to a float64 oracle: sums of up to a few thousand float32
# products, each rounded to 2^-24, err by about sqrt(K) * 6e-8.
_SUM = 1e-5
_ELEMENT = 1e-6

OPS: tuple[Op, ...] = (
    Op("embed", "reference", dense.embed, 0.0),
    Op("rmsnorm", "reference", dense.rmsnorm, _ELEMENT),
    Op("linear", "reference", dense.linear, _SUM),
    Op("linear_group", "reference", dense.linear_group, _SUM),
    Op("gated_linear", "reference", dense.gated_linear, _SUM),
    Op("rope", "reference", attention.rope, _ELEMENT),
    Op("kv_append", "reference", attention.kv_append, 0.0),
    Op("attention_prefill", "reference", attention.attention, _SUM),
    Op("attention_decode", "reference", attention.attention, _SUM),
    Op("sealed_append", "reference", attention_lowbit.sealed_append, 0.0),
    Op("sealed_attention_prefill", "reference", attention_lowbit.sealed_attention, _SUM),
    Op("sealed_attention_decode", "reference", attention_lowbit.sealed_attention, _SUM),
    Op("router_topk", "reference", mixture.router_topk, _ELEMENT),
    Op("moe", "reference", mixture.moe, _SUM),
    Op("sample", "reference", sampling.sample, 0.0),
    Op("attention_block", "reference", block.attention_block, 3 * _SUM, times_parts=True),
    Op("dense_block", "reference", block.dense_block, 3 * _SUM, times_parts=True),
)
