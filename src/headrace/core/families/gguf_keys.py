"""GGUF metadata as the configuration that config.json would have held.

Key names: the GGUF specification and the constants of the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.families.reading import ConfigReader

# Keys under "<architecture>." that do not change what is computed.
_METADATA = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "attention.causal"})


def open_metadata(metadata: Mapping[str, Any], architecture: str) -> ConfigReader:
    """A reader of the keys under ``architecture.``; the prefix is left out of their names."""
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return ConfigReader(own, where="GGUF metadata", prefix=prefix)


def read_common(
    metadata: Mapping[str, Any], reader: ConfigReader, *, architecture: str
) -> dict[str, Any]:
    """The config.json keys that every family has. Families add their own, then call ``finish``.

    ``tie_word_embeddings`` is true here: GGUF has no such key, a file without ``output.weight``
    ties. The reader of the file, which knows its tensors, sets it to false where there is one.
    """
    heads = _one(reader, "attention.head_count")
    hidden = reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", default=max(hidden // heads, 1))
    reader.must_be("attention.value_length", head_dim)
    reader.must_be("rope.dimension_count", head_dim)
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab = reader.integer("vocab_size", default=None if tokens is None else len(tokens))
    # Files whose layers are all mixtures may give only the experts' size.
    expert_size = reader.config.get("expert_feed_forward_length")
    default_size = ... if expert_size is None else expert_size
    config: dict[str, Any] = {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": _one(reader, "feed_forward_length", default=default_size),
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(reader, "attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": reader.integer("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.number("rope.freq_base", default=10000.0),
        "tie_word_embeddings": True,
    }
    scaling = _scaling(reader, config["max_position_embeddings"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    for name in ("bos", "eos"):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None:
            config[f"{name}_token_id"] = int(value)
    return config


def finish(reader: ConfigReader) -> None:
    """Refuse the keys that nobody asked for."""
    reader.refuse_rest(_METADATA)


def read_experts(
    reader: ConfigReader, config: dict[str, Any], *, count: str, size: str = "intermediate_size"
) -> None:
    """Add the counts and the size of experts to ``config``, under the family's own key names."""
    config[count] = reader.integer("expert_count")
    config["num_experts_per_tok"] = reader.integer("expert_used_count")
    config[size] = reader.integer("expert_feed_forward_length", default=config["intermediate_size"])


def _one(reader: ConfigReader, name: str, default: Any = ...) -> int:
    """A count that GGUF may store for each layer; all layers must agree."""
    value = reader.config.get(name)
    if value is not None and hasattr(value, "__len__") and not isinstance(value, str):
        reader.used.add(name)
        distinct = sorted({int(v) for v in value})
        if len(distinct) != 1 or distinct[0] < 1:
            raise ConfigError(
                f"{reader.where}: {reader.prefix}{name} differs between layers: {distinct}",
                hint="layers of different shapes are not implemented",
            )
        return distinct[0]
    return reader.integer(name) if default is ... else reader.integer(name, default=default)


def _scaling(reader: ConfigReader, max_context: int) -> dict[str, Any] | None:
    kind = reader.raw("rope.scaling.type", default="none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": reader.number("rope.scaling.factor"),
    }
    # llama.cpp multiplies YaRN's own factor by these two; only 1 is implemented.
    reader.must_be("rope.scaling.attn_factor", 1.0)
    reader.must_be("rope.scaling.yarn_attn_factor", 1.0)
    original = reader.integer("rope.scaling.original_context_length", default=max_context)
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        scaling["beta_fast"] = reader.number("rope.scaling.yarn_beta_fast", default=32.0)
        scaling["beta_slow"] = reader.number("rope.scaling.yarn_beta_slow", default=1.0)
    return scaling
