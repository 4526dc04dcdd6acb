"""Q4_1: 32 weights in 20 bytes, w = d * q + m.

::

    byte   0    1 | 2    3  | 4                    | 5          | ... | 19
         d (f16)  | m (f16) | q[0] low, q[16] high | q[1] q[17] | ... | q[15] q[31]

The product is rounded to float32 before the sum, as ``gguf`` does it: no fused multiply-add.

Source: llama.cpp, ggml/src/ggml-common.h (``block_q4_1``) and ggml-quants.c; GGUF type 3.
"""

from __future__ import annotations

import torch

from headrace.core.errors import UserError
from headrace.formats.packing import gguf_format, half, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 20] to float32 [n, 32]."""
    codes = shifted(blocks[:, 4:], (0, 4), 0xF).flatten(1)
    return half(blocks, 0) * codes.to(torch.float32) + half(blocks, 2)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Encode float32 [n, 32] as ggml's reference does: q = trunc((w - min) / d + 0.5).

    Raises:
        UserError: the scale or the minimum overflows float16.
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    d = (high - low) / 15
    inverse = torch.where(d == 0, 0.0, 1 / d)
    codes = ((values - low) * inverse + 0.5).trunc().clamp(0, 15).to(torch.uint8)
    scales = torch.cat((d, low), dim=1).to(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise UserError(
            "cannot quantise to q4_1: a block's scale or minimum exceeds float16's 65504",
            hint="scale the tensor down, or keep it in bf16",
        )
    return torch.cat((scales.view(torch.uint8), codes[:, :16] | codes[:, 16:] << 4), dim=1)


FORMAT = gguf_format("q4_1", decode, halves=(0, 2), encode_blocks=encode)
