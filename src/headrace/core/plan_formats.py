"""How a checkpoint's weights are stored, by kind, as far as its ``config.json`` tells.

A quantisation covers every matrix between embedding and head, but for the modules that the configuration
leaves out. Where it leaves out a part of a kind (the first layers' attention, say), the kind's bits are
the mean over its modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, cast

from headrace.core.errors import UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.core.plan_spec import KINDS

Config = Mapping[str, Any]

_PLAIN = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "bf16",  # of quantised matrices, which quantization_config describes
}
_FP8, _NVFP4, _MXFP4 = "fp8_e4m3", "nvfp4", "mxfp4"
# Where modules that are left out are listed: transformers, compressed-tensors, ModelOpt (twice).
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers")
# Modules of each kind, by the names in use for it.
_MODULES = {
    "attention": ("self_attn.q_proj", "self_attn.o_proj", "attn.qkv_proj"),
    "dense": ("mlp.gate_proj", "mlp.down_proj"),
    "experts": ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2"),
    "shared": ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"),
}


@dataclass(frozen=True)
class StoredFormats:
    """The format of each kind, and the mean bits a weight of kinds that are stored in two formats."""

    formats: Mapping[str, str]
    bits: Mapping[str, float]


def stored_formats(config: Config, layers: Mapping[str, Iterable[int]]) -> StoredFormats:
    """The formats, from ``dtype`` and ``quantization_config``; bfloat16 where nothing is said.

    Args:
        layers: indices of the layers that have modules of a kind, for the kinds of ``_MODULES``.

    Raises:
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
    quantised = config.get("quantization_config")
    if not quantised:
        return StoredFormats(formats, {})
    if not isinstance(quantised, Mapping):
        raise UnsupportedModelError(
            f"config.json: quantization_config is {quantised!r}; it must be an object",
            hint="is this a language model's config.json, as it was published?",
        )
    found = _formats_of(config, cast("Config", quantised))
    bits: dict[str, float] = {}
    for kind, name in found.items():
        share = _share_left_out(kind, layers.get(kind, ()), _patterns(cast("Config", quantised)))
        if share < 1:
            formats[kind] = name
        if 0 < share < 1:
            mixed = (FORMATS[plain].bits_per_weight, FORMATS[name].bits_per_weight)
            bits[kind] = share * mixed[0] + (1 - share) * mixed[1]
    return StoredFormats(formats, bits)


def _formats_of(config: Config, quantised: Config) -> dict[str, str]:
    """The format of each kind that the quantisation covers."""
    method = str(quantised.get("quant_method", "")).lower()
    if method == "mxfp4":
        return {"experts": _MXFP4}
    linear = _linear_format(method, quantised)
    if linear is None:
        raise UnsupportedModelError(
            f"quantization_config.quant_method is {method!r}, whose bytes are not known here",
            hint="known: mxfp4, fp8, NVFP4 and FP8 by modelopt or compressed-tensors; or plan the "
            ".gguf file",
        )
    formats = dict.fromkeys(_MODULES, linear)
    expert = str(config.get("expert_dtype") or quantised.get("expert_dtype") or "").lower()
    if "fp4" in expert:
        formats["experts"] = _MXFP4
    return formats


def _linear_format(method: str, quantised: Config) -> str | None:
    """What matrices are stored in, None if that is not known."""
    if method == "fp8":
        return _FP8
    if "nvfp4" in str({k: v for k, v in quantised.items() if k not in _LEFT_OUT}).lower():
        return _NVFP4
    if method == "modelopt" and quantised.get("quant_algo") == "FP8":
        return _FP8
    if method == "compressed-tensors" and quantised.get("format") == "float-quantized":
        return _FP8
    return None


def _patterns(quantised: Config) -> tuple[str, ...]:
    found: list[str] = []
    for key in _LEFT_OUT:
        names = quantised.get(key)
        if isinstance(names, list):
            found += [str(name) for name in cast("list[object]", names)]
    return tuple(found)


def _share_left_out(kind: str, layers: Iterable[int], patterns: tuple[str, ...]) -> float:
    """Of the kind's layers, how many the configuration leaves out of the quantisation."""
    indices = tuple(layers)
    if not indices or not patterns:
        return 0.0
    return sum(_is_left_out(kind, index, patterns) for index in indices) / len(indices)


def _is_left_out(kind: str, index: int, patterns: tuple[str, ...]) -> bool:
    plain, wild, expressions = _sorted_patterns(patterns)
    for prefix in _PREFIXES:
        for module in _MODULES[kind]:
            name = f"{prefix}.{index}.{module}"
            parts = name.split(".")
            inside = (
                ".".join(parts[i:j])
                for i in range(len(parts))
                for j in range(i + 1, len(parts) + 1)
            )
            if any(part in plain for part in inside):
                return True
            if any(fnmatchcase(name, pattern) for pattern in wild):
                return True
            if any(e.match(name) for e in expressions):
                return True
    return False


@cache
def _sorted_patterns(
    patterns: tuple[str, ...],
) -> tuple[frozenset[str], tuple[str, ...], tuple[re.Pattern[str], ...]]:
    """Names, names with wild cards, and regular expressions (``re:`` before them)."""
    expressions = tuple(re.compile(p[3:]) for p in patterns if p.startswith("re:"))
    others = [p for p in patterns if not p.startswith("re:")]
    wild = tuple(p for p in others if "*" in p or "?" in p)
    return frozenset(others) - frozenset(wild), wild, expressions
