"""Q5_1: 32 weights in 24 bytes, w = d * q + m, the fifth bits apart.

::

    byte   0    1 | 2    3  | 4 ... 7                     | 8                    | ... | 23
         d (f16)  | m (f16) | qh, little-endian: bit j is | low 4 bits: q[0]     | ... | q[15] q[31]
                  |         | q[j]'s bit 4                | low, q[16] high      |

Source: llama.cpp, ggml/src/ggml-common.h (``block_q5_1``) and ggml-quants.c; GGUF type 7.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 24] to float32 [n, 32]."""
    high = shifted(blocks[:, 4:8].unsqueeze(-1), range(8), 1).flatten(1)
    codes = shifted(blocks[:, 8:], (0, 4), 0xF).flatten(1) | (high << 4)
    return half(blocks, 0) * codes.to(torch.float32) + half(blocks, 2)


FORMAT = gguf_format("q5_1", decode, halves=(0, 2))
