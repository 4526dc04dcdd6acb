"""How a checkpoint's weights are stored, by kind, as far as its ``config.json`` tells.

Where a part of a kind is stored otherwise (the first layers' attention, the matrices downwards, say), the
kind's bits are the mean over its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from headrace.core.errors import UnsupportedModelError
from headrace.core.plan_fields import HINT, Config
from headrace.core.plan_quantisation import Scheme, Stored, scheme_of
from headrace.core.plan_spec import KINDS

_PLAIN = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "bf16",  # of quantised matrices, which quantization_config describes
}
_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers")
# Modules of each kind: matrices of one size (or as good as that), each by the names in use for it.
_MODULES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "attention": (("self_attn.q_proj", "attn.qkv_proj"), ("self_attn.o_proj", "attn.o_proj")),
    "dense": (("mlp.gate_proj",), ("mlp.up_proj",), ("mlp.down_proj",)),
    "experts": (
        ("mlp.experts.0.gate_proj", "block_sparse_moe.experts.0.w1"),
        ("mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w3"),
        ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
    ),
    "shared": (
        ("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj"),
        ("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"),
        ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"),
    ),
}
_EMBEDDING = ("language_model.model.embed_tokens", "model.language_model.embed_tokens")
_HEAD = ("language_model.lm_head", "lm_head")
_ROUTER = (("mlp.gate", "mlp.router", "block_sparse_moe.gate"),)


@dataclass(frozen=True)
class StoredFormats:
    """The format of each kind, and the mean bits a weight of kinds that no one format describes."""

    formats: Mapping[str, str]
    bits: Mapping[str, float]


def stored_formats(config: Config, layers: Mapping[str, Iterable[int]]) -> StoredFormats:
    """The formats, from ``dtype`` and ``quantization_config``; bfloat16 where nothing is said.

    Args:
        layers: indices of the layers that have modules of a kind, for the kinds of ``_MODULES``.

    Raises:
        ConfigError: a value cannot be.
        UnsupportedModelError: the type or the quantisation is not one that can be counted here.
    """
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    plain = _PLAIN.get(dtype.removeprefix("torch."))
    if plain is None:
        raise UnsupportedModelError(
            f"config.json: dtype is {dtype!r}, whose bytes are not known here",
            hint=f"known: {', '.join(_PLAIN)}; or plan the .gguf file",
        )
    formats = dict.fromkeys(KINDS, plain)
    quantised = config.get("quantization_config") or config.get("quantization")
    if not quantised:
        return StoredFormats(formats, {})
    if not isinstance(quantised, Mapping):
        raise UnsupportedModelError(
            f"config.json: quantization_config is {quantised!r}; it must be an object",
            hint=HINT,
        )
    scheme = scheme_of(config, cast("Config", quantised))
    bits: dict[str, float] = {}
    kinds = dict(_MODULES)
    tables = {"lm_head": scheme.of_head(_HEAD, Stored.of(plain))}
    if scheme.tables:
        tables["embedding"] = scheme.of("embedding", _EMBEDDING, Stored.of(plain))
    for table, stored in tables.items():
        formats[table] = stored.name or plain
        if not stored.name:
            bits[table] = stored.bits
    if scheme.tables:
        kinds["router"] = _ROUTER
        layers = {**layers, "router": layers.get("experts", ())}
    for kind, modules in kinds.items():
        found = _modules(scheme, kind, modules, layers.get(kind, ()), Stored.of(plain))
        if not found:
            continue
        formats[kind] = max(found, key=lambda one: found[one]).name or plain
        if len(found) > 1 or not next(iter(found)).name:
            bits[kind] = sum(one.bits * n for one, n in found.items()) / sum(found.values())
    return StoredFormats(formats, bits)


def _modules(
    scheme: Scheme,
    kind: str,
    modules: Iterable[Iterable[str]],
    layers: Iterable[int],
    plain: Stored,
) -> dict[Stored, int]:
    """How many of the kind's modules are stored in each way; quantised ones come first."""
    found: dict[Stored, int] = {}
    alike = not scheme.left_out and not scheme.named
    for index in layers:
        for names in modules:
            full = [f"{prefix}.{index}.{name}" for prefix in _PREFIXES for name in names]
            stored = scheme.of(kind, full, plain)
            found[stored] = found.get(stored, 0) + 1
        if alike:  # all others are like the first
            break
    return dict(sorted(found.items(), key=lambda item: item[0] == plain))
