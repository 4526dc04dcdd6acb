"""Stored Hugging Face tensors to canonical ones: codes and scales that belong together, joined.

======================  =======================================================================
format                  stored beside a weight ``X.weight`` (or a stacked ``X``), N rows, K columns
======================  =======================================================================
f32, f16, bf16          ``X.weight`` [N, K]
mxfp4                   ``X_blocks`` U8 [E, N, K / 32, 16], ``X_scales`` U8 [E, N, K / 32]
fp8_e4m3                ``X.weight`` F8_E4M3 [N, K] and ``X.weight_scale`` or
                        ``X.weight_scale_inv`` (which multiplies, whatever its name says): one
                        number, or one per 128 x 128 block
nvfp4 (ModelOpt)        ``X.weight`` U8 [N, K / 2], ``X.weight_scale`` F8_E4M3 [N, K / 16],
                        ``X.weight_scale_2`` F32
nvfp4 (compressed-      ``X.weight_packed`` U8 [N, K / 2], ``X.weight_scale`` F8_E4M3 [N, K / 16],
tensors)                ``X.weight_global_scale`` F32, the reciprocal of what multiplies
======================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.names import NameMap
from headrace.checkpoint.quantization import SUPPORTED, Quantization
from headrace.checkpoint.records import RawTensor
from headrace.checkpoint.safetensors import StoredTensor
from headrace.core.errors import CheckpointError, UnsupportedModelError
from headrace.core.words import counted, plural

_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# Suffix of a stored name -> the role that the tensor plays, longest suffix first.
_ROLES: tuple[tuple[str, str], ...] = tuple(
    sorted(
        (
            (".weight_packed", "packed"),
            (".weight_scale", "scale"),
            (".weight_scale_inv", "scale"),
            (".weight_scale_2", "global"),
            (".weight_global_scale", "reciprocal"),
            (".input_scale", "unused"),  # scales of activations and of the KV cache: we keep
            (".input_global_scale", "unused"),  # activations in float32, the cache in its own
            (".k_scale", "unused"),
            (".v_scale", "unused"),
            ("_blocks", "blocks"),
            ("_scales", "scale"),
            ("_scale_inv", "scale"),
        ),
        key=lambda pair: -len(pair[0]),
    )
)
# Canonical names that carry no weight: what theta already says.
_NO_WEIGHT = ("rope_inv_freq",)
# Where the scales of a whole attention block hang.
_ATTENTION_SCALES = (".self_attn.k_scale", ".self_attn.v_scale")


@dataclass(frozen=True)
class Assembled:
    """Canonical tensors, and notes about stored ones that are not used."""

    tensors: dict[str, RawTensor]
    notes: tuple[str, ...]


def assemble(
    stored: Mapping[str, StoredTensor], names: NameMap, quantization: Quantization
) -> Assembled:
    """Join ``stored`` tensors into canonical ones, without a copy of codes or weights.

    Raises:
        CheckpointError: a name that the family does not know, parts that do not belong together,
            or a part of a quantised tensor that is missing.
        UnsupportedModelError: a numeric format, or a format that the configuration does not name.
    """
    groups: dict[str, dict[str, StoredTensor]] = {}
    unused: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        canonical, role = _place(name, names)
        if canonical is None:
            raise CheckpointError(
                f"{tensor.source}: the model has no place for this tensor",
                hint="the configuration and the weights belong to different models, or the "
                "numeric format is not implemented",
            )
        if role == "unused" or canonical.rsplit(".", 1)[-1] in _NO_WEIGHT:
            unused.setdefault(name.rsplit(".", 1)[-1], []).append(name)
            continue
        group = groups.setdefault(canonical, {})
        if role in group:
            raise CheckpointError(
                f"{tensor.source}: {group[role].name} already holds this part of {canonical}",
                hint="the checkpoint mixes two numeric formats for one weight",
            )
        group[role] = tensor
    tensors = {name: _join(name, group) for name, group in groups.items()}
    for raw in tensors.values():
        if raw.format not in _FLOATS.values() and raw.format not in quantization.formats:
            promised = ", ".join(sorted(quantization.formats)) or "no quantised format"
            raise CheckpointError(
                f"{raw.source} is {raw.format}, but the configuration names {promised}",
                hint="config.json's quantization_config is missing or of another checkpoint",
            )
    notes = (
        f"{counted(len(found), 'tensor')} named {kind} {plural(len(found), 'is', 'are')} not used, "
        f"for example {found[0]}"
        for kind, found in sorted(unused.items())
    )
    return Assembled(tensors, tuple(notes))


def _place(name: str, names: NameMap) -> tuple[str | None, str]:
    """The canonical tensor that a stored one belongs to, and its role in it."""
    direct = names.canonical(name)
    if direct is not None:
        return direct, "weight"
    for suffix, role in _ROLES:
        if name.endswith(suffix):
            stem = name.removesuffix(suffix)
            if name.endswith(_ATTENTION_SCALES):
                stem += f".{suffix[1]}_proj"
            return names.canonical(stem + ".weight" if suffix[0] == "." else stem), role
    return None, ""


def _join(name: str, group: Mapping[str, StoredTensor]) -> RawTensor:
    weight = group.get("weight")
    if weight is not None and len(group) == 1 and weight.dtype in _FLOATS:
        form = _FLOATS[weight.dtype]
        return RawTensor(name, form, weight.shape, {"data": weight.data}, weight.source)
    if "blocks" in group:
        return _mxfp4(name, *_need(name, group, "blocks", "scale"))
    if "packed" in group:
        return _nvfp4(name, *_need(name, group, "packed", "scale", "reciprocal"), reciprocal=True)
    if weight is not None and weight.dtype == "F8_E4M3":
        return _fp8(name, *_need(name, group, "weight", "scale"))
    if weight is not None and weight.dtype == "U8":
        return _nvfp4(name, *_need(name, group, "weight", "scale", "global"), reciprocal=False)
    if weight is None:
        some = next(iter(group.values()))
        raise CheckpointError(
            f"{some.source}: the scales are there, but the weight that they belong to is missing",
            hint="the download is incomplete",
        )
    if weight.dtype in _FLOATS:
        extra = next(t for role, t in group.items() if role != "weight")
        raise CheckpointError(
            f"{extra.source}: a scale for {weight.name}, which is stored as {weight.dtype}",
            hint="the checkpoint mixes two numeric formats for one weight",
        )
    raise UnsupportedModelError(
        f"{weight.source} has dtype {weight.dtype}, which is not implemented for weights",
        hint=f"supported: F32, F16, BF16; {SUPPORTED}",
    )


_ROLE_WORDS = {
    "scale": "scale",
    "global": "weight_scale_2",
    "reciprocal": "weight_global_scale",
}


def _need(name: str, group: Mapping[str, StoredTensor], *roles: str) -> list[StoredTensor]:
    """The tensors of ``roles``: each must be there, and no other."""
    main = group[roles[0]]
    for role in roles:
        if role not in group:
            raise CheckpointError(
                f"{main.source}: its {_ROLE_WORDS[role]} is missing ({name})",
                hint="the download is incomplete, or the numeric format is not implemented",
            )
    for role, tensor in group.items():
        if role not in roles:
            raise CheckpointError(
                f"{tensor.source}: this part does not belong to the format of {main.name}",
                hint="the checkpoint mixes two numeric formats for one weight",
            )
    return [group[role] for role in roles]


def _expect(tensor: StoredTensor, dtype: str, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.source}: {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}",
            hint="the tensor does not belong to its weight, or the file is damaged",
        )


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> RawTensor:
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or blocks.dtype != "U8":
        raise CheckpointError(
            f"{blocks.source}: {blocks.dtype} {list(blocks.shape)}, expected U8 [..., rows, "
            "columns / 32, 16]",
            hint="the tensor is not in the MXFP4 layout",
        )
    *outer, groups, _ = blocks.shape
    _expect(scales, "U8", (*outer, groups))
    parts = {
        "codes": blocks.data.reshape(*outer, groups * 16),
        "scales": scales.data,
    }
    return RawTensor(name, "mxfp4", (*outer, groups * 32), parts, blocks.source)


def _fp8(name: str, codes: StoredTensor, scale: StoredTensor) -> RawTensor:
    shape = codes.shape
    if len(shape) < 2:
        raise CheckpointError(
            f"{codes.source}: F8_E4M3 {list(shape)}, expected a matrix",
            hint="vectors are stored in F32, F16 or BF16",
        )
    outer = shape[:-2]
    grid = (*outer, -(-shape[-2] // 128), -(-shape[-1] // 128))
    values = _float32(scale)
    if scale.shape == grid:
        pass
    elif values.size == 1 and not outer:
        values = values.reshape(())
    elif outer and scale.shape in (outer, (*outer, 1, 1)):
        values = values.reshape(outer)
    else:
        raise UnsupportedModelError(
            f"{scale.source}: shape {list(scale.shape)} for a weight of {list(shape)}",
            hint=f"supported: one scale per tensor, or one per 128 x 128 block: {list(grid)}",
        )
    return RawTensor(name, "fp8_e4m3", shape, {"codes": codes.data, "scale": values}, codes.source)


def _nvfp4(
    name: str,
    codes: StoredTensor,
    scales: StoredTensor,
    outer_scale: StoredTensor,
    *,
    reciprocal: bool,
) -> RawTensor:
    if len(codes.shape) < 2 or codes.shape[-1] % 8 or codes.dtype != "U8":
        raise CheckpointError(
            f"{codes.source}: {codes.dtype} {list(codes.shape)}, expected U8 [..., rows, "
            "columns / 2] with columns a multiple of 16",
            hint="the tensor is not in the NVFP4 layout",
        )
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    _expect(scales, "F8_E4M3", (*shape[:-1], shape[-1] // 16))
    multiplier = _float32(outer_scale)
    if multiplier.size != prod(shape[:-2]):
        raise CheckpointError(
            f"{outer_scale.source}: shape {list(outer_scale.shape)}, expected one number"
            + (" per expert" if len(shape) > 2 else ""),
            hint="the tensor does not belong to its weight, or the file is damaged",
        )
    multiplier = multiplier.reshape(shape[:-2])
    if reciprocal:
        if not bool(np.all(multiplier > 0)):
            raise CheckpointError(
                f"{outer_scale.source}: the global scale is not positive, and the weights are "
                "divided by it",
                hint="the file is damaged: download it again",
            )
        multiplier = np.divide(np.float32(1), multiplier, dtype=np.float32)
    parts = {
        "codes": codes.data,
        "scales": scales.data,
        "global_scale": np.asarray(multiplier, dtype=np.float32),
    }
    return RawTensor(name, "nvfp4", shape, parts, codes.source)


def _float32(tensor: StoredTensor) -> npt.NDArray[Any]:
    """A scale tensor as float32: F32 is a view, two-byte floats are widened, exactly."""
    if tensor.dtype == "F32":
        return tensor.data
    if tensor.dtype == "BF16":
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    if tensor.dtype == "F16":
        return tensor.data.view(np.float16).astype(np.float32)
    raise UnsupportedModelError(
        f"{tensor.source} is a scale of dtype {tensor.dtype}", hint="supported: F32, F16, BF16"
    )
