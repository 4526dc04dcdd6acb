"""Q2_K: 256 weights in 84 bytes, w = d * s * q - dmin * m per group of 16.

::

    byte  0 ... 15                        | 16 ... 79              | 80  81  | 82  83
          per group of 16: scale s in the | 2-bit codes, see below | d (f16) | dmin (f16)
          low, minimum m in the high bits |

    codes: byte 16 + 32 h + l holds weights 128 h + l (bits 0-1), + 32 (2-3), + 64 (4-5), + 96 (6-7)

Source: llama.cpp, ggml/src/ggml-common.h (``block_q2_K``) and ggml-quants.c; GGUF type 10.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 84] to float32 [n, 256]."""
    scales = blocks[:, :16]
    scale = half(blocks, 80) * (scales & 0xF).to(torch.float32)
    minimum = half(blocks, 82) * (scales >> 4).to(torch.float32)
    codes = shifted(blocks[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 3)
    groups = codes.reshape(-1, 16, 16).to(torch.float32)
    return (scale.unsqueeze(-1) * groups - minimum.unsqueeze(-1)).flatten(1)


FORMAT = gguf_format("q2_k", decode, halves=(80, 82))
