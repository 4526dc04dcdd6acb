"""Counts and lists of a config.json, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headrace.core.errors import ConfigError

Config = Mapping[str, Any]
MOST = 2**40  # of what weights are counted with: far above any model's
HINT = "is this a language model's config.json, as it was published?"

# Counts that nothing can be divided by or made of when they are 0.
_POSITIVE = frozenset(
    """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    max_position_embeddings full_attention_interval decoder_sparse_step num_experts_per_tok
    num_experts_per_token experts_per_token moe_topk moe_top_k moe_k moe_intermediate_size
    sliding_window_pattern _sliding_window_pattern interleave_moe_layer_step moe_layer_interval
    no_rope_layer_interval intermediate_size intermediate_size_mlp ffn_dim""".split()
)


def names(config: Config, name: str) -> list[str]:
    """A list of words, empty where there is none."""
    found = _list(config, name, "words")
    if not all(isinstance(one, str) for one in found):
        raise _no_list(name, found, "words")
    return [str(one) for one in found]


def counts(config: Config, name: str) -> list[int]:
    """A list of whole numbers of at least 0, empty where there is none."""
    what = "whole numbers of at least 0"
    given = _list(config, name, what)
    found = [n for n in given if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if len(found) < len(given):
        raise _no_list(name, given, what)
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
        hint=HINT,
        param=name,
    )


def count(config: Config, *keys: str, default: int | None = None) -> int:
    """The first of ``keys`` that is there, a whole number of at least 0, or 1 for ``_POSITIVE``.

    Raises:
        ConfigError: none is there and there is no default, or it is another value.
    """
    for name in keys:
        value = config.get(name)
        if value is None:
            continue
        least = int(name in _POSITIVE)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"config.json: {name} is {value!r}; it must be a whole number of at least {least}",
                hint=HINT,
                param=name,
            )
        if value > MOST and (least or name.endswith(("_size", "_dim", "_rank"))):
            raise ConfigError(
                f"config.json: {name} is {value}; it must be at most {MOST}", hint=HINT, param=name
            )
        return value
    if default is not None:
        return default
    raise ConfigError(
        f"config.json has no {' or '.join(keys)}",
        hint="is this a language model's config.json?",
        param=keys[0],
    )
