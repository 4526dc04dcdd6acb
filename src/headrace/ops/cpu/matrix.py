"""Native handles of packed weights: checked and built once, kept by the tensor they describe."""

from __future__ import annotations

from typing import cast

import torch

from headrace.core.errors import InternalError, UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.formats.base import PackedTensor
from headrace.ops.cpu import _native

# The order of ``enum class Format`` in native/matrix.h.
_ORDER = (
    *("f32", "f16", "bf16", "fp8_e4m3", "mxfp4", "mxfp4_gguf", "nvfp4"),
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs"),
)
# Slabs of experts hold the scales of these apart from the codes; the numbers follow on.
_APART = ("q4_0", "q5_0", "q8_0", "q3_k", "q6_k", "iq4_nl")
SLAB_FORMAT_NUMBERS = {name: number for number, name in enumerate(_ORDER)} | {
    name: number for number, name in enumerate(_APART, len(_ORDER))
}
FORMAT_NUMBERS = {name: number for number, name in enumerate(_ORDER)}
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_HANDLE = "_cpu_matrix"  # in the tensor's own dictionary, so that both live equally long


def handle(weight: PackedTensor) -> _native.Matrix:
    """The native description of ``weight`` [rows, cols]; made at the first call.

    Raises:
        UnsupportedModelError: no kernel for this format.
        InternalError: a part has another shape, dtype or layout than ``PackedTensor`` documents.
    """
    found = weight.__dict__.get(_HANDLE)
    if found is None:
        found = weight.__dict__[_HANDLE] = _make(weight)
    return cast(_native.Matrix, found)


def _make(weight: PackedTensor) -> _native.Matrix:
    name = weight.format
    if name not in FORMAT_NUMBERS:
        raise UnsupportedModelError(
            f"the CPU kernels have no numeric format {name!r}",
            hint=f"supported: {', '.join(FORMAT_NUMBERS)}",
        )
    if len(weight.shape) != 2:
        raise InternalError(f"{name}: expected a matrix, found shape {list(weight.shape)}")
    rows, cols = weight.shape
    spec = FORMATS[name]
    if cols % spec.block_weights:
        raise InternalError(f"{name}: {cols} columns are no multiple of {spec.block_weights}")
    scales = global_scale = block_scale = None
    if name in _FLOATS:
        data = _part(weight, "data", _FLOATS[name], (rows, cols))
    elif name == "fp8_e4m3":
        data = _part(weight, "codes", torch.uint8, (rows, cols))
        scale = weight.parts["scale"]
        if scale.numel() == 1:
            global_scale = scale
        else:
            block_scale = _part(weight, "scale", torch.float32, (-(-rows // 128), -(-cols // 128)))
    elif name in ("mxfp4", "nvfp4"):
        data = _part(weight, "codes", torch.uint8, (rows, cols // 2))
        scales = _part(weight, "scales", torch.uint8, (rows, cols // spec.block_weights))
        global_scale = weight.parts["global_scale"] if name == "nvfp4" else None
    else:
        data = _part(weight, "blocks", torch.uint8, (rows, spec.row_nbytes(cols)))
    return _native.make_matrix(
        FORMAT_NUMBERS[name],
        rows,
        cols,
        data.data_ptr(),
        data.stride(0) * data.element_size(),
        0 if scales is None else scales.data_ptr(),
        0 if scales is None else scales.stride(0),
        1.0 if global_scale is None else float(global_scale),
        0 if block_scale is None else block_scale.data_ptr(),
        0 if block_scale is None else block_scale.stride(0),
    )


def _part(
    weight: PackedTensor, part: str, dtype: torch.dtype, shape: tuple[int, int]
) -> torch.Tensor:
    """One stored part, once it is what the kernels read: right dtype and shape, contiguous rows."""
    t = weight.parts[part]
    packed_rows = shape[1] <= 1 or t.stride(-1) == 1
    if t.dtype != dtype or tuple(t.shape) != shape or not packed_rows or t.device.type != "cpu":
        raise InternalError(
            f"{weight.format} {list(weight.shape)}: part {part!r} is {t.dtype} {list(t.shape)} "
            f"(strides {list(t.stride())}, {t.device}), expected {dtype} {list(shape)} with "
            "contiguous rows on the CPU"
        )
    return t
