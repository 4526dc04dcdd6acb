"""Q4_K: 256 weights in 144 bytes, w = d * s * q - dmin * m per group of 32.

::

    byte  0    1  | 2    3     | 4 ... 15                      | 16 ... 143
          d (f16) | dmin (f16) | 8 scales s and 8 minima m of  | codes: byte 16 + 32 h + l holds
                  |            | 6 bits, see below             | weights 64 h + l (low nibble) and
                  |            |                               | 64 h + 32 + l (high nibble)

    byte  4 + i:  s[i] (bits 0-5), bits 4-5 of s[i + 4] (bits 6-7)          i = 0 ... 3
    byte  8 + i:  m[i] (bits 0-5), bits 4-5 of m[i + 4] (bits 6-7)
    byte 12 + i:  bits 0-3 of s[i + 4] (low), bits 0-3 of m[i + 4] (high)

Source: llama.cpp, ggml/src/ggml-common.h (``block_q4_K``) and ggml-quants.c; GGUF type 12.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, k_scales, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 144] to float32 [n, 256]."""
    scale, minimum = k_scales(blocks[:, 4:16])
    codes = shifted(blocks[:, 16:].reshape(-1, 4, 32), (0, 4), 0xF)
    groups = codes.reshape(-1, 8, 32).to(torch.float32)
    d, dmin = half(blocks, 0) * scale, half(blocks, 2) * minimum
    return (d.unsqueeze(-1) * groups - dmin.unsqueeze(-1)).flatten(1)


FORMAT = gguf_format("q4_k", decode, halves=(0, 2))
