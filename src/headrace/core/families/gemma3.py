"""Gemma 3, text: five layers with a window for one without, each kind with a RoPE base of its own.

Embedded tokens are multiplied by sqrt(hidden); every head of q and k is normalised; attention and
feed-forward have a norm behind them, too; norms multiply by 1 + w, and GGUF stores that sum. Layers
with a window turn with base 10,000, the others with the model's base (and its scaling).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headrace.core.families import gguf_keys, naming
from headrace.core.families.base import Family
from headrace.core.families.reading import (
    ConfigReader,
    read_heads,
    read_rope,
    read_sizes,
    read_windows,
)
from headrace.core.model_spec import LayerSpec, ModelSpec, RopeSpec

# One layer in six sees everything, unless the configuration lists the layers.
_PATTERN = 6
_LOCAL_BASE = 10_000.0
_BASE = 1_000_000.0


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    config, local_config = _split_rope(config)
    reader = ConfigReader(config)
    heads, kv_heads, head_dim = read_heads(reader)
    sizes = read_sizes(reader)
    if "tie_word_embeddings" not in config:
        sizes["tie_embeddings"] = True
    layers = reader.integer("num_hidden_layers")
    every = reader.integer("sliding_window_pattern", "_sliding_window_pattern", default=_PATTERN)
    kinds = tuple(
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    )
    windows = read_windows(reader, layers, reader.integer("sliding_window"), kinds)
    reader.must_be("hidden_activation", "gelu_pytorch_tanh")
    reader.must_be("attention_bias", False)
    reader.must_be("attn_logit_softcapping", None)
    reader.must_be("final_logit_softcapping", None)
    local_base = reader.number("rope_local_base_freq", default=_LOCAL_BASE, above=1.0)
    local = RopeSpec(theta=local_base, dim=head_dim)
    if local_config is not None:
        local = read_rope(
            ConfigReader(local_config), head_dim, sizes["max_context"], theta=local_base
        )
    scalar = reader.number("query_pre_attn_scalar", default=float(head_dim))
    spec = ModelSpec(
        family="gemma3_text",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", default=1e-6),
        rope=read_rope(reader, head_dim, sizes["max_context"], theta=_BASE),
        layers=tuple(
            LayerSpec(window=w, moe=False, rope=None if w is None else local) for w in windows
        ),
        qk_norm="head",
        post_norms=True,
        embed_scale=sizes["hidden"] ** 0.5,
        attention_scale=scalar**-0.5,
        activation="gelu_tanh",
        **sizes,
    )
    # Generation settings of older files; they say how transformers lays out its own cache.
    reader.refuse_rest({"cache_implementation", "use_bidirectional_attention"} - _true(config))
    return spec


def _true(config: Mapping[str, Any]) -> set[str]:
    return {"use_bidirectional_attention"} if config.get("use_bidirectional_attention") else set()


def _split_rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """``rope_parameters`` with one set for each kind of layer -> the full layers' in the
    configuration, and the sliding layers' as a configuration of its own."""
    whole = dict(config)
    given = whole.get("rope_parameters")
    if not isinstance(given, Mapping) or "full_attention" not in given:
        return whole, None
    both = cast("Mapping[str, Any]", given)
    whole["rope_parameters"] = both["full_attention"]
    sliding = both.get("sliding_attention")
    return whole, None if sliding is None else {"rope_parameters": sliding}


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    reader = gguf_keys.open_metadata(metadata, "gemma3")
    config = gguf_keys.read_common(metadata, reader, architecture="Gemma3ForCausalLM")
    if reader.raw("rope.freq_base", default=None) is None:
        config["rope_theta"] = _BASE
    config["sliding_window"] = reader.integer("attention.sliding_window")
    config["rope_local_base_freq"] = reader.number("rope.freq_base_swa", default=_LOCAL_BASE)
    reader.must_be("attn_logit_softcapping", None)
    reader.must_be("final_logit_softcapping", None)
    gguf_keys.finish(reader)
    return config


_LAYER = "model.layers.{i}."

FAMILY = Family(
    name="gemma3_text",
    hf_architectures=("Gemma3ForCausalLM",),
    spec=_spec,
    hf_names={
        **naming.HF_CORE,
        **naming.HF_QK_NORM,
        **naming.HF_DENSE,
        _LAYER + "post_attention_layernorm.weight": "layers.{i}.attn_post_norm",
        _LAYER + "pre_feedforward_layernorm.weight": "layers.{i}.ffn_norm",
        _LAYER + "post_feedforward_layernorm.weight": "layers.{i}.ffn_post_norm",
    },
    gguf_architecture="gemma3",
    gguf_names={
        **naming.GGUF_CORE,
        **naming.GGUF_FFN_NORM,
        **naming.GGUF_QK_NORM,
        **naming.GGUF_DENSE,
        "blk.{i}.post_attention_norm.weight": "layers.{i}.attn_post_norm",
        "blk.{i}.post_ffw_norm.weight": "layers.{i}.ffn_post_norm",
    },
    gguf_config=_gguf_config,
    hf_norm_offset=1.0,
)
