"""``quantization_config``: which quantised formats a Hugging Face checkpoint says it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from headrace.core.errors import UnsupportedModelError

SUPPORTED = (
    "mxfp4; fp8 (E4M3, one scale per tensor or 128 x 128 blocks); modelopt (NVFP4, FP8); "
    "compressed-tensors (nvfp4-pack-quantized, float-quantized)"
)


@dataclass(frozen=True)
class Quantization:
    """What the configuration promises: ``formats`` are keys of ``core.numeric.FORMATS``."""

    method: str
    formats: frozenset[str]


NONE = Quantization("none", frozenset())

# Keys that say which layers, or how the file came to be, and change no value of a weight. The
# activations' own quantisation is one of them: we compute with float activations.
_HARMLESS = frozenset(
    {
        "quant_method",
        "modules_to_not_convert",
        "ignored_layers",
        "ignore",
        "exclude_modules",
        "config_groups",
        "activation_scheme",
        "producer",
        "version",
        "quantization_status",
        "global_compression_ratio",
        "kv_cache_scheme",
        "kv_cache_quant_algo",
        "dequantize",
    }
)
_READ = frozenset({"quant_algo", "format", "fmt", "weight_block_size", "group_size"})


def read_quantization(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, where: str
) -> Quantization:
    """Read config.json's ``quantization_config``, or ModelOpt's hf_quant_config.json without one.

    Raises:
        UnsupportedModelError: a method, a variant of one, or a key that is not implemented.
    """
    given = config.get("quantization_config")
    if given is None and hf_quant_config is not None:
        where = where.replace("config.json", "hf_quant_config.json")
        inner = hf_quant_config.get("quantization")
        given = {"quant_method": "modelopt", **(cast("dict[str, Any]", inner or {}))}
    if given is None:
        return NONE
    if not isinstance(given, Mapping):
        raise _refuse(where, "quantization_config", given)
    values = cast("Mapping[str, Any]", given)
    method = values.get("quant_method")
    readers = {
        "mxfp4": _mxfp4,
        "fp8": _fp8,
        "modelopt": _modelopt,
        "compressed-tensors": _compressed,
    }
    if not isinstance(method, str) or method not in readers:
        raise _refuse(where, "quantization_config.quant_method", method)
    for key, value in values.items():
        # Sparsity, transforms and what else may come: an empty value switches a thing off.
        if key not in _HARMLESS and key not in _READ and value not in (None, False, {}, []):
            raise _refuse(where, f"quantization_config.{key}", value)
    return Quantization(method, readers[method](values, where))


def _refuse(where: str, key: str, value: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: {key} = {value!r} is not implemented", hint=f"supported: {SUPPORTED}"
    )


def _mxfp4(values: Mapping[str, Any], where: str) -> frozenset[str]:
    del values, where
    return frozenset({"mxfp4"})


def _fp8(values: Mapping[str, Any], where: str) -> frozenset[str]:
    if values.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise _refuse(where, "quantization_config.fmt", values["fmt"])
    if values.get("weight_block_size") not in (None, [128, 128]):
        raise _refuse(where, "quantization_config.weight_block_size", values["weight_block_size"])
    return frozenset({"fp8_e4m3"})


def _modelopt(values: Mapping[str, Any], where: str) -> frozenset[str]:
    algorithm = values.get("quant_algo")
    formats = {"NVFP4": "nvfp4", "FP8": "fp8_e4m3"}
    if not isinstance(algorithm, str) or algorithm not in formats:
        raise _refuse(where, "quantization_config.quant_algo", algorithm)
    if algorithm == "NVFP4" and values.get("group_size") not in (None, 16):
        raise _refuse(where, "quantization_config.group_size", values["group_size"])
    return frozenset({formats[algorithm]})


def _compressed(values: Mapping[str, Any], where: str) -> frozenset[str]:
    formats = {"nvfp4-pack-quantized": "nvfp4", "float-quantized": "fp8_e4m3"}
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refuse(where, "quantization_config.config_groups", groups)
    found: set[str] = set()
    for name, group in cast("Mapping[str, Any]", groups).items():
        at = f"quantization_config.config_groups.{name}"
        if not isinstance(group, Mapping):
            raise _refuse(where, at, group)
        fields = cast("Mapping[str, Any]", group)
        layout = fields.get("format") or values.get("format")
        if not isinstance(layout, str) or layout not in formats:
            raise _refuse(where, f"{at}.format", layout)
        given = fields.get("weights")
        weights: Mapping[str, Any] = {}
        if isinstance(given, Mapping):
            weights = cast("Mapping[str, Any]", given)
        bits = 4 if formats[layout] == "nvfp4" else 8
        if (weights.get("type"), weights.get("num_bits")) != ("float", bits):
            raise _refuse(where, f"{at}.weights", given)
        if bits == 4 and weights.get("group_size") != 16:
            raise _refuse(where, f"{at}.weights.group_size", weights.get("group_size"))
        found.add(formats[layout])
    return frozenset(found)
