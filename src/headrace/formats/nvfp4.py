"""NVFP4: E2M1 codes, an E4M3 scale per 16 weights, a float32 multiplier per tensor or expert.

::

    codes   byte i of a row:  bits 0-3  weight 2 i | bits 4-7  weight 2 i + 1
    scales  byte b of a row:  E4M3 scale s of weights 16 b ... 16 b + 15
    global_scale              float32 g

    q (E2M1):  bit 3 sign | bits 2-1 exponent | bit 0 mantissa      0 0.5 1 1.5 2 3 4 6
    s (E4M3):  bit 7 sign | bits 6-3 exponent | bits 2-0 mantissa   bias 7, NaN 0x7F and 0xFF

    w = (E2M1[q] * s) * g

The first product is exact in float32, so each weight is rounded once. ``g`` multiplies:

- ModelOpt writes ``weight`` (codes), ``weight_scale`` (s) and ``weight_scale_2`` = g as it is;
- compressed-tensors writes ``weight_packed`` (codes), ``weight_scale`` (s) and
  ``weight_global_scale`` = 1 / g: its reader divides by it, so it is inverted on load, in float32.

Gate and up projections have scales ``g`` of their own; stacking experts keeps one per expert.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 2;
ModelOpt ``NVFP4QTensor``; compressed-tensors ``nvfp4-pack-quantized``; OCP 8-bit Floating Point
Specification v1.0 (E4M3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headrace.core.errors import UserError
from headrace.core.numeric import E2M1_VALUES, E4M3_VALUES
from headrace.formats.base import (
    Format,
    PackedTensor,
    Part,
    blocks_per_row,
    check_layout,
    require_matrix,
)
from headrace.formats.packing import (
    check_quantizable,
    first_true,
    lookup,
    nearest_code,
    pairs_interleaved,
    row_chunks,
    zero_where,
)

GROUP = 16  # weights that share an E4M3 scale
E2M1_MAX, E4M3_MAX = 6.0, 448.0


def layout(shape: tuple[int, ...]) -> Mapping[str, Part]:
    require_matrix("nvfp4", shape)
    blocks = blocks_per_row("nvfp4", shape)
    return {
        "codes": Part(torch.uint8, ((*shape[:-1], shape[-1] // 2),)),
        "scales": Part(torch.uint8, ((*shape[:-1], blocks),)),
        "global_scale": Part(torch.float32, (shape[:-2],)),
    }


def dequantize(packed: PackedTensor) -> torch.Tensor:
    """Return float32 of the logical shape."""
    check_layout(packed, layout)
    codes, scales = packed.parts["codes"], packed.parts["scales"]
    out = torch.empty(packed.shape, dtype=torch.float32, device=codes.device)
    flat = out.view(-1, packed.cols) if out.numel() else out
    pieces = zip(row_chunks(codes, packed.cols), row_chunks(scales, packed.cols), strict=True)
    for (first, code), (_, scale) in pieces:
        values = lookup(E2M1_VALUES, pairs_interleaved(code)).view(*scale.shape, GROUP)
        values = values * lookup(E4M3_VALUES, scale).unsqueeze(-1)
        flat[first : first + code.shape[0]] = values.flatten(-2)
    return out.mul_(packed.parts["global_scale"][..., None, None])


def _bad_scales(packed: PackedTensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield flat index of the first block, scales and which are NaN, of pieces with NaN scales."""
    scales = packed.parts["scales"]
    for first, scale in row_chunks(scales, scales.shape[-1]):
        if int((scale & 0x7F).max()) == 0x7F:
            yield first * scales.shape[-1], scale, (scale & 0x7F) == 0x7F


def find_nan(packed: PackedTensor) -> int | None:
    check_layout(packed, layout)
    found: list[int] = []
    for first, _, bad in _bad_scales(packed):
        found.append(first + first_true(bad))
        break
    damaged = torch.isnan(packed.parts["global_scale"]).flatten()
    if bool(damaged.any()):
        found.append(first_true(damaged) * packed.rows * (packed.cols // GROUP))
    return min(found, default=None)


def zero_nan(packed: PackedTensor) -> int:
    check_layout(packed, layout)
    repaired = sum(zero_where(scale, bad) for _, scale, bad in _bad_scales(packed))
    global_scale = packed.parts["global_scale"]
    return repaired + zero_where(global_scale, torch.isnan(global_scale))


def quantize(values: torch.Tensor, global_scale: torch.Tensor | None = None) -> PackedTensor:
    """Quantise float32 [..., rows, cols] in two levels.

    Args:
        global_scale: float32 [...]; by default amax / (6 * 448) of each matrix (1 where that is
            0), which lets the largest block use E4M3's largest scale.

    Scales are amax / 6 of their block over the global scale, to nearest; codes are to nearest with
    ties to even, and saturate. Values too small for any scale become zero.

    Raises:
        UserError: a value is NaN or infinite, or a global scale is not positive and finite.
        CheckpointError: a row is not a multiple of 16.
    """
    check_quantizable("nvfp4", values)
    shape = tuple(values.shape)
    groups = values.to(torch.float64).reshape(*shape[:-1], shape[-1] // GROUP, GROUP)
    amax = groups.abs().amax(-1)
    if global_scale is None:
        top = (amax.amax((-2, -1)) / (E2M1_MAX * E4M3_MAX)).to(torch.float32)
        global_scale = torch.where(top > 0, top, 1.0)
    if not bool((torch.isfinite(global_scale) & (global_scale > 0)).all()):
        raise UserError(
            "cannot quantise to nvfp4: a global scale is not positive and finite",
            hint="give one positive float32 per tensor or expert",
        )
    outer = global_scale.to(torch.float64)[..., None, None]
    scales = nearest_code(amax / E2M1_MAX / outer, E4M3_VALUES[:0x7F])
    step = (lookup(E4M3_VALUES, scales).to(torch.float64) * outer).unsqueeze(-1)
    magnitude = torch.where(step > 0, groups.abs() / step, 0.0)
    codes = nearest_code(magnitude, E2M1_VALUES[:8]) | torch.signbit(groups).to(torch.uint8) << 3
    codes = codes.reshape(shape)
    parts = {
        "codes": codes[..., 0::2] | codes[..., 1::2] << 4,
        "scales": scales,
        "global_scale": global_scale,
    }
    return PackedTensor("nvfp4", shape, parts)


FORMAT = Format("nvfp4", dequantize, find_nan, zero_nan, layout, quantize)
