"""What every numeric format provides, and the packed tensor that carries one through the engine."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from headrace.core.errors import UnsupportedModelError


@dataclass(frozen=True)
class PackedTensor:
    """Weights in a storage format: a logical shape, and the stored parts, never copied.

    The last dimension is the one that is reduced (``linear`` computes ``x @ W.T``), the last but
    one counts rows; a leading dimension, if any, counts experts. Parts, whose last dimension is
    contiguous while rows may be strided (every second row of an interleaved gate/up tensor is a
    PackedTensor of its own):

    - ``f32``/``f16``/``bf16``: ``data`` [..., rows, cols] of that dtype
    - GGUF block types (also ``mxfp4_gguf``): ``blocks`` uint8 [..., rows, bytes of a row]
    - ``mxfp4``: ``codes`` uint8 [..., rows, cols / 2], ``scales`` uint8 [..., rows, cols / 32]
    - ``nvfp4``: ``codes`` uint8 [..., rows, cols / 2], ``scales`` uint8 (E4M3) [..., rows,
      cols / 16], ``global_scale`` float32 [...] that multiplies (a reciprocal is inverted on load)
    - ``fp8_e4m3``: ``codes`` uint8 [..., rows, cols], ``scale`` float32 [...], or [...,
      ceil(rows / 128), ceil(cols / 128)], that multiplies
    """

    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Format:
    """One format's reference code. ``name`` is a key of ``core.numeric.FORMATS``.

    dequantize: PackedTensor -> float32 tensor of its logical shape, exact.
    find_nan: PackedTensor -> flat index of the first block whose scale is NaN, or None.
    zero_nan: set those scales to zero in place (an opt-in repair).
    """

    name: str
    dequantize: Callable[[PackedTensor], torch.Tensor]
    find_nan: Callable[[PackedTensor], int | None]
    zero_nan: Callable[[PackedTensor], int]


def load_formats() -> dict[str, Format]:
    """Import every module beside this one and collect its ``FORMAT`` (or ``FORMATS``) record."""
    import headrace.formats as package

    found: dict[str, Format] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name == "base":
            continue
        module = importlib.import_module(f"headrace.formats.{info.name}")
        records = getattr(module, "FORMATS", None) or (module.FORMAT,)
        for record in records:
            found[record.name] = record
    return found


def dequantize(packed: PackedTensor) -> torch.Tensor:
    """Return ``packed`` as float32, exactly the values that its bytes stand for."""
    formats = load_formats()
    if packed.format not in formats:
        raise UnsupportedModelError(
            f"numeric format {packed.format!r} is not implemented",
            hint=f"supported: {', '.join(sorted(formats))}",
        )
    return formats[packed.format].dequantize(packed)
