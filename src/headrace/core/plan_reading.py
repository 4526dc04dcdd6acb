"""A config.json to a ``PlanSpec``; ``core.plan_attention`` and ``core.plan_formats`` read parts of it.

Unlike the families' readers, this one passes over keys that it does not know: it has to count weights
and cached elements, not to compute with them. What it needs and does not find is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.plan_attention import ATTENTIONS, attention_kinds
from headrace.core.plan_fields import HINT, Config, count
from headrace.core.plan_formats import stored_formats
from headrace.core.plan_mixture import dense_weights, mixture_of
from headrace.core.plan_spec import PlanSpec

SHORT_CONTEXT = 2048  # where none is said: as the models had that were published before it was said
MOST_LAYERS = 10_000  # far above any model's: layers are looked at one by one
# Where configurations leave things out, what the reference's configuration classes take (transformers 5.24).
_TIED = frozenset(
    """gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text cohere cohere2 opt gpt2 falcon starcoder2 smollm3
    ernie4_5 ernie4_5_moe lfm2""".split()
)
# What was held against published sizes or the engine's own count; others are read alike, and noted.
_KNOWN = frozenset(
    """llama llama4 mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5 qwen3_5_moe olmoe
    gpt_oss gemma2 gemma3 gemma3_text deepseek_v2 deepseek_v3 deepseek_v4 ernie4_5_moe glm4_moe
    glm_moe_dsa kimi_k2 minimax_m2 opt""".split()
)
# What published configurations leave to their class's defaults (transformers 5.24), by model_type.
_DEFAULTS: Mapping[str, Config] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}
# Layers that draft further tokens.
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# Layers that are neither attention nor linear attention as it is read here are said by these keys.
_OTHER_LAYERS = tuple(
    """hybrid_override_pattern layers_block_type block_types attn_layer_period attn_type_list
    linear_attn_config mamba_d_state mamba_d_ssm ssm_state_size ssm_cfg""".split()
)


def spec_from_config(config: Config, name: str = "") -> PlanSpec:
    """Read a model's parsed ``config.json``.

    A multimodal model's ``text_config`` is read; its other towers are left out and noted.

    Raises:
        ConfigError: a key is missing or has an impossible value.
        UnsupportedModelError: the way of attending is not one that can be counted here.
    """
    notes: list[str] = []
    text = config.get("text_config")
    if isinstance(text, Mapping):
        notes.append("only the text model is counted, not the towers for images or sound")
        config = {**config, **text, "text_config": None}
    config = {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    if config.get("max_position_embeddings") is None:
        notes.append(
            f"config.json does not say how long a context may be: {SHORT_CONTEXT:,} is taken"
        )
    family = str(config.get("model_type", ""))
    _refuse_other_layers(config)
    if family and family.removesuffix("_text") not in _KNOWN:
        notes.append(
            f"model_type {family!r} is not known here: it is counted as a decoder with gated feed-forwards"
        )
    hidden = count(config, "hidden_size")
    layers = count(config, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(
            f"config.json: num_hidden_layers is {layers:,}; it must be at most {MOST_LAYERS:,}",
            hint=HINT,
            param="num_hidden_layers",
        )
    kinds = attention_kinds(config, hidden, layers)
    mixture, dense_layers = mixture_of(config, hidden, layers)
    dense = len(dense_layers)
    stored = stored_formats(config, _layers_of_kinds(layers, dense_layers))
    extra = count(config, *_EXTRA_LAYERS, default=0)
    experts = int(mixture.get("num_experts", 0)) * int(mixture.get("expert_weights", 0))
    per_layer = (sum(k.layers * (k.qkv_weights + k.o_weights) for k in kinds) // layers) + experts
    return PlanSpec(
        name=name or str(config.get("_name_or_path") or config.get("model_type", "model")),
        family=family,
        hidden=hidden,
        vocab=count(config, "vocab_size"),
        max_context=count(config, "max_position_embeddings", default=SHORT_CONTEXT),
        attention=kinds,
        dense_layers=dense,
        dense_weights=dense_weights(config, hidden) if dense else 0,
        tied=bool(config.get("tie_word_embeddings", family in _TIED)),
        extra_weights=extra * per_layer,
        formats=stored.formats,
        stored_bits=stored.bits,
        notes=tuple(notes),
        **mixture,
    )


def _refuse_other_layers(config: Config) -> None:
    """Refuse what would be counted as attention in every layer and is not.

    Raises:
        UnsupportedModelError: the configuration describes such layers.
    """
    for key in _OTHER_LAYERS:
        value: object = config.get(key)
        words = cast("list[object]", value) if isinstance(value, list) else []
        plain = bool(words) and all(word in ("attention", "full_attention", 1) for word in words)
        if value not in (None, [], {}, 0, "") and not plain:  # MiniMax-M2 says 1 for every layer
            raise UnsupportedModelError(
                f"config.json has {key}: its layers that are no attention cannot be counted",
                hint=ATTENTIONS,
            )


def _layers_of_kinds(layers: int, dense: frozenset[int]) -> dict[str, Sequence[int]]:
    """Indices of the layers that have weights of a kind."""
    mixtures = [i for i in range(layers) if i not in dense]
    return {
        "attention": range(layers),
        "dense": sorted(dense),
        "experts": mixtures,
        "shared": mixtures,
    }
