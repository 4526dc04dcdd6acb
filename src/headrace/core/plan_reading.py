"""A config.json to a ``PlanSpec``: one reader for each way of attending that is in use.

Unlike the families' readers, this one passes over keys that it does not know: it has to count weights
and cached elements, not to compute with them. What it needs and does not find is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.plan_formats import stored_formats
from headrace.core.plan_spec import AttentionKind, PlanSpec
from headrace.core.words import counted

Config = Mapping[str, Any]
SHORT_CONTEXT = 2048  # where none is said: as the models had that were published before it was said
MOST_LAYERS = 10_000  # far above any model's: layers are looked at one by one
# Where configurations leave things out, what the reference's configuration classes take (transformers 5.24).
_TIED = frozenset(
    """gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text cohere cohere2 opt gpt2 falcon starcoder2 smollm3
    ernie4_5 ernie4_5_moe lfm2""".split()
)
# One layer of so many has no window.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "exaone4": 4}
# What was held against published sizes or the engine's own count; others are read alike, and noted.
_KNOWN = frozenset(
    """llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_moe olmoe gpt_oss gemma2
    gemma3 gemma3_text deepseek_v2 deepseek_v3 deepseek_v4 glm4_moe glm_moe_dsa kimi_k2 minimax_m2
    opt""".split()
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
    if config.get("max_position_embeddings") is None:
        notes.append(
            f"config.json does not say how long a context may be: {SHORT_CONTEXT:,} is taken"
        )
    family = str(config.get("model_type", ""))
    if family and family not in _KNOWN:
        notes.append(
            f"model_type {family!r} is not known here: it is counted as a decoder with gated feed-forwards"
        )
    hidden = _count(config, "hidden_size")
    layers = _count(config, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(
            f"config.json: num_hidden_layers is {layers:,}; it must be at most {MOST_LAYERS:,}",
            hint="is this a language model's config.json, as it was published?",
            param="num_hidden_layers",
        )
    kinds = _attention(config, hidden, layers)
    mixture, dense_layers = _mixture(config, hidden, layers)
    dense = len(dense_layers)
    stored = stored_formats(config, _layers_of_kinds(layers, dense_layers))
    extra = _count(config, "num_nextn_predict_layers", "num_mtp_layers", default=0)
    experts = int(mixture.get("num_experts", 0)) * int(mixture.get("expert_weights", 0))
    per_layer = (sum(k.layers * (k.qkv_weights + k.o_weights) for k in kinds) // layers) + experts
    return PlanSpec(
        name=name or str(config.get("_name_or_path") or config.get("model_type", "model")),
        family=family,
        hidden=hidden,
        vocab=_count(config, "vocab_size"),
        max_context=_count(config, "max_position_embeddings", default=SHORT_CONTEXT),
        attention=kinds,
        dense_layers=dense,
        dense_weights=_dense(config, hidden) if dense else 0,
        tied=bool(config.get("tie_word_embeddings", family in _TIED)),
        extra_weights=extra * per_layer,
        formats=stored.formats,
        stored_bits=stored.bits,
        notes=tuple(notes),
        **mixture,
    )


def _attention(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """The kinds of attention, by what the configuration has."""
    readers: tuple[tuple[Callable[[Config], bool], _Reader], ...] = (
        (lambda c: c.get("model_type") == "deepseek_v4", _compressed),
        (lambda c: bool(c.get("kv_lora_rank")), _latent),
        (lambda c: bool(c.get("linear_num_value_heads")), _hybrid),
        (lambda c: bool(c.get("num_attention_heads")), _grouped),
    )
    for applies, read in readers:
        if applies(config):
            return read(config, hidden, layers)
    raise UnsupportedModelError(
        f"model_type {config.get('model_type')!r}: the attention cannot be counted",
        hint="grouped-query, latent, linear and compressed attention are known",
    )


_Reader = Callable[[Config, int, int], tuple[AttentionKind, ...]]


def _grouped(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """Grouped-query attention; layers with a window and without."""
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    dim = _count(config, "head_dim", default=hidden // heads)
    windowed = _windowed_layers(config, layers)
    gate = 2 if config.get("attn_output_gate") else 1

    def kind(name: str, count: int, window: int | None) -> AttentionKind:
        return AttentionKind(
            name=name,
            layers=count,
            qkv_weights=hidden * dim * (gate * heads + 2 * kv_heads),
            o_weights=hidden * dim * heads,
            heads=heads,
            kv_heads=kv_heads,
            score_dim=dim,
            value_dim=dim,
            cached=2 * kv_heads * dim,
            window=window,
        )

    found = [kind("full", layers - windowed, None)] if windowed < layers else []
    if windowed:
        found.append(kind("window", windowed, _count(config, "sliding_window")))
    return tuple(found)


def _windowed_layers(config: Config, layers: int) -> int:
    """How many layers see no more than ``sliding_window`` tokens."""
    family = config.get("model_type")
    types = _names(config, "layer_types")
    if not types and family == "gpt_oss":
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if types:
        return sum(t == "sliding_attention" for t in types)
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    default = _WINDOW_PATTERNS.get(str(family), 0)
    every = _count(config, "sliding_window_pattern", "_sliding_window_pattern", default=default)
    if every:
        return layers - layers // every
    if config.get("use_sliding_window"):  # Qwen: the first layers see everything
        return layers - min(layers, _count(config, "max_window_layers", default=0))
    return layers


def _hybrid(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """Gated linear attention in most layers, grouped-query attention in the others (Qwen3-Next)."""
    interval = _count(config, "full_attention_interval", default=4)
    types = _names(config, "layer_types")
    full = sum(t == "full_attention" for t in types) if types else layers // interval
    gated = {**config, "attn_output_gate": True, "layer_types": None, "sliding_window": None}
    attention = _grouped(gated, hidden, full) if full else ()
    key_heads = _count(config, "linear_num_key_heads")
    value_heads = _count(config, "linear_num_value_heads")
    key_dim = _count(config, "linear_key_head_dim")
    value_dim = _count(config, "linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    kernel = _count(config, "linear_conv_kernel_dim", default=4)
    linear = AttentionKind(
        name="linear",
        layers=layers - full,
        # query, key, value; output gate; two gates a head; the short convolution
        qkv_weights=hidden * (2 * keys + 2 * values + 2 * value_heads)
        + kernel * (2 * keys + values),
        o_weights=hidden * values,
        heads=value_heads,
        kv_heads=value_heads,
        score_dim=key_dim,
        value_dim=value_dim,
        cached=0,
        state=value_heads * key_dim * value_dim + (kernel - 1) * (2 * keys + values),
    )
    return (*attention, linear)


def _latent(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), absorbed; an index where there is one."""
    heads = _count(config, "num_attention_heads")
    rank = _count(config, "kv_lora_rank")
    rope = _count(config, "qk_rope_head_dim")
    nope = _count(config, "qk_nope_head_dim")
    value = _count(config, "v_head_dim")
    q_rank = _count(config, "q_lora_rank", default=0)
    query = heads * (nope + rope)
    qkv = hidden * q_rank + q_rank * query if q_rank else hidden * query
    qkv += hidden * (rank + rope) + rank * heads * (nope + value)
    index_heads = _count(config, "index_n_heads", default=0)
    index_dim = _count(config, "index_head_dim", default=0) if index_heads else 0
    index = index_dim * (q_rank * index_heads + hidden) + hidden * index_heads

    def kind(name: str, count: int, indexed: bool) -> AttentionKind:
        return AttentionKind(
            name=name,
            layers=count,
            qkv_weights=qkv + (index if indexed else 0),
            o_weights=heads * value * hidden,
            heads=heads,
            kv_heads=1,
            score_dim=rank + rope,
            value_dim=rank,
            cached=rank + rope,
            top_keys=_count(config, "index_topk") if index_heads else None,
            index_cached=index_dim if indexed else 0,
            index_heads=index_heads if indexed else 0,
        )

    if not index_heads:
        return (kind("latent", layers, False),)
    every = max(1, _count(config, "index_topk_freq", default=1))
    offset = _count(config, "index_skip_topk_offset", default=2)
    indexed = sum(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    shared = (kind("latent-shared-index", layers - indexed, False),) if indexed < layers else ()
    return (kind("latent-indexed", indexed, True), *shared)


def _compressed(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """DeepSeek-V4: every layer a window, most also keys compressed 4:1 (chosen by an index) or 128:1."""
    heads, dim = _count(config, "num_attention_heads"), _count(config, "head_dim")
    q_rank, o_rank = _count(config, "q_lora_rank"), _count(config, "o_lora_rank")
    index_heads, index_dim = _count(config, "index_n_heads"), _count(config, "index_head_dim")
    groups = _count(config, "o_groups")
    base = hidden * q_rank + q_rank * heads * dim + hidden * dim
    fine = hidden * 4 * dim  # keys and gates of two overlapping series
    fine += index_dim * (4 * hidden + q_rank * index_heads) + hidden * index_heads
    ratios = _counts(config, "compress_ratios")[:layers]
    if ratios and (len(ratios) < layers or not set(ratios) <= {0, 4, 128}):
        raise ConfigError(
            f"config.json: compress_ratios is {ratios!r}; it must have 0, 4 or 128 for each layer, "
            f"of which there are {layers}",
            hint="is this a language model's config.json, as it was published?",
            param="compress_ratios",
        )
    if not ratios:
        ratios = [128, 128, *(4 if i % 2 else 128 for i in range(layers - 2))]

    def kind(name: str, ratio: int, more: int) -> AttentionKind:
        indexed = ratio == 4
        return AttentionKind(
            name=name,
            layers=ratios.count(ratio),
            qkv_weights=base + more,
            o_weights=heads * dim * o_rank + groups * o_rank * hidden,
            heads=heads,
            kv_heads=1,
            score_dim=dim,
            value_dim=dim,
            cached=dim,
            window=None if ratio else _count(config, "sliding_window"),
            stride=max(ratio, 1),
            recent=_count(config, "sliding_window") if ratio else 0,
            top_keys=_count(config, "index_topk") if indexed else None,
            index_cached=index_dim if indexed else 0,
            index_heads=index_heads if indexed else 0,
        )

    kinds = (("compressed-4", 4, fine), ("compressed-128", 128, 2 * hidden * dim), ("window", 0, 0))
    return tuple(kind(*k) for k in kinds if k[1] in ratios)


def _layers_of_kinds(layers: int, dense: frozenset[int]) -> dict[str, Sequence[int]]:
    """Indices of the layers that have weights of a kind."""
    mixtures = [i for i in range(layers) if i not in dense]
    return {
        "attention": range(layers),
        "dense": sorted(dense),
        "experts": mixtures,
        "shared": mixtures,
    }


def _mixture(config: Config, hidden: int, layers: int) -> tuple[dict[str, Any], frozenset[int]]:
    """The fields of a mixture (``moe_layers`` 0 where there is none), and the layers without experts."""
    experts = _count(config, "num_local_experts", "n_routed_experts", "num_experts", default=0)
    if not experts:
        return {"moe_layers": 0}, frozenset(range(layers))
    chosen = _count(config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    if chosen > experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {chosen} and there are {counted(experts, 'expert')}",
            hint="is this a language model's config.json, as it was published?",
            param="num_experts_per_tok",
        )
    inner = _count(config, "moe_intermediate_size", "intermediate_size")
    shared = _count(config, "shared_expert_intermediate_size", default=0)
    if not shared:
        shared = inner * _count(config, "n_shared_experts", "num_shared_experts", default=0)
    step = _count(config, "decoder_sparse_step", default=1)
    dense = set(_counts(config, "mlp_only_layers"))
    dense |= set(range(min(layers, _count(config, "first_k_dense_replace", default=0))))
    dense |= {i for i in range(layers) if (i + 1) % step}
    dense &= set(range(layers))
    biased = config.get("model_type") == "gpt_oss"
    fields = {
        "moe_layers": layers - len(dense),
        "num_experts": experts,
        "num_experts_per_token": chosen,
        "expert_weights": 3 * hidden * inner,
        "expert_biases": 2 * inner + hidden if biased else 0,
        "shared_weights": 3 * hidden * shared,
        "router_weights": experts * hidden,
    }
    return fields, frozenset(dense)


def _dense(config: Config, hidden: int) -> int:
    """Elements of one dense feed-forward: gated (three matrices), or OPT's plain one (two)."""
    if "ffn_dim" in config:
        return 2 * hidden * _count(config, "ffn_dim")
    return 3 * hidden * _count(config, "intermediate_size")


# Counts that nothing can be divided by or made of when they are 0.
_POSITIVE = frozenset(
    """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    max_position_embeddings full_attention_interval decoder_sparse_step num_experts_per_tok
    num_experts_per_token experts_per_token moe_intermediate_size sliding_window_pattern
    _sliding_window_pattern""".split()
)


def _names(config: Config, name: str) -> list[str]:
    """A list of words, empty where there is none."""
    found = _list(config, name, "words")
    if not all(isinstance(one, str) for one in found):
        raise _no_list(name, found, "words")
    return [str(one) for one in found]


def _counts(config: Config, name: str) -> list[int]:
    """A list of whole numbers of at least 0, empty where there is none."""
    what = "whole numbers of at least 0"
    found = [
        n
        for n in _list(config, name, what)
        if isinstance(n, int) and not isinstance(n, bool) and n >= 0
    ]
    if len(found) < len(_list(config, name, what)):
        raise _no_list(name, config[name], what)
    return found


def _list(config: Config, name: str, what: str) -> list[object]:
    found: object = config.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise _no_list(name, found, what)
    return cast("list[object]", found)


def _no_list(name: str, found: object, what: str) -> ConfigError:
    return ConfigError(
        f"config.json: {name} is {found!r}; it must be a list of {what}",
        hint="is this a language model's config.json, as it was published?",
        param=name,
    )


def _count(config: Config, *names: str, default: int | None = None) -> int:
    """The first of ``names`` that is there, a whole number of at least 0, or 1 for ``_POSITIVE``."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        least = int(name in _POSITIVE)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"config.json: {name} is {value!r}; it must be a whole number of at least {least}",
                hint="is this a language model's config.json, as it was published?",
                param=name,
            )
        return value
    if default is not None:
        return default
    raise ConfigError(
        f"config.json has no {' or '.join(names)}",
        hint="is this a language model's config.json?",
        param=names[0],
    )
