"""Packed matrices as kernels of a GPU read them: codes and scales apart, see ``core.block_planes``.

A PackedTensor of a format in ``SCALES_AT`` has the parts ``codes`` and ``scales`` here, uint8 [..., rows,
bytes of a row], instead of ``blocks``; the others keep ``blocks``. ``mxfp4_gguf`` becomes ``mxfp4``: the same
numbers, nibbles in its order.
"""

from __future__ import annotations

import torch

from headrace.core.block_planes import SCALES_AT, scale_bytes
from headrace.core.numeric import FORMATS
from headrace.formats.base import PackedTensor, split_blocks


def in_planes(packed: PackedTensor) -> PackedTensor:
    """``packed`` with codes and scales apart; itself if its format has them together, or it is so already."""
    fmt, blocks = packed.format, packed.parts.get("blocks")
    if blocks is None:
        return packed
    if fmt == "mxfp4_gguf":
        split = split_blocks(blocks, 17)
        low, high = split[..., 1::2], split[..., 2::2]  # bytes 0, 2, ... and 1, 3, ... of the codes
        codes = torch.cat(((low & 0x0F) | (high << 4), (low >> 4) | (high & 0xF0)), -1)
        parts = {"codes": codes.flatten(-2), "scales": split[..., 0].contiguous()}
        return PackedTensor("mxfp4", packed.shape, parts)
    if fmt not in SCALES_AT:
        return packed
    split = split_blocks(blocks, FORMATS[fmt].block_nbytes)
    first, last = scale_bytes(fmt)
    codes = split[..., last:] if first == 0 else split[..., :first]
    parts = {"codes": codes.flatten(-2), "scales": split[..., first:last].flatten(-2)}
    return PackedTensor(fmt, packed.shape, parts)
