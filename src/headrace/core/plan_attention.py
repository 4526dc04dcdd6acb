"""The kinds of attention of a config.json: one reader for each way of attending that is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.plan_fields import HINT, Config, count, counts, names
from headrace.core.plan_spec import AttentionKind

ATTENTIONS = "grouped-query, latent, linear and compressed attention are known"
# Kinds of layers with a window, and where it is said how wide it is. A chunk is counted as a window of its
# length, which it reaches just before it ends.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# One layer of so many has no window.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "exaone4": 4}


def attention_kinds(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """The kinds of attention, by what the configuration has."""
    readers: tuple[tuple[Callable[[Config], bool], _Reader], ...] = (
        (lambda c: c.get("model_type") == "deepseek_v4", _compressed),
        (lambda c: bool(c.get("kv_lora_rank")), _latent),
        (lambda c: bool(c.get("linear_num_value_heads")), _hybrid),
        (lambda c: c.get("num_attention_heads") is not None, _grouped),
    )
    for applies, read in readers:
        if applies(config):
            return read(config, hidden, layers)
    raise UnsupportedModelError(
        f"model_type {config.get('model_type')!r}: config.json has neither num_attention_heads nor "
        "kv_lora_rank: the attention cannot be counted",
        hint=ATTENTIONS,
    )


_Reader = Callable[[Config, int, int], tuple[AttentionKind, ...]]


def _grouped(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """Grouped-query attention; layers with a window and without."""
    heads = count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads is {kv_heads} and num_attention_heads {heads}; heads share "
            "keys in groups of one size",
            hint=HINT,
            param="num_key_value_heads",
        )
    dim = count(config, "head_dim", default=hidden // heads)
    if not dim:
        raise ConfigError(
            f"config.json: num_attention_heads is {heads:,} and hidden_size {hidden:,}, without a head_dim",
            hint=HINT,
            param="num_attention_heads",
        )
    windowed, width = _windowed_layers(config, layers)
    gate = 2 if config.get("attn_output_gate") else 1

    def kind(name: str, number: int, window: int | None) -> AttentionKind:
        return AttentionKind(
            name=name,
            layers=number,
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
        found.append(kind("window", windowed, count(config, width)))
    return tuple(found)


def _windowed_layers(config: Config, layers: int) -> tuple[int, str]:
    """How many layers see no more than a window, and the key that says how wide it is."""
    family = config.get("model_type")
    types = _layer_types(config, layers, (*_WINDOWS, "full_attention"))
    if not types and family == "gpt_oss":
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if not types and family in ("llama4", "llama4_text") and config.get("attention_chunk_size"):
        every = count(config, "no_rope_layer_interval", default=4)
        rotated = counts(config, "no_rope_layers") or [(i + 1) % every for i in range(layers)]
        types = ["chunked_attention" if i else "full_attention" for i in rotated]
    if types:
        found = {one for one in types if one in _WINDOWS}
        if len(found) > 1:
            raise UnsupportedModelError(
                f"config.json: layer_types has {' and '.join(sorted(found))}: two kinds of windows cannot be "
                "counted",
                hint=ATTENTIONS,
            )
        return len(types) - types.count("full_attention"), _WINDOWS[found.pop()] if found else ""
    key = "sliding_window"
    if not config.get(key) or config.get("use_sliding_window") is False:
        return 0, key
    default = _WINDOW_PATTERNS.get(str(family), 0)
    every = count(config, "sliding_window_pattern", "_sliding_window_pattern", default=default)
    if every:
        return layers - layers // every, key
    if config.get("use_sliding_window"):  # Qwen: the first layers see everything
        return layers - min(layers, count(config, "max_window_layers", default=0)), key
    return layers, key


def _layer_types(config: Config, layers: int, known: Iterable[str]) -> list[str]:
    """``layer_types``: a word of ``known`` for each layer, or nothing.

    Raises:
        ConfigError: there are not as many as layers.
        UnsupportedModelError: one of another kind, whose weights and cache are not known here.
    """
    types = names(config, "layer_types")
    if types and len(types) != layers:
        raise ConfigError(
            f"config.json: layer_types has {len(types)} entries; num_hidden_layers is {layers}",
            hint=HINT,
            param="layer_types",
        )
    other = sorted({one for one in types if one not in known})
    if other:
        raise UnsupportedModelError(
            f"config.json: layer_types has {', '.join(other)}, whose weights and cache cannot be counted",
            hint=ATTENTIONS,
        )
    return types


def _hybrid(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """Gated linear attention in most layers, grouped-query attention in the others (Qwen3-Next)."""
    interval = count(config, "full_attention_interval", default=4)
    types = _layer_types(config, layers, ("full_attention", "linear_attention"))
    full = types.count("full_attention") if types else layers // interval
    gated = {**config, "attn_output_gate": True, "layer_types": None, "sliding_window": None}
    attention = _grouped(gated, hidden, full) if full else ()
    key_heads = count(config, "linear_num_key_heads")
    value_heads = count(config, "linear_num_value_heads")
    key_dim = count(config, "linear_key_head_dim")
    value_dim = count(config, "linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    kernel = count(config, "linear_conv_kernel_dim", default=4)
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
    heads = count(config, "num_attention_heads")
    rank = count(config, "kv_lora_rank")
    rope = count(config, "qk_rope_head_dim")
    nope = count(config, "qk_nope_head_dim")
    value = count(config, "v_head_dim")
    q_rank = count(config, "q_lora_rank", default=0)
    query = heads * (nope + rope)
    qkv = hidden * q_rank + q_rank * query if q_rank else hidden * query
    qkv += hidden * (rank + rope) + rank * heads * (nope + value)
    index_heads = count(config, "index_n_heads", default=0)
    index_dim = count(config, "index_head_dim", default=0) if index_heads else 0
    index = index_dim * (q_rank * index_heads + hidden) + hidden * index_heads

    def kind(name: str, number: int, indexed: bool) -> AttentionKind:
        return AttentionKind(
            name=name,
            layers=number,
            qkv_weights=qkv + (index if indexed else 0),
            o_weights=heads * value * hidden,
            heads=heads,
            kv_heads=1,
            score_dim=rank + rope,
            value_dim=rank,
            cached=rank + rope,
            top_keys=count(config, "index_topk") if index_heads else None,
            index_cached=index_dim if indexed else 0,
            index_heads=index_heads if indexed else 0,
            nope_dim=nope,
        )

    if not index_heads:
        return (kind("latent", layers, False),)
    every = max(1, count(config, "index_topk_freq", default=1))
    offset = count(config, "index_skip_topk_offset", default=2)
    indexed = sum(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    if kinds := names(config, "indexer_types"):
        indexed = kinds[:layers].count("full")
    shared = (kind("latent-shared-index", layers - indexed, False),) if indexed < layers else ()
    return (kind("latent-indexed", indexed, True), *shared)


def _compressed(config: Config, hidden: int, layers: int) -> tuple[AttentionKind, ...]:
    """DeepSeek-V4: every layer a window, most also keys compressed 4:1 (chosen by an index) or 128:1."""
    heads, dim = count(config, "num_attention_heads"), count(config, "head_dim")
    q_rank, o_rank = count(config, "q_lora_rank"), count(config, "o_lora_rank")
    index_heads, index_dim = count(config, "index_n_heads"), count(config, "index_head_dim")
    groups = count(config, "o_groups")
    base = hidden * q_rank + q_rank * heads * dim + hidden * dim
    fine = hidden * 4 * dim  # keys and gates of two overlapping series
    fine += index_dim * (4 * hidden + q_rank * index_heads) + hidden * index_heads
    ratios = counts(config, "compress_ratios")[:layers]
    if ratios and (len(ratios) < layers or not set(ratios) <= {0, 4, 128}):
        raise ConfigError(
            f"config.json: compress_ratios is {ratios!r}; it must have 0, 4 or 128 for each layer, "
            f"of which there are {layers}",
            hint=HINT,
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
            window=None if ratio else count(config, "sliding_window"),
            stride=max(ratio, 1),
            recent=count(config, "sliding_window") if ratio else 0,
            top_keys=count(config, "index_topk") if indexed else None,
            index_cached=index_dim if indexed else 0,
            index_heads=index_heads if indexed else 0,
        )

    kinds = (("compressed-4", 4, fine), ("compressed-128", 128, 2 * hidden * dim), ("window", 0, 0))
    return tuple(kind(*k) for k in kinds if k[1] in ratios)
