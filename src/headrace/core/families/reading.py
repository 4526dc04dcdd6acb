"""Typed reading of a configuration, where every key is used, known to be harmless, or refused.

A key that this code has never heard of may change what the model computes. Ignoring it would give
fluent nonsense, so it is an error that names the key, unless its value is one that switches a
feature off (null, false, an empty list, or the key's neutral value).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.core.model_spec import LayerSpec, RopeSpec
from headrace.core.words import counted

# Keys of config.json that say nothing about what inference computes.
METADATA_KEYS = frozenset(
    {
        "architectures",
        "attention_dropout",  # training only
        "auto_map",
        "chunk_size_feed_forward",  # memory of training, same result
        "dtype",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_sequence_length",  # repeats max_position_embeddings in early Llama files
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",  # splits a sum; transformers dropped it
        "problem_type",
        "quantization_config",  # the checkpoint reader's
        "return_dict",
        "router_aux_loss_coef",  # training loss
        "router_jitter_noise",  # training only
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

# Keys that no family here implements, with the value that leaves the model unchanged.
NEUTRAL_VALUES: Mapping[str, Any] = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "partial_rotary_factor": 1.0,
    "residual_multiplier": 1.0,
    "routed_scaling_factor": 1.0,
}

# Rope keys that each rule reads; "type" is the older name of "rope_type".
_ROPE_RULES: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "truncate",
        }
    ),
}
_ROPE_METADATA = frozenset({"rope_type", "type", "rope_theta", "finetuned"})

_MISSING: Any = object()


class ConfigReader:
    """Reads typed values out of a configuration and remembers which keys were asked for.

    Args:
        config: the parsed configuration.
        where: what to call it in messages.
        prefix: what its keys are called in the file in front of the name used here (GGUF).
    """

    def __init__(
        self, config: Mapping[str, Any], *, where: str = "config.json", prefix: str = ""
    ) -> None:
        self.config = config
        self.where = where
        self.prefix = prefix
        self.used: set[str] = set()

    def raw(self, *names: str, default: Any = _MISSING) -> Any:
        """The value of the first of ``names`` that is set; names that are set must agree."""
        self.used.update(names)
        found = {n: self.config[n] for n in names if self.config.get(n) is not None}
        if not found:
            if default is _MISSING:
                raise ConfigError(
                    f"{self.where} has no {self.prefix}{names[0]!s}",
                    hint="the file is incomplete, or belongs to another architecture",
                )
            return default
        first = next(iter(found.values()))
        if any(v != first for v in found.values()):
            pairs = ", ".join(f"{self.prefix}{n} = {v!r}" for n, v in found.items())
            raise ConfigError(
                f"{self.where} contradicts itself: {pairs}",
                hint="these keys mean the same; make them agree",
            )
        return first

    def integer(self, *names: str, default: Any = _MISSING, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        value = self.raw(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
            raise self._wrong(names[0], value, f"a whole number of at least {minimum}")
        return int(value)

    def number(self, *names: str, default: Any = _MISSING, above: float = 0.0) -> float:
        """A finite number larger than ``above``."""
        value = self.raw(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise self._wrong(names[0], value, f"a number larger than {above:g}")
        number = float(value)
        if not above < number < float("inf"):
            raise self._wrong(names[0], value, f"a number larger than {above:g}")
        return number

    def flag(self, name: str, *, default: Any = _MISSING) -> bool:
        """true or false."""
        value = self.raw(name, default=default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def strings(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or None where there is none."""
        value = self.raw(name, default=None)
        if value is None:
            return None
        items = cast("Sequence[Any]", value if isinstance(value, list | tuple) else (None,))
        if not all(isinstance(v, str) for v in items):
            raise self._wrong(name, value, "a list of strings")
        return tuple(items)

    def integers(self, name: str) -> tuple[int, ...]:
        """A whole number or a list of them, of at least zero; empty where there is none."""
        value = self.raw(name, default=None)
        items = cast("Sequence[Any]", value if isinstance(value, list | tuple) else (value,))
        if value is None:
            return ()
        if any(isinstance(v, bool) or not isinstance(v, Integral) or v < 0 for v in items):
            raise self._wrong(name, value, "a whole number or a list of them")
        return tuple(int(v) for v in items)

    def must_be(self, name: str, expected: Any) -> None:
        """Refuse the model unless ``name`` is absent or has the only value that is implemented."""
        value = self.raw(name, default=expected)
        if value != expected:
            raise UnsupportedModelError(
                f"{self.where}: {self.prefix}{name} = {value!r} is not implemented",
                hint=f"the only value supported for this architecture is {expected!r}",
            )

    def refuse_rest(self, harmless: Iterable[str] = ()) -> None:
        """Refuse what nobody asked for and what may change the numerics.

        Raises:
            UnsupportedModelError: names the first such key and its value.
        """
        ignored = METADATA_KEYS | set(harmless)
        for name, value in self.config.items():
            if name in self.used or name in ignored or name.startswith("_"):
                continue
            if value is None or value is False:
                continue
            if isinstance(value, list | tuple | Mapping) and not value:
                continue
            if name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]:
                continue
            raise UnsupportedModelError(
                f"{self.where}: {self.prefix}{name} = {value!r} is not implemented",
                hint="it may change what the model computes, so the model is refused; "
                "remove the key only if you know that it has no effect",
            )

    def _wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {self.prefix}{name} = {value!r}, expected {expected}",
            hint="the file is damaged or was edited by hand",
        )


def read_heads(reader: ConfigReader, *, head_dim: bool = True) -> tuple[int, int, int]:
    """Return query heads, key/value heads and the dimension of a head.

    ``head_dim`` false: the family has no key of that name and always divides the hidden size.
    """
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", default=heads)
    hidden = reader.integer("hidden_size")
    given = reader.raw("head_dim", default=None)
    if given is None or not head_dim:
        if hidden % heads:
            raise ConfigError(
                f"{reader.where}: hidden_size = {hidden} is not a multiple of "
                f"num_attention_heads = {heads}",
                hint="give head_dim, or correct one of the two",
            )
        if given is not None:
            reader.must_be("head_dim", hidden // heads)
    dim = reader.integer("head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{reader.where}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}",
            hint="every key/value head serves the same number of query heads",
        )
    if dim % 2:
        raise ConfigError(
            f"{reader.where}: head_dim = {dim}, expected an even number",
            hint="rotary embedding turns pairs of dimensions",
        )
    return heads, kv_heads, dim


def read_rope(
    reader: ConfigReader, head_dim: int, max_context: int, *, theta: float, truncate: bool = True
) -> RopeSpec:
    """Read the rotary embedding: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    ``theta`` and ``truncate`` are the family's defaults.
    """
    nested = reader.raw("rope_parameters", default=None)
    older = reader.raw("rope_scaling", default=None)
    values: dict[str, Any] = {}
    for name, given in (("rope_scaling", older), ("rope_parameters", nested)):
        if given is None:
            continue
        inner = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else None
        if inner is None or any(isinstance(v, Mapping) for v in inner.values()):
            raise UnsupportedModelError(
                f"{reader.where}: {name} = {given!r} is not implemented",
                hint="one set of rope parameters for all layers is supported",
            )
        values.update(inner)
    outer = reader.raw("rope_theta", default=None)
    if outer is not None and values.setdefault("rope_theta", outer) != outer:
        raise ConfigError(
            f"{reader.where} contradicts itself: rope_theta = {outer!r}, "
            f"rope_parameters.rope_theta = {values['rope_theta']!r}",
            hint="these keys mean the same; make them agree",
        )
    rope = ConfigReader(values, where=reader.where, prefix="rope_parameters.")
    rule = rope.raw("rope_type", "type", default="default")
    if rule not in _ROPE_RULES:
        raise UnsupportedModelError(
            f"{reader.where}: rope type {rule!r} is not implemented",
            hint=f"supported: {', '.join(sorted(_ROPE_RULES))}",
        )
    base = RopeSpec(theta=rope.number("rope_theta", default=theta, above=1.0), dim=head_dim)
    spec = _scaled(rope, str(rule), base, max_context, truncate)
    rope.used &= _ROPE_RULES[rule] | _ROPE_METADATA
    rope.refuse_rest(_ROPE_METADATA)
    return spec


def _scaled(
    rope: ConfigReader, rule: str, base: RopeSpec, max_context: int, truncate: bool
) -> RopeSpec:
    if rule == "default":
        return base
    factor = rope.number("factor")
    if rule == "linear":
        return RopeSpec(base.theta, base.dim, "linear", factor)
    original = rope.integer("original_max_position_embeddings", default=max_context)
    if rule == "llama3":
        low = rope.number("low_freq_factor")
        return RopeSpec(
            base.theta,
            base.dim,
            "llama3",
            factor,
            original,
            low_freq_factor=low,
            high_freq_factor=rope.number("high_freq_factor", above=low),
        )
    given = rope.raw("attention_factor", default=None)
    return RopeSpec(
        base.theta,
        base.dim,
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        attention_factor=None if given is None else rope.number("attention_factor"),
        truncate=rope.flag("truncate", default=truncate),
    )


def read_windows(
    reader: ConfigReader, num_layers: int, window: int | None, default: tuple[str, ...] | None
) -> tuple[int | None, ...]:
    """Return each layer's attention window from ``layer_types`` (or ``default`` where absent)."""
    kinds = reader.strings("layer_types") or default or ("full_attention",) * num_layers
    if len(kinds) != num_layers:
        raise ConfigError(
            f"{reader.where}: layer_types has {counted(len(kinds), 'entry', 'entries')}, "
            f"num_hidden_layers = {num_layers}",
            hint="give one entry for each layer",
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{reader.where}: layer type {kind!r} is not implemented",
                hint="supported: full_attention, sliding_attention",
            )
        if kind == "sliding_attention" and window is None:
            raise ConfigError(
                f"{reader.where}: layer_types has sliding_attention, but there is no window",
                hint="give sliding_window (and use_sliding_window, where the family has it)",
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_top_k(reader: ConfigReader, *count_names: str) -> tuple[int, int]:
    """Return the number of experts and how many of them a token uses."""
    experts = reader.integer(*count_names)
    chosen = reader.integer("num_experts_per_tok", "experts_per_token")
    if chosen > experts:
        raise ConfigError(
            f"{reader.where}: num_experts_per_tok = {chosen} of {count_names[0]} = {experts}",
            hint="a token cannot use more experts than there are",
        )
    return experts, chosen


def read_sizes(reader: ConfigReader) -> dict[str, Any]:
    """The keys that every family spells the same, as arguments of ``ModelSpec``."""
    bos = reader.raw("bos_token_id", default=None)
    return {
        "hidden": reader.integer("hidden_size"),
        "vocab": reader.integer("vocab_size"),
        "intermediate": reader.integer("intermediate_size"),
        "max_context": reader.integer("max_position_embeddings"),
        "tie_embeddings": reader.flag("tie_word_embeddings", default=False),
        "bos_token_id": None if bos is None else reader.integer("bos_token_id", minimum=0),
        "eos_token_ids": reader.integers("eos_token_id"),
    }


def uniform_layers(
    num_layers: int, *, window: int | None = None, moe: bool
) -> tuple[LayerSpec, ...]:
    """``num_layers`` equal layers."""
    return (LayerSpec(window=window, moe=moe),) * num_layers
