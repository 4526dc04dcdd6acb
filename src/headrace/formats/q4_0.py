"""Q4_0: 32 weights in 18 bytes, w = d * (q - 8).

::

    byte   0    1 | 2                    | 3          | ... | 17
         d (f16)  | q[0] low, q[16] high | q[1] q[17] | ... | q[15] q[31]

Source: llama.cpp, ggml/src/ggml-common.h (``block_q4_0``) and ggml-quants.c; GGUF type 2.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 18] to float32 [n, 32]."""
    codes = shifted(blocks[:, 2:], (0, 4), 0xF).flatten(1)
    return half(blocks, 0) * (codes.to(torch.float32) - 8)


FORMAT = gguf_format("q4_0", decode, halves=(0,))
