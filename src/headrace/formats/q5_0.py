"""Q5_0: 32 weights in 22 bytes, w = d * (q - 16), the fifth bits apart.

::

    byte   0    1 | 2 ... 5                            | 6                     | ... | 21
         d (f16)  | qh, little-endian: bit j is q[j]'s | low 4 bits: q[0] low, | ... | q[15] q[31]
                  | bit 4                              | q[16] high            |

Source: llama.cpp, ggml/src/ggml-common.h (``block_q5_0``) and ggml-quants.c; GGUF type 6.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 22] to float32 [n, 32]."""
    high = shifted(blocks[:, 2:6].unsqueeze(-1), range(8), 1).flatten(1)
    codes = shifted(blocks[:, 6:], (0, 4), 0xF).flatten(1) | (high << 4)
    return half(blocks, 0) * (codes.to(torch.float32) - 16)


FORMAT = gguf_format("q5_0", decode, halves=(0,))
