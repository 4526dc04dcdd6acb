"""Qwen3-MoE: Qwen3's attention, and mixtures in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.families import gguf_keys, naming
from headrace.core.families.base import Family
from headrace.core.families.reading import (
    ConfigReader,
    read_heads,
    read_rope,
    read_sizes,
    read_top_k,
)
from headrace.core.model_spec import LayerSpec, ModelSpec, MoeSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    heads, kv_heads, head_dim = read_heads(reader)
    sizes = read_sizes(reader)
    layers = reader.integer("num_hidden_layers")
    window = reader.raw("sliding_window", default=None)
    if not reader.flag("use_sliding_window", default=False):
        window = None
    if window is not None:
        window = reader.integer("sliding_window")
    experts, chosen = read_top_k(reader, "num_experts", "num_local_experts")
    dense = set(reader.integers("mlp_only_layers"))
    step = reader.integer("decoder_sparse_step", default=1)
    bias = reader.flag("attention_bias", default=False)
    reader.must_be("hidden_act", "silu")
    spec = ModelSpec(
        family="qwen3_moe",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-6),
        rope=read_rope(reader, head_dim, sizes["max_context"], theta=10000.0),
        layers=tuple(
            LayerSpec(window=window, moe=i not in dense and (i + 1) % step == 0)
            for i in range(layers)
        ),
        moe=MoeSpec(
            experts,
            chosen,
            reader.integer("moe_intermediate_size"),
            "softmax_topk",
            normalize=reader.flag("norm_topk_prob", default=False),
        ),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        **sizes,
    )
    # max_window_layers is written for every Qwen, and read by none of its mixtures.
    reader.refuse_rest(("max_window_layers",))
    return spec


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    reader = gguf_keys.open_metadata(metadata, "qwen3moe")
    config = gguf_keys.read_common(metadata, reader, architecture="Qwen3MoeForCausalLM")
    gguf_keys.read_experts(reader, config, count="num_experts", size="moe_intermediate_size")
    # GGUF has no key for it: the format's own runtime always renormalises this architecture.
    config["norm_topk_prob"] = True
    reader.must_be("expert_weights_norm", True)
    gguf_keys.finish(reader)
    return config


FAMILY = Family(
    name="qwen3_moe",
    hf_architectures=("Qwen3MoeForCausalLM",),
    spec=_spec,
    hf_names={
        **naming.HF_CORE,
        **naming.HF_ATTENTION_BIAS,
        **naming.HF_QK_NORM,
        **naming.HF_DENSE,
        **naming.HF_EXPERTS,
    },
    gguf_architecture="qwen3moe",
    gguf_names={
        **naming.GGUF_CORE,
        **naming.GGUF_FFN_NORM,
        **naming.GGUF_QK_NORM,
        **naming.GGUF_EXPERTS,
    },
    gguf_config=_gguf_config,
)
