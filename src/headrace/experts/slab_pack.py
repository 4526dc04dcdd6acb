"""Experts into slabs and out of them: exact copies, in the layout of ``experts.slab``.

Copies are NumPy's, which gives up the interpreter lock while it copies: threads that fill different
slabs run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.block_planes import SCALES_AT, scale_bytes
from headrace.core.errors import InternalError, UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.core.words import counted
from headrace.experts.model_layout import ExpertKind, model_layouts
from headrace.experts.slab import SlabLayout, slab_format
from headrace.formats.base import PackedTensor
from headrace.ops.records import ExpertWeights

Bytes = npt.NDArray[np.uint8]
_CODES_APART = frozenset({"mxfp4", "nvfp4"})
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_FACTOR_PART = {"nvfp4": "global_scale", "fp8_e4m3": "scale"}


def layouts_of(
    layers: Sequence[ExpertWeights], num_slices: int | None = None
) -> tuple[SlabLayout, ...]:
    """The layout of each layer's experts.

    Raises:
        UnsupportedModelError: experts of a layer differ in format, gate and up do, or layers in shape.
        ConfigError: the dimensions are not whole blocks of a format.
    """
    if not layers:
        raise UnsupportedModelError(
            "the model has no experts to lay out", hint="use it without --experts"
        )
    kinds = [_kind(index, layer) for index, layer in enumerate(layers)]
    shapes = {(x.gate[0].rows, x.gate[0].cols, x.gate_bias is not None) for x in layers}
    if len(shapes) != 1:
        listed = "; ".join(f"[{rows}, {cols}]" for rows, cols, _ in sorted(shapes))
        raise UnsupportedModelError(
            f"the experts of different layers have different shapes or biases: {listed}",
            hint="use --experts cpu",
        )
    intermediate, hidden, bias = shapes.pop()
    return model_layouts(kinds, hidden, intermediate, has_bias=bias, num_slices=num_slices)


def layout_of(layers: Sequence[ExpertWeights], num_slices: int | None = None) -> SlabLayout:
    """The one layout that the experts of all layers have; see ``layouts_of``.

    Raises:
        UnsupportedModelError: layers differ.
    """
    found = set(layouts_of(layers, num_slices))
    if len(found) != 1:
        listed = "; ".join(sorted(f"{x.format} gate and up, {x.down_format} down" for x in found))
        raise UnsupportedModelError(
            f"the experts are stored in {counted(len(found), 'way')}: {listed}",
            hint="give each layer its own layout",
        )
    return found.pop()


def _kind(index: int, layer: ExpertWeights) -> ExpertKind:
    """How the experts of layer ``index`` are stored."""
    found = {(g.format, u.format, d.format) for g, u, d in zip(layer.gate, layer.up, layer.down)}
    if len(found) != 1:
        listed = "; ".join(sorted(f"{g} gate, {u} up, {d} down" for g, u, d in found))
        raise UnsupportedModelError(
            f"layer {index} of experts stores them in {counted(len(found), 'way')}: {listed}",
            hint="slabs need one format for all experts of a layer; use a file that has it",
        )
    gate, up, down = found.pop()
    if gate != up:
        raise UnsupportedModelError(
            f"layer {index} of experts has gate in {gate} and up in {up}; expected one format for both",
            hint="use a file whose gate and up matrices have one format (llama.cpp's presets do)",
        )
    matrices = (*layer.gate, *layer.up, *layer.down)
    blocked = any(m.format == "fp8_e4m3" and m.parts["scale"].ndim == 2 for m in matrices)
    return ExpertKind(gate, down, blocked)


def write_slab(experts: ExpertWeights, index: int, layout: SlabLayout, out: torch.Tensor) -> None:
    """Copy expert ``index`` into its slab ``out``, uint8 [num_slices, slice_nbytes].

    Bytes between the parts are left as they are.

    Raises:
        InternalError: the expert is not what the layout describes.
    """
    gate, up, down = experts.gate[index], experts.up[index], experts.down[index]
    _check(gate, (layout.intermediate, layout.hidden), layout.format)
    _check(up, (layout.intermediate, layout.hidden), layout.format)
    _check(down, (layout.hidden, layout.intermediate), layout.down_format)
    slab = _Slab(layout, out)
    for place, matrix in enumerate((gate, up)):
        for suffix, data in row_planes(matrix).items():
            part = slab.rows("gate_up" + suffix)  # [slices, 2 * width, bytes]
            # Split by rows: a slice takes `width` of them, gate and up in turn.
            part[:, place::2] = data.reshape(layout.num_slices, layout.width, -1)
    for suffix, data in row_planes(down).items():
        part = slab.rows("down" + suffix)  # [slices, hidden, bytes]
        part[...] = data.reshape(layout.hidden, layout.num_slices, -1).swapaxes(0, 1)
    _write_factors(slab, gate, up, down)
    if layout.has_bias:
        _write_biases(slab, experts, index)


def slice_weights(slab: torch.Tensor, layout: SlabLayout, index: int) -> ExpertWeights:
    """Slice ``index`` of a slab as one expert with ``width`` columns.

    Views: nothing is copied but blocks whose scales lie apart in slabs, which are joined.
    slab: uint8 [num_slices, slice_nbytes]. The down bias is zero in all slices but the first.
    """
    return _view(slab[index : index + 1], layout)


def read_slab(slab: torch.Tensor, layout: SlabLayout) -> ExpertWeights:
    """The expert of a slab, uint8 [num_slices, slice_nbytes], copied: the inverse of ``write_slab``."""
    slices = [slice_weights(slab, layout, s) for s in range(layout.num_slices)]
    first = slices[0]

    def joined(name: str, dim: int) -> PackedTensor:
        pieces: list[PackedTensor] = [getattr(s, name)[0] for s in slices]
        parts = {
            part: torch.cat([p.parts[part] for p in pieces], dim) if tensor.ndim else tensor.clone()
            for part, tensor in pieces[0].parts.items()
        }
        shape = list(pieces[0].shape)
        shape[dim] = layout.intermediate
        return PackedTensor(pieces[0].format, tuple(shape), parts)

    def bias(name: str) -> torch.Tensor | None:
        pieces: list[torch.Tensor | None] = [getattr(s, name) for s in slices]
        return None if pieces[0] is None else torch.cat([p for p in pieces if p is not None], 1)

    return ExpertWeights(
        [joined("gate", 0)],
        [joined("up", 0)],
        [joined("down", 1)],
        bias("gate_bias"),
        bias("up_bias"),
        None if first.down_bias is None else first.down_bias.clone(),
    )


class _Slab:
    """The parts of a slab as arrays."""

    def __init__(self, layout: SlabLayout, out: torch.Tensor) -> None:
        if out.dtype != torch.uint8 or tuple(out.shape) != (layout.num_slices, layout.slice_nbytes):
            raise InternalError(
                f"a slab is uint8 {[layout.num_slices, layout.slice_nbytes]}, "
                f"found {out.dtype} {list(out.shape)}"
            )
        self.layout = layout
        self._out = out

    def rows(self, name: str) -> Bytes:
        """Part ``name`` of all slices, [num_slices, rows, row_nbytes]."""
        p = self.layout.part(name)
        part = self._out[:, p.offset : p.offset + p.nbytes]
        return part.view(self.layout.num_slices, p.rows, p.row_nbytes).numpy()

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A part of float32, [num_slices, rows, floats of a row]."""
        return self.rows(name).view(np.float32)


def _check(matrix: PackedTensor, shape: tuple[int, int], fmt: str) -> None:
    if matrix.shape != shape or slab_format(matrix.format) != fmt:
        raise InternalError(
            f"an expert's matrix is {matrix.format} {list(matrix.shape)}, the slab's {fmt} {list(shape)}"
        )


def row_planes(matrix: PackedTensor) -> dict[str, Bytes]:
    """The bytes of a matrix by the suffix of the part that holds them, each [rows, bytes of a row]."""
    if matrix.format == "mxfp4_gguf":
        return _from_gguf(_bytes(matrix.parts["blocks"]))
    if matrix.format in _CODES_APART:
        return {"": _bytes(matrix.parts["codes"]), "_scales": _bytes(matrix.parts["scales"])}
    if matrix.format in SCALES_AT:
        return _cut(_bytes(matrix.parts["blocks"]), matrix.format)
    name = (
        "data" if matrix.format in _FLOATS else "codes" if matrix.format == "fp8_e4m3" else "blocks"
    )
    return {"": _bytes(matrix.parts[name])}


def _cut(blocks: Bytes, fmt: str) -> dict[str, Bytes]:
    """Blocks of codes and scales, cut in two."""
    first, last = scale_bytes(fmt)
    split = blocks.reshape(blocks.shape[0], -1, FORMATS[fmt].block_nbytes)
    codes = split[..., last:] if first == 0 else split[..., :first]
    rows = blocks.shape[0]
    return {"": codes.reshape(rows, -1), "_scales": split[..., first:last].reshape(rows, -1)}


def _joined(codes: torch.Tensor, scales: torch.Tensor, fmt: str) -> torch.Tensor:
    """The inverse, a copy."""
    first, last = scale_bytes(fmt)
    rows, size = codes.shape[0], FORMATS[fmt].block_nbytes
    body = codes.reshape(rows, -1, size - (last - first))
    head = scales.reshape(rows, -1, last - first)
    pieces = (head, body) if first == 0 else (body, head)
    return torch.cat(pieces, 2).reshape(rows, -1)


def _bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.view(torch.uint8).numpy()


def _from_gguf(blocks: Bytes) -> dict[str, Bytes]:
    """Blocks of a scale and 16 bytes (element j low, j + 16 high) as pairs 2i low, 2i + 1 high."""
    rows = blocks.shape[0]
    split = blocks.reshape(rows, -1, 17)
    low, high = split[..., 1::2], split[..., 2::2]  # bytes 0, 2, ... and 1, 3, ... of the codes
    codes = np.empty((*split.shape[:2], 16), np.uint8)
    codes[..., :8] = (low & 0x0F) | (high << 4)
    codes[..., 8:] = (low >> 4) | (high & 0xF0)
    return {"": codes.reshape(rows, -1), "_scales": split[..., 0]}


def _write_factors(slab: _Slab, gate: PackedTensor, up: PackedTensor, down: PackedTensor) -> None:
    layout = slab.layout
    if layout.format in _FACTOR_PART:
        to = slab.floats("gate_up_factors")
        for place, matrix in enumerate((gate, up)):
            factor = matrix.parts[_FACTOR_PART[matrix.format]]
            if to.shape[1] == 1:  # [slices, 1, 2]
                to[:, 0, place] = float(factor)
            else:  # [slices, 2 * bands, across]
                bands, across = to.shape[1] // 2, to.shape[2]
                to[:, place::2] = _grid(factor, to.shape[0] * bands, across).reshape(
                    -1, bands, across
                )
    if layout.down_format in _FACTOR_PART:
        to = slab.floats("down_factors")
        factor = down.parts[_FACTOR_PART[down.format]]
        grid = _grid(factor, to.shape[1], to.shape[0] * to.shape[2])
        to[...] = grid.reshape(to.shape[1], to.shape[0], -1).swapaxes(0, 1)


def _grid(factor: torch.Tensor, rows: int, cols: int) -> npt.NDArray[np.float32]:
    """Factors as a grid: one for all is repeated (matrices of one expert may differ in that)."""
    return np.broadcast_to(factor.numpy(), (rows, cols))


def _write_biases(slab: _Slab, experts: ExpertWeights, index: int) -> None:
    gate, up, down = experts.gate_bias, experts.up_bias, experts.down_bias
    if gate is None or up is None or down is None:
        raise InternalError("the slab has biases and the expert has not all of them")
    to = slab.floats("gate_up_bias")[:, 0]
    to[:, 0::2] = gate[index].numpy().reshape(slab.layout.num_slices, -1)
    to[:, 1::2] = up[index].numpy().reshape(slab.layout.num_slices, -1)
    to = slab.floats("down_bias")[:, 0]
    to[0] = down[index].numpy()
    to[1:] = 0.0


def _view(piece: torch.Tensor, layout: SlabLayout) -> ExpertWeights:
    """One slice, uint8 [1, slice_nbytes], as the views of an expert."""

    def part(name: str) -> torch.Tensor:
        p = layout.part(name)
        return piece[0, p.offset : p.offset + p.nbytes].view(p.rows, p.row_nbytes)

    def matrix(name: str, place: int, step: int, fmt: str, shape: tuple[int, int]) -> PackedTensor:
        parts: dict[str, torch.Tensor] = {}
        data = part(name)[place::step]
        if fmt in _CODES_APART:
            parts = {"codes": data, "scales": part(f"{name}_scales")[place::step]}
        elif fmt in SCALES_AT:
            parts = {"blocks": _joined(data, part(f"{name}_scales")[place::step], fmt)}
        elif fmt in _FLOATS:
            parts = {"data": data.view(_FLOATS[fmt])}
        else:
            parts = {"codes" if fmt == "fp8_e4m3" else "blocks": data}
        if fmt in _FACTOR_PART:
            factors = part(f"{name}_factors").view(torch.float32)
            blocked = layout.block_factors and fmt == "fp8_e4m3"
            parts[_FACTOR_PART[fmt]] = factors[place::step] if blocked else factors[0, place]
        return PackedTensor(fmt, shape, parts)

    def bias(name: str, place: int, step: int) -> torch.Tensor | None:
        return part(name).view(torch.float32)[:, place::step] if layout.has_bias else None

    inner = (layout.width, layout.hidden)
    return ExpertWeights(
        [matrix("gate_up", 0, 2, layout.format, inner)],
        [matrix("gate_up", 1, 2, layout.format, inner)],
        [matrix("down", 0, 1, layout.down_format, (layout.hidden, layout.width))],
        bias("gate_up_bias", 0, 2),
        bias("gate_up_bias", 1, 2),
        bias("down_bias", 0, 1),
    )
