"""Q8_0: 32 weights in 34 bytes, w = d * q with q a signed byte.

::

    byte   0    1 | 2    | 3    | ... | 33
         d (f16)  | q[0] | q[1] | ... | q[31]

Source: llama.cpp, ggml/src/ggml-common.h (``block_q8_0``) and ggml-quants.c; GGUF type 8.
"""

from __future__ import annotations

import torch

from headrace.core.errors import UserError
from headrace.formats.packing import gguf_format, half


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 34] to float32 [n, 32]."""
    return half(blocks, 0) * blocks[:, 2:].view(torch.int8).to(torch.float32)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Encode float32 [n, 32] as ggml's reference does: d = amax / 127, ties away from zero.

    Raises:
        UserError: a scale overflows float16.
    """
    d = values.abs().amax(1, keepdim=True) / 127
    scaled = values * torch.where(d == 0, 0.0, 1 / d)
    magnitude = scaled.abs()
    whole = magnitude.floor()
    rounded = whole + (2 * (magnitude - whole)).floor()  # C's roundf; torch.round ties to even
    codes = (rounded * scaled.sign()).to(torch.int8).view(torch.uint8)
    scale = d.to(torch.float16)
    if not bool(torch.isfinite(scale).all()):
        raise UserError(
            "cannot quantise to q8_0: a block's scale exceeds float16's 65504",
            hint="scale the tensor down, or keep it in bf16",
        )
    return torch.cat((scale.view(torch.uint8), codes), dim=1)


FORMAT = gguf_format("q8_0", decode, halves=(0,), encode_blocks=encode)
