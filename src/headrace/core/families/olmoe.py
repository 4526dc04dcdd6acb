"""OLMoE: mixtures in every layer, RMSNorm over the whole query and key rows."""

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
    heads, kv_heads, head_dim = read_heads(reader, head_dim=False)
    sizes = read_sizes(reader)
    experts, chosen = read_top_k(reader, "num_experts", "num_local_experts")
    bias = reader.flag("attention_bias", default=False)
    reader.must_be("hidden_act", "silu")
    spec = ModelSpec(
        family="olmoe",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-5),
        rope=read_rope(reader, head_dim, sizes["max_context"], theta=10000.0),
        layers=uniform_layers(reader.integer("num_hidden_layers"), moe=True),
        moe=MoeSpec(
            experts,
            chosen,
            sizes["intermediate"],
            "softmax_topk",
            normalize=reader.flag("norm_topk_prob", default=False),
        ),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="full",
        **sizes,
    )
    reader.refuse_rest()  # clip_qkv among others
    return spec


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    reader = gguf_keys.open_metadata(metadata, "olmoe")
    config = gguf_keys.read_common(metadata, reader, architecture="OlmoeForCausalLM")
    gguf_keys.read_experts(reader, config, count="num_experts")
    # GGUF has no key for it: the format's own runtime never renormalises this architecture.
    config["norm_topk_prob"] = False
    reader.must_be("expert_weights_norm", False)
    gguf_keys.finish(reader)
    return config


FAMILY = Family(
    name="olmoe",
    hf_architectures=("OlmoeForCausalLM",),
    spec=_spec,
    hf_names={
        **naming.HF_CORE,
        **naming.HF_ATTENTION_BIAS,
        **naming.HF_QK_NORM,
        **naming.HF_EXPERTS,
    },
    gguf_architecture="olmoe",
    gguf_names={
        **naming.GGUF_CORE,
        **naming.GGUF_FFN_NORM,
        **naming.GGUF_QK_NORM,
        **naming.GGUF_EXPERTS,
    },
    gguf_config=_gguf_config,
)
