"""What every numeric format provides, and the packed tensor that carries one through the engine."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

from headrace.core.block_planes import SCALES_APART, SCALES_AT
from headrace.core.errors import CheckpointError, UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.core.words import counted

# fp8's block scales belong to 128 rows at once.
FP8_BLOCK_ROWS = 128


@dataclass(frozen=True)
class PackedTensor:
    """Weights in a storage format: a logical shape, and the stored parts, never copied.

    The last dimension is the one that is reduced (``linear`` computes ``x @ W.T``), the last but
    one counts rows; a leading dimension, if any, counts experts. Parts, whose last dimension is
    contiguous while rows may be strided (every second row of an interleaved gate/up tensor is a
    PackedTensor of its own):

    - ``f32``/``f16``/``bf16``: ``data`` [..., rows, cols] of that dtype
    - GGUF block types (also ``mxfp4_gguf``): ``blocks`` uint8 [..., rows, bytes of a row]; some of them
      for a GPU in two planes instead (``formats.planes``)
    - ``mxfp4``: ``codes`` uint8 [..., rows, cols / 2], ``scales`` uint8 [..., rows, cols / 32]
    - ``nvfp4``: ``codes`` uint8 [..., rows, cols / 2], ``scales`` uint8 (E4M3) [..., rows,
      cols / 16], ``global_scale`` float32 [...] that multiplies (a reciprocal is inverted on load)
    - ``fp8_e4m3``: ``codes`` uint8 [..., rows, cols], ``scale`` float32 [...], or [...,
      ceil(rows / 128), ceil(cols / 128)], that multiplies
    """

    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.parts.values())

    def expert(self, index: int) -> PackedTensor:
        """The view of one expert of a stacked tensor: every part indexed along its first axis."""
        return PackedTensor(
            self.format, self.shape[1:], {k: t[index] for k, t in self.parts.items()}
        )

    def row_range(self, start: int, stop: int) -> PackedTensor:
        """The view of rows ``start`` to ``stop``; of fp8 in blocks, ``start`` is a multiple of 128."""
        if start == 0 and stop == self.rows:
            return self
        parts: dict[str, torch.Tensor] = {}
        for name, part in self.parts.items():
            if name == "global_scale" or (name == "scale" and part.ndim < 2):
                parts[name] = part
            elif name == "scale":
                first, last = start // FP8_BLOCK_ROWS, -(-stop // FP8_BLOCK_ROWS)
                parts[name] = part[..., first:last, :]
            else:
                parts[name] = part[..., start:stop, :]
        return PackedTensor(self.format, (*self.shape[:-2], stop - start, self.cols), parts)


@dataclass(frozen=True)
class Part:
    """What one stored part must be: its dtype and the shapes that are allowed."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]


Layout = Callable[[tuple[int, ...]], Mapping[str, Part]]


@dataclass(frozen=True)
class Format:
    """One format's reference code. ``name`` is a key of ``core.numeric.FORMATS``.

    dequantize: PackedTensor -> float32 tensor of its logical shape, exact.
    find_nan: PackedTensor -> flat index of the first block whose scale is NaN, or None. Blocks are
        counted along the last dimension first; where a block is one weight (``f32``, ``bf16``,
        ``fp8_e4m3``) the index is the first weight that is NaN. A NaN scale of a whole tensor or
        expert damages all its blocks, so its first block is the answer.
    zero_nan: make every such block stand for zeros, in place (an opt-in repair), and return how
        many scales (for one-weight blocks: weights or scales) were repaired. Only damaged bytes
        are written, so that a copy-on-write map copies only their pages.
    layout: logical shape -> the parts that must be there.
    quantize: float32 [..., rows, cols] -> PackedTensor, where the format has an encoder.
    """

    name: str
    dequantize: Callable[[PackedTensor], torch.Tensor]
    find_nan: Callable[[PackedTensor], int | None]
    zero_nan: Callable[[PackedTensor], int]
    layout: Layout
    quantize: Callable[[torch.Tensor], PackedTensor] | None = None


@cache
def load_formats() -> Mapping[str, Format]:
    """Import every module beside this one and collect its ``FORMAT`` (or ``FORMATS``) record."""
    import headrace.formats as package

    found: dict[str, Format] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name in ("base", "packing", "planes"):
            continue
        module = importlib.import_module(f"headrace.formats.{info.name}")
        records = getattr(module, "FORMATS", None) or (module.FORMAT,)
        for record in records:
            found[record.name] = record
    return found


def format_of(packed: PackedTensor) -> Format:
    """Return the record of ``packed``'s format.

    Raises:
        UnsupportedModelError: no module here implements it.
    """
    formats = load_formats()
    if packed.format not in formats:
        raise UnsupportedModelError(
            f"numeric format {packed.format!r} is not implemented",
            hint=f"supported: {', '.join(sorted(formats))}",
        )
    return formats[packed.format]


def dequantize(packed: PackedTensor) -> torch.Tensor:
    """Return ``packed`` as float32, exactly the values that its bytes stand for."""
    return format_of(packed).dequantize(in_blocks(packed))


def in_blocks(packed: PackedTensor) -> PackedTensor:
    """The inverse of ``planes.in_planes`` for formats that files store in blocks: a copy where it joins."""
    fmt = packed.format
    if fmt not in SCALES_AT or "blocks" in packed.parts:
        return packed
    _, code_nbytes, scale_nbytes = SCALES_APART[fmt]
    codes = split_blocks(packed.parts["codes"], code_nbytes)
    scales = split_blocks(packed.parts["scales"], scale_nbytes)
    pieces = (scales, codes) if SCALES_AT[fmt] == 0 else (codes, scales)
    return PackedTensor(fmt, packed.shape, {"blocks": torch.cat(pieces, -1).flatten(-2)})


def split_blocks(rows: torch.Tensor, nbytes: int) -> torch.Tensor:
    """[..., bytes of a row] -> [..., blocks, nbytes]."""
    return rows.reshape(*rows.shape[:-1], -1, nbytes)


def find_nan(packed: PackedTensor) -> int | None:
    """Return the flat index of the first block of ``packed`` whose scale is NaN, or None."""
    return format_of(packed).find_nan(packed)


def zero_nan(packed: PackedTensor) -> int:
    """Make every block of ``packed`` with a NaN scale stand for zeros; return how many scales."""
    return format_of(packed).zero_nan(packed)


def check_parts(packed: PackedTensor) -> None:
    """Check that the stored parts have the dtypes and shapes that the logical shape implies.

    Raises:
        UnsupportedModelError: the format is not implemented.
        CheckpointError: names format and part, what was found and what was expected.
    """
    check_layout(packed, format_of(packed).layout)


def check_layout(packed: PackedTensor, layout: Layout) -> None:
    """Check ``packed`` against the parts of one format; see ``check_parts``."""
    name = packed.format
    expected = layout(packed.shape)
    if set(packed.parts) != set(expected):
        raise CheckpointError(
            f"{name} tensor of shape {list(packed.shape)} has the parts "
            f"{sorted(packed.parts)}, expected {sorted(expected)}",
            hint="a tensor of the checkpoint is missing, or belongs to another numeric format",
        )
    for part, want in expected.items():
        found = packed.parts[part]
        if found.dtype != want.dtype:
            raise CheckpointError(
                f"{name} tensor of shape {list(packed.shape)}: part {part!r} has dtype "
                f"{_dtype_name(found.dtype)}, expected {_dtype_name(want.dtype)}",
                hint="the checkpoint's tensor was stored in another type than its format says",
            )
        if tuple(found.shape) not in want.shapes:
            options = " or ".join(str(list(s)) for s in want.shapes)
            raise CheckpointError(
                f"{name} tensor of shape {list(packed.shape)}: part {part!r} has shape "
                f"{list(found.shape)}, expected {options}",
                hint="the file does not hold the tensor that the configuration describes",
            )
        if found.ndim and found.shape[-1] > 1 and found.stride(-1) != 1:
            raise CheckpointError(
                f"{name} tensor: part {part!r} has stride {found.stride(-1)} along its last "
                "dimension, expected 1",
                hint="select rows or experts of a packed tensor, never columns with a step",
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_matrix(name: str, shape: tuple[int, ...]) -> None:
    """Refuse a shape without rows and columns, for formats that keep a scale per matrix."""
    if len(shape) < 2:
        raise CheckpointError(
            f"{name} tensor of shape {list(shape)}: expected at least two dimensions",
            hint="vectors are stored as plain floats",
        )


def blocks_per_row(name: str, shape: tuple[int, ...]) -> int:
    """Blocks of format ``name`` in one row of a tensor of this logical shape.

    Raises:
        CheckpointError: the row is not a whole number of blocks.
    """
    weights = FORMATS[name].block_weights
    if not shape or shape[-1] % weights:
        raise CheckpointError(
            f"{name} tensor of shape {list(shape)}: a row must be a multiple of {counted(weights, 'weight')}",
            hint="a block cannot be cut; the shape or the format is wrong",
        )
    return shape[-1] // weights
