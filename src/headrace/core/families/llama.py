"""Llama 2, 3.x and the models of its shape (SmolLM2, Mistral's early files under this name)."""

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
    uniform_layers,
)
from headrace.core.model_spec import ModelSpec, MoeSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    heads, kv_heads, head_dim = read_heads(reader)
    sizes = read_sizes(reader)
    bias = reader.flag("attention_bias", default=False)
    reader.must_be("hidden_act", "silu")
    reader.must_be("mlp_bias", False)
    moe = None
    if config.get("num_local_experts"):  # Mixtral in a GGUF file, whose architecture is "llama"
        experts, chosen = read_top_k(reader, "num_local_experts")
        moe = MoeSpec(experts, chosen, sizes["intermediate"], "softmax_topk", normalize=True)
    spec = ModelSpec(
        family="llama",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-6),
        rope=read_rope(reader, head_dim, sizes["max_context"], theta=10000.0),
        layers=uniform_layers(reader.integer("num_hidden_layers"), moe=moe is not None),
        moe=moe,
        qkv_bias=bias,
        o_bias=bias,
        **sizes,
    )
    reader.refuse_rest()
    return spec


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    reader = gguf_keys.open_metadata(metadata, "llama")
    config = gguf_keys.read_common(metadata, reader, architecture="LlamaForCausalLM")
    if reader.raw("expert_count", default=0):
        gguf_keys.read_experts(reader, config, count="num_local_experts")
    else:
        reader.must_be("expert_used_count", 0)
    gguf_keys.finish(reader)
    return config


FAMILY = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    spec=_spec,
    hf_names={**naming.HF_CORE, **naming.HF_ATTENTION_BIAS, **naming.HF_DENSE},
    gguf_architecture="llama",
    gguf_names={
        **naming.GGUF_CORE,
        **naming.GGUF_FFN_NORM,
        **naming.GGUF_DENSE,
        **naming.GGUF_EXPERTS,
        # Files from before the experts were stacked.
        **{
            f"blk.{{i}}.ffn_{x}.{{e}}.weight": f"layers.{{i}}.experts.{{e}}.{x}"
            for x in ("gate", "up", "down")
        },
        "rope_freqs.weight": "rope_freqs",  # Llama 3.1's scaling, worked out by the converter
    },
    gguf_config=_gguf_config,
    gguf_rope="interleaved",
)
