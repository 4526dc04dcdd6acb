"""Q3_K: 256 weights in 110 bytes, w = d * (s - 32) * (q - 4) per group of 16.

::

    byte  0 ... 31                          | 32 ... 95         | 96 ... 107       | 108 109
          bit 2 of the codes: byte l, bit b | bits 0-1 of the   | 16 scales s of   | d (f16)
          belongs to weight 32 b + l        | codes, as in Q2_K | 6 bits, see below|

    scales: byte 96 + i (i < 8) holds the low 4 bits of s[i] (bits 0-3) and s[i + 8] (bits 4-7);
            byte 104 + i (i < 4) the high 2 bits of s[i], s[i + 4], s[i + 8], s[i + 12], from bit 0

A set high bit means "do not subtract 4": q = low - 4 * (1 - high).

Source: llama.cpp, ggml/src/ggml-common.h (``block_q3_K``) and ggml-quants.c; GGUF type 11.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 110] to float32 [n, 256]."""
    low = shifted(blocks[:, 96:104], (0, 4), 0xF).flatten(1)
    high = shifted(blocks[:, 104:108], (0, 2, 4, 6), 3).flatten(1)
    scale = half(blocks, 108) * ((low | (high << 4)).to(torch.float32) - 32)
    codes = shifted(blocks[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 256)
    unset = shifted(blocks[:, :32], range(8), 1).flatten(1) ^ 1
    groups = (codes.to(torch.float32) - 4 * unset.to(torch.float32)).reshape(-1, 16, 16)
    return (scale.unsqueeze(-1) * groups).flatten(1)


FORMAT = gguf_format("q3_k", decode, halves=(108,))
