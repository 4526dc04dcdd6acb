"""FP8 E4M3 (finite variant): one byte a weight, and float32 scales that multiply.

::

    code:  bit 7 sign | bits 6-3 exponent (bias 7) | bits 2-0 mantissa
           0x7F, 0xFF NaN; no infinity; largest 448; subnormals are multiples of 2 ** -9

    scale, one per tensor or expert:      w[r, c] = E4M3[code[r, c]] * scale
    scale, one per block of 128 x 128:    w[r, c] = E4M3[code[r, c]] * scale[r // 128, c // 128]

Blocks at the right and lower edge are cut where the matrix ends. Checkpoints call the block scales
``weight_scale_inv`` (the inverse of the factor by which the weights were multiplied to
quantise them, so it multiplies here) and the tensor's ``weight_scale``; scales stored as bfloat16
are widened on load. Each product is rounded once, to float32.

Source: OCP 8-bit Floating Point Specification v1.0, table 1; DeepSeek-V3 (arXiv 2412.19437),
section 3.3.2, for the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headrace.core.numeric import E4M3_VALUES
from headrace.formats.base import Format, PackedTensor, Part, check_layout, require_matrix
from headrace.formats.packing import (
    check_quantizable,
    first_true,
    lookup,
    nearest_code,
    row_chunks,
    zero_where,
)

BLOCK = 128  # rows and columns that share a scale in the block variant
E4M3_MAX = 448.0


def layout(shape: tuple[int, ...]) -> Mapping[str, Part]:
    require_matrix("fp8_e4m3", shape)
    grid = (-(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    return {
        "codes": Part(torch.uint8, (shape,)),
        "scale": Part(torch.float32, (shape[:-2], (*shape[:-2], *grid))),
    }


def _is_blocked(packed: PackedTensor) -> bool:
    return packed.parts["scale"].ndim == len(packed.shape)


def dequantize(packed: PackedTensor) -> torch.Tensor:
    """Return float32 of the logical shape."""
    check_layout(packed, layout)
    codes, scale = packed.parts["codes"], packed.parts["scale"]
    out = torch.empty(packed.shape, dtype=torch.float32, device=codes.device)
    flat = out.view(-1, packed.cols) if out.numel() else out
    for first, code in row_chunks(codes, packed.cols):
        flat[first : first + code.shape[0]] = lookup(E4M3_VALUES, code)
    if not _is_blocked(packed):
        return out.mul_(scale[..., None, None])
    for band in range(scale.shape[-2]):
        rows = out[..., band * BLOCK : (band + 1) * BLOCK, :]
        by_col = scale[..., band, :].repeat_interleave(BLOCK, dim=-1)[..., : packed.cols]
        rows.mul_(by_col.unsqueeze(-2))
    return out


def _bad_codes(packed: PackedTensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield flat index of the first weight, codes and which are NaN, of pieces with NaN codes."""
    for first, code in row_chunks(packed.parts["codes"], packed.cols):
        if int((code & 0x7F).max()) == 0x7F:
            yield first * packed.cols, code, (code & 0x7F) == 0x7F


def find_nan(packed: PackedTensor) -> int | None:
    check_layout(packed, layout)
    found: list[int] = []
    bad_scale = torch.isnan(packed.parts["scale"])
    if bool(bad_scale.any()):
        first = first_true(bad_scale.flatten())
        if not _is_blocked(packed):
            found.append(first * packed.rows * packed.cols)
        else:
            across = packed.parts["scale"].shape[-1]
            expert, band = divmod(first // across, packed.parts["scale"].shape[-2])
            row = expert * packed.rows + band * BLOCK
            found.append(row * packed.cols + first % across * BLOCK)
    for first, _, bad in _bad_codes(packed):
        found.append(first + first_true(bad))
        break
    return min(found, default=None)


def zero_nan(packed: PackedTensor) -> int:
    check_layout(packed, layout)
    scale = packed.parts["scale"]
    repaired = zero_where(scale, torch.isnan(scale))
    return repaired + sum(zero_where(code, bad) for _, code, bad in _bad_codes(packed))


def quantize(values: torch.Tensor, block: bool = False) -> PackedTensor:
    """Quantise float32 [..., rows, cols] to nearest, ties to even.

    Args:
        block: one scale per 128 x 128 instead of one per matrix. A scale is amax / 448, and 1
            where that is 0.

    Raises:
        UserError: a value is NaN or infinite.
    """
    check_quantizable("fp8_e4m3", values)
    shape = tuple(values.shape)
    if block:
        pad = (0, -shape[-1] % BLOCK, 0, -shape[-2] % BLOCK)
        tiles = torch.nn.functional.pad(values.abs(), pad)
        bands, across = tiles.shape[-2] // BLOCK, tiles.shape[-1] // BLOCK
        amax = tiles.view(*shape[:-2], bands, BLOCK, across, BLOCK).amax((-3, -1))
    else:
        amax = values.abs().amax((-2, -1))
    scale = (amax / E4M3_MAX).to(torch.float32)
    scale = torch.where(scale > 0, scale, 1.0)
    spread = scale[..., None, None]
    if block:
        spread = scale.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
        spread = spread[..., : shape[-2], : shape[-1]]
    magnitude = values.abs().to(torch.float64) / spread.to(torch.float64)
    codes = nearest_code(magnitude, E4M3_VALUES[:0x7F])
    codes = codes | torch.signbit(values).to(torch.uint8) << 7
    return PackedTensor("fp8_e4m3", shape, {"codes": codes, "scale": scale})


FORMAT = Format("fp8_e4m3", dequantize, find_nan, zero_nan, layout, quantize)
