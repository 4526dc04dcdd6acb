"""Qwen3, dense: RMSNorm on every query and key head."""

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
    read_windows,
)
from headrace.core.model_spec import LayerSpec, ModelSpec


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    heads, kv_heads, head_dim = read_heads(reader)
    sizes = read_sizes(reader)
    layers = reader.integer("num_hidden_layers")
    window = reader.raw("sliding_window", default=None)
    first = reader.integer("max_window_layers", default=layers, minimum=0)
    if not reader.flag("use_sliding_window", default=False):
        window = None
    if window is not None:
        window = reader.integer("sliding_window")
    default = tuple(
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(layers)
    )
    bias = reader.flag("attention_bias", default=False)
    reader.must_be("hidden_act", "silu")
    spec = ModelSpec(
        family="qwen3",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-6),
        rope=read_rope(reader, head_dim, sizes["max_context"], theta=10000.0),
        layers=tuple(
            LayerSpec(window=w, moe=False) for w in read_windows(reader, layers, window, default)
        ),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        **sizes,
    )
    reader.refuse_rest()
    return spec


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    reader = gguf_keys.open_metadata(metadata, "qwen3")
    config = gguf_keys.read_common(metadata, reader, architecture="Qwen3ForCausalLM")
    gguf_keys.finish(reader)
    return config


FAMILY = Family(
    name="qwen3",
    hf_architectures=("Qwen3ForCausalLM",),
    spec=_spec,
    hf_names={
        **naming.HF_CORE,
        **naming.HF_ATTENTION_BIAS,
        **naming.HF_QK_NORM,
        **naming.HF_DENSE,
    },
    gguf_architecture="qwen3",
    gguf_names={
        **naming.GGUF_CORE,
        **naming.GGUF_FFN_NORM,
        **naming.GGUF_QK_NORM,
        **naming.GGUF_DENSE,
    },
    gguf_config=_gguf_config,
)
