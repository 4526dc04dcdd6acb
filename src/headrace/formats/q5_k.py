"""Q5_K: 256 weights in 176 bytes, w = d * s * q - dmin * m per group of 32.

::

    byte  0    1  | 2    3     | 4 ... 15         | 16 ... 47          | 48 ... 175
          d (f16) | dmin (f16) | scales, minima   | bit 4 of the codes:| bits 0-3 of the codes,
                  |            | packed as in Q4_K| byte l, bit b is   | as in Q4_K
                  |            |                  | of weight 32 b + l |

Source: llama.cpp, ggml/src/ggml-common.h (``block_q5_K``) and ggml-quants.c; GGUF type 13.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, k_scales, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 176] to float32 [n, 256]."""
    scale, minimum = k_scales(blocks[:, 4:16])
    low = shifted(blocks[:, 48:].reshape(-1, 4, 32), (0, 4), 0xF).reshape(-1, 8, 32)
    high = shifted(blocks[:, 16:48], range(8), 1)
    groups = (low | (high << 4)).to(torch.float32)
    d, dmin = half(blocks, 0) * scale, half(blocks, 2) * minimum
    return (d.unsqueeze(-1) * groups - dmin.unsqueeze(-1)).flatten(1)


FORMAT = gguf_format("q5_k", decode, halves=(0, 2))
