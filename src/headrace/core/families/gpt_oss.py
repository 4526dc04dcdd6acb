"""gpt-oss: attention sinks, every second layer windowed, YaRN, biased experts, clamped SwiGLU.

The stacked experts' gate and up rows are interleaved in safetensors (rows 2i gate, 2i + 1 up) and
apart in GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.families import gguf_keys, naming
from headrace.core.families.base import Family
from headrace.core.families.reading import (
    ConfigReader,
    read_heads,
    read_rope,
    read_sizes,
    read_top_k,
    read_windows,
)
from headrace.core.model_spec import LayerSpec, ModelSpec, MoeSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    heads, kv_heads, head_dim = read_heads(reader)
    sizes = read_sizes(reader)
    layers = reader.integer("num_hidden_layers")
    experts, chosen = read_top_k(reader, "num_local_experts", "num_experts")
    bias = reader.flag("attention_bias", default=True)
    reader.must_be("hidden_act", "silu")
    alternating = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))
    windows = read_windows(reader, layers, reader.integer("sliding_window"), alternating)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        # Every published model is stretched by YaRN; without the numbers it would be wrong.
        raise ConfigError(
            f"{reader.where} has neither rope_parameters nor rope_scaling",
            hint="the file is incomplete; gpt-oss needs its YaRN parameters",
        )
    rope = read_rope(reader, head_dim, sizes["max_context"], theta=150000.0)
    if rope.scaling == "yarn":
        # Older files repeat YaRN's original context under a name of their own.
        reader.must_be("initial_context_length", rope.original_context)
    spec = ModelSpec(
        family="gpt_oss",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-5),
        rope=rope,
        layers=tuple(LayerSpec(window=w, moe=True) for w in windows),
        moe=MoeSpec(
            experts,
            chosen,
            sizes["intermediate"],
            "topk_softmax",
            normalize=False,  # a softmax over the k chosen already sums to one
            router_bias=True,
            expert_bias=True,
            gate_up_interleaved=True,
        ),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        activation="swiglu_clamped",
        swiglu_alpha=reader.number("swiglu_alpha", default=1.702),
        swiglu_limit=reader.number("swiglu_limit", default=7.0),
        **sizes,
    )
    reader.refuse_rest()
    return spec


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    reader = gguf_keys.open_metadata(metadata, "gpt-oss")
    config = gguf_keys.read_common(metadata, reader, architecture="GptOssForCausalLM")
    gguf_keys.read_experts(reader, config, count="num_local_experts")
    config["sliding_window"] = reader.integer("attention.sliding_window")
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        # The published configuration; GGUF has no key for it.
        config["rope_scaling"]["truncate"] = False
    gguf_keys.finish(reader)
    return config


_LAYER = "model.layers.{i}."
_EXPERTS = _LAYER + "mlp.experts."

FAMILY = Family(
    name="gpt_oss",
    hf_architectures=("GptOssForCausalLM",),
    spec=_spec,
    hf_names={
        **naming.HF_CORE,
        **naming.HF_ATTENTION_BIAS,
        _LAYER + "self_attn.sinks": "layers.{i}.sinks",
        _LAYER + "mlp.router.weight": "layers.{i}.router",
        _LAYER + "mlp.router.bias": "layers.{i}.router_bias",
        _EXPERTS + "gate_up_proj": "layers.{i}.experts.gate_up",
        _EXPERTS + "gate_up_proj_bias": "layers.{i}.experts.gate_up_bias",
        _EXPERTS + "down_proj": "layers.{i}.experts.down",
        _EXPERTS + "down_proj_bias": "layers.{i}.experts.down_bias",
    },
    gguf_architecture="gpt-oss",
    gguf_names={
        **naming.GGUF_CORE,
        **naming.GGUF_EXPERTS,
        **naming.GGUF_BIASES,
        "blk.{i}.post_attention_norm.weight": "layers.{i}.ffn_norm",
        "blk.{i}.attn_sinks.weight": "layers.{i}.sinks",
    },
    gguf_config=_gguf_config,
    unquantised_experts_transposed=True,
)
