"""How many bytes a model's weights take, from its configuration alone, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from headrace.checkpoint.quantization import Quantization, read_quantization
from headrace.core.errors import DoesNotFitError, UnsupportedModelError
from headrace.core.model_spec import ModelSpec
from headrace.core.numeric import FORMATS
from headrace.core.weight_shapes import attention_shapes, num_parameters

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of weights by kind. ``embeddings``: input, and output head unless it is tied."""

    experts: int
    dense: int
    embeddings: int

    @property
    def total(self) -> int:
        return self.experts + self.dense + self.embeddings


def weight_sizes(config: Mapping[str, Any], *, where: str = "config.json") -> WeightSizes:
    """Bytes of a Hugging Face checkpoint's weights, before any of them is downloaded.

    Experts are counted exactly. Of the quantised methods MXFP4 leaves everything but experts as it
    is; the others quantise every linear layer but router and head, and leave attention out where
    the configuration's list of exceptions says so. (FP8's scales, one per tensor or per 16,384
    weights, are left out: at most 0.03%.)

    Raises:
        UnsupportedModelError, ConfigError: the configuration cannot be read.
    """
    quantization = read_quantization(config, None, where)
    return sizes_of(ModelSpec.from_config(config), quantization, config)


def sizes_of(spec: ModelSpec, quantization: Quantization, config: Mapping[str, Any]) -> WeightSizes:
    """``weight_sizes`` of a configuration that was read already."""
    plain = _plain_format(config)
    packed = max(quantization.formats, key=_bits, default=plain)
    attention = packed
    if quantization.method == "mxfp4" or _leaves_attention(config):
        attention = plain
    dense = plain if quantization.method == "mxfp4" else packed
    counts = num_parameters(spec)
    biases = _expert_biases(spec)
    # Biases, sinks and query/key norms stay plain.
    matrices = spec.num_layers * sum(
        prod(shape) for shape in attention_shapes(spec).values() if len(shape) > 1
    )
    return WeightSizes(
        experts=_nbytes(counts.experts - biases, packed) + _nbytes(biases, plain),
        dense=_nbytes(matrices, attention)
        + _nbytes(counts.attention - matrices, plain)
        + _nbytes(counts.dense_ffn, dense)
        + _nbytes(counts.router + counts.norm, plain),
        embeddings=_nbytes(counts.embedding + counts.lm_head, plain),
    )


def require_fit(required_nbytes: int, available_nbytes: int, what: str) -> None:
    """Refuse what cannot fit, before any of it is read.

    Args:
        required_nbytes: of weights, cache and workspace, as far as they are known.
        available_nbytes: what this machine can give.
        what: the model, for the message.

    Raises:
        DoesNotFitError: names both numbers.
    """
    if required_nbytes > available_nbytes:
        raise DoesNotFitError(
            f"{what} needs {_gigabytes(required_nbytes)}, this machine can give "
            f"{_gigabytes(available_nbytes)}",
            hint="choose a smaller model or one with fewer bits per weight, or a machine with more "
            "memory",
        )


def _gigabytes(nbytes: int) -> str:
    """Decimal gigabytes, as memory plans and file sizes are quoted: 61.2 GB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def _plain_format(config: Mapping[str, Any]) -> str:
    """The format of what is not quantised; published models say which, bfloat16 is the habit."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(
            f"config.json: dtype {dtype!r} is not implemented",
            hint=f"supported: {', '.join(_DTYPES)}",
        )
    return _DTYPES[name]


def _leaves_attention(config: Mapping[str, Any]) -> bool:
    given = config.get("quantization_config")
    if not isinstance(given, Mapping):
        return False
    values = cast("Mapping[str, Any]", given)
    lists = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    return any("self_attn" in str(module) for key in lists for module in values.get(key) or ())


def _expert_biases(spec: ModelSpec) -> int:
    moe = spec.moe
    if moe is None or not moe.expert_bias:
        return 0
    mixtures = sum(layer.moe for layer in spec.layers)
    return mixtures * moe.num_experts * (2 * moe.intermediate + spec.hidden)


def _bits(name: str) -> float:
    return FORMATS[name].bits_per_weight


def _nbytes(weights: int, name: str) -> int:
    """Bytes of ``weights`` in whole blocks; every matrix here has rows of whole blocks."""
    form = FORMATS[name]
    return -(-weights // form.block_weights) * form.block_nbytes
