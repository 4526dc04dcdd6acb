"""MXFP4 as Hugging Face checkpoints store it: codes and scales apart, w = 2 ** (e - 127) * E2M1[q].

::

    codes   byte i of a row:  bits 0-3  weight 2 i | bits 4-7  weight 2 i + 1
    scales  byte b of a row:  E8M0 exponent e of weights 32 b ... 32 b + 31

    q (E2M1):  bit 3 sign | bits 2-1 exponent | bit 0 mantissa      0 0.5 1 1.5 2 3 4 6

A checkpoint's ``X_blocks`` uint8 [..., rows, cols / 32, 16] are the codes (their last two
dimensions joined), ``X_scales`` uint8 [..., rows, cols / 32] the scales. Scale byte 255 is NaN,
byte 0 is 2 ** -127 (a float32 subnormal); products beyond float32 are infinite.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3.3, 5.4.1 and 6.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headrace.core.numeric import E2M1_VALUES, E8M0_VALUES
from headrace.formats.base import Format, PackedTensor, Part, blocks_per_row, check_layout
from headrace.formats.packing import (
    check_quantizable,
    first_true,
    lookup,
    mx_encode,
    pairs_interleaved,
    row_chunks,
)


def layout(shape: tuple[int, ...]) -> Mapping[str, Part]:
    blocks = blocks_per_row("mxfp4", shape)
    return {
        "codes": Part(torch.uint8, ((*shape[:-1], shape[-1] // 2),)),
        "scales": Part(torch.uint8, ((*shape[:-1], blocks),)),
    }


def dequantize(packed: PackedTensor) -> torch.Tensor:
    """Return float32 of the logical shape."""
    check_layout(packed, layout)
    codes, scales = packed.parts["codes"], packed.parts["scales"]
    out = torch.empty(packed.shape, dtype=torch.float32, device=codes.device)
    flat = out.view(-1, packed.cols) if out.numel() else out
    pieces = zip(row_chunks(codes, packed.cols), row_chunks(scales, packed.cols), strict=True)
    for (first, code), (_, scale) in pieces:
        values = lookup(E2M1_VALUES, pairs_interleaved(code)).view(*scale.shape, 32)
        values = values * lookup(E8M0_VALUES, scale).unsqueeze(-1)
        flat[first : first + code.shape[0]] = values.flatten(-2)
    return out


def _damaged(packed: PackedTensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield flat index of the first block, scales and codes [r, blocks, ...] of pieces with NaN."""
    check_layout(packed, layout)
    codes, scales = packed.parts["codes"], packed.parts["scales"]
    blocks = scales.shape[-1]
    for (first, scale), (_, code) in zip(
        row_chunks(scales, blocks), row_chunks(codes, blocks), strict=True
    ):
        if int(scale.max()) == 0xFF:
            yield first * blocks, scale, code.view(-1, blocks, 16)


def find_nan(packed: PackedTensor) -> int | None:
    for first, scale, _ in _damaged(packed):
        return first + first_true(scale == 0xFF)
    return None


def zero_nan(packed: PackedTensor) -> int:
    repaired = 0
    for _, scale, code in _damaged(packed):
        where = (scale == 0xFF).nonzero(as_tuple=True)
        zero = torch.zeros((), dtype=torch.uint8, device=scale.device)
        scale.index_put_(where, zero)
        # E8M0 has no zero: the codes must be zero too for the block to stand for zeros.
        code.index_put_(where, zero)
        repaired += len(where[0])
    return repaired


def quantize(values: torch.Tensor) -> PackedTensor:
    """Quantise float32 [..., rows, cols]: scale 2 ** (floor(log2 amax) - 2), codes to nearest.

    Ties go to the code whose mantissa bit is 0; magnitudes beyond 6 scales saturate (OCP MX v1.0,
    section 6.3). Scales are limited to E8M0's range; a block of zeros takes scale byte 0.

    Raises:
        UserError: a value is NaN or infinite.
        CheckpointError: a row is not a multiple of 32.
    """
    check_quantizable("mxfp4", values)
    codes, scales = mx_encode(values.reshape(-1, 32))
    shape = tuple(values.shape)
    parts = {
        "codes": (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(*shape[:-1], shape[-1] // 2),
        "scales": scales.reshape(*shape[:-1], shape[-1] // 32),
    }
    return PackedTensor("mxfp4", shape, parts)


FORMAT = Format("mxfp4", dequantize, find_nan, zero_nan, layout, quantize)
