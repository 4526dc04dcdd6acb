"""MXFP4 as GGUF stores it: 32 weights in 17 bytes, w = 2 ** (e - 127) * E2M1[q].

::

    byte   0             | 1                    | 2          | ... | 16
         e (E8M0 scale)  | q[0] low, q[16] high | q[1] q[17] | ... | q[15] q[31]

    q (E2M1):  bit 3 sign | bits 2-1 exponent | bit 0 mantissa      0 0.5 1 1.5 2 3 4 6

The nibbles are paired differently from Hugging Face's ``_blocks`` (``mxfp4``). Two details
follow the OCP specification and not the ``gguf`` package: scale byte 255 is NaN (there: 2 ** 128),
and code 8 is negative zero (there: zero, an equal number). Everything else agrees bit for bit,
scale byte 0 (2 ** -127, a float32 subnormal) included. Products beyond float32 are infinite.

Source: OCP Microscaling Formats (MX) v1.0; llama.cpp, ggml/src/ggml-common.h (``block_mxfp4``);
GGUF type 39.
"""

from __future__ import annotations

import torch

from headrace.core.numeric import E2M1_VALUES, E8M0_VALUES
from headrace.formats.base import PackedTensor
from headrace.formats.packing import block_format, check_quantizable, lookup, mx_encode, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 17] to float32 [n, 32]."""
    codes = shifted(blocks[:, 1:], (0, 4), 0xF).flatten(1)
    return lookup(E8M0_VALUES, blocks[:, :1]) * lookup(E2M1_VALUES, codes)


def nan_scale(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 0] == 0xFF


def repair(blocks: torch.Tensor, where: tuple[torch.Tensor, ...]) -> None:
    # E8M0 has no zero: the codes must be zero too for the block to stand for zeros.
    blocks.index_put_(where, torch.zeros(17, dtype=torch.uint8, device=blocks.device))


def quantize(values: torch.Tensor) -> PackedTensor:
    """Quantise float32 [..., rows, cols] as ``mxfp4`` does, to nearest with ties to even."""
    check_quantizable("mxfp4_gguf", values)
    codes, scales = mx_encode(values.reshape(-1, 32))
    blocks = torch.cat((scales, codes[:, :16] | codes[:, 16:] << 4), dim=1)
    shape = (*values.shape[:-1], values.shape[-1] // 32 * 17)
    return PackedTensor("mxfp4_gguf", tuple(values.shape), {"blocks": blocks.reshape(shape)})


FORMAT = block_format("mxfp4_gguf", decode, nan_scale, repair, quantize)
