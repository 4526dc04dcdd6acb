"""Feed-forwards of a config.json: which layers have experts, how many, how large, and the dense ones."""

from __future__ import annotations

import re
from typing import Any

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.plan_fields import HINT, Config, count, counts, names
from headrace.core.words import counted

# The same thing by the names in use for it.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_CHOSEN = tuple(
    "num_experts_per_tok num_experts_per_token experts_per_token moe_topk moe_top_k moe_k".split()
)
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_SHARED_INNER = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
# A key that speaks of experts' number, by whatever name.
_SPEAKS_OF_EXPERTS = re.compile(r"(n|num)_\w*experts|\w*_num_experts|moe_\w*num\w*experts")
# Feed-forwards of two matrices, without a gate.
_PLAIN = frozenset("gpt_neox nemotron opt phi starcoder2".split())


def mixture_of(config: Config, hidden: int, layers: int) -> tuple[dict[str, Any], frozenset[int]]:
    """The fields of a mixture (``moe_layers`` 0 where there is none), and the layers without experts.

    Raises:
        ConfigError: a key is missing or has an impossible value.
        UnsupportedModelError: there are experts by a name that is not known here.
    """
    experts = count(config, *_EXPERTS, default=0)
    if not experts:
        _refuse_unread(config)
        return {"moe_layers": 0}, frozenset(range(layers))
    chosen = count(config, *_CHOSEN)
    if chosen > experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {chosen} and there are {counted(experts, 'expert')}",
            hint=HINT,
            param="num_experts_per_tok",
        )
    inner = count(config, "moe_intermediate_size", "intermediate_size")
    dense = _dense_layers(config, layers)
    fields = {
        "moe_layers": layers - len(dense),
        "num_experts": experts,
        "num_experts_per_token": chosen,
        "expert_weights": 3 * hidden * inner,
        "expert_biases": 2 * inner + hidden if _family(config) == "gpt_oss" else 0,
        "shared_weights": 3 * hidden * _shared(config, inner),
        "router_weights": experts * hidden,
    }
    return fields, dense


def dense_weights(config: Config, hidden: int) -> int:
    """Elements of one dense feed-forward: gated (three matrices), or a plain one (two)."""
    inner = count(config, "ffn_dim", "intermediate_size_mlp", "intermediate_size")
    return (2 if _family(config) in _PLAIN or "ffn_dim" in config else 3) * hidden * inner


def _family(config: Config) -> str:
    return str(config.get("model_type", "")).removesuffix("_text")


def _shared(config: Config, inner: int) -> int:
    """Width of what every token uses beside the experts."""
    if _family(config) == "llama4":  # one, of an expert's width
        return inner
    return count(config, *_SHARED_INNER, default=0) or inner * count(config, *_SHARED, default=0)


def _dense_layers(config: Config, layers: int) -> frozenset[int]:
    """Layers of a mixture without experts."""
    every = count(
        config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1
    )
    first = count(config, "first_k_dense_replace", "moe_layer_start_index", default=0)
    dense = set(counts(config, "mlp_only_layers"))
    dense |= set(range(min(layers, first)))
    dense |= {i for i in range(layers) if (i + 1) % every}
    if isinstance(config.get("moe_layer_freq"), list):  # MiMo: 1 for a layer with experts
        dense |= {i for i, each in enumerate(counts(config, "moe_layer_freq")) if not each}
    dense |= {i for i, kind in enumerate(names(config, "mlp_layer_types")) if kind == "dense"}
    end = config.get("moe_layer_end_index")
    if isinstance(end, int) and 0 <= end < layers:
        dense |= set(range(end + 1, layers))
    return frozenset(dense & set(range(layers)))


def _refuse_unread(config: Config) -> None:
    """Refuse a mixture that would be counted as a dense model.

    Raises:
        UnsupportedModelError: a key speaks of several experts, by a name that is not read.
    """
    for key, value in config.items():
        several = isinstance(value, int) and not isinstance(value, bool) and value > 1
        if several and key not in _EXPERTS and _SPEAKS_OF_EXPERTS.fullmatch(key):
            raise UnsupportedModelError(
                f"config.json: {key} is {value}, and none of {', '.join(_EXPERTS)} is there: a mixture "
                "of this kind cannot be counted",
                hint="the .gguf file can be planned, if there is one",
            )
