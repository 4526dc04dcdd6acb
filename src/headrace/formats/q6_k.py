"""Q6_K: 256 weights in 210 bytes, w = d * s * (q - 32) per group of 16, s a signed byte.

::

    byte  0 ... 127                   | 128 ... 191                  | 192 ... 207  | 208 209
          bits 0-3 of the codes       | bits 4-5 of the codes        | 16 scales s  | d (f16)

    byte       64 h + l (l < 64): weights 128 h + l (low nibble), 128 h + 64 + l (high nibble)
    byte 128 + 32 h + l (l < 32): weights 128 h + l (bits 0-1), + 32 (2-3), + 64 (4-5), + 96 (6-7)

Source: llama.cpp, ggml/src/ggml-common.h (``block_q6_K``) and ggml-quants.c; GGUF type 14.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import gguf_format, half, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 210] to float32 [n, 256]."""
    low = shifted(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 0xF).reshape(-1, 256)
    high = shifted(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 256)
    scale = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    groups = ((low | (high << 4)).to(torch.float32) - 32).reshape(-1, 16, 16)
    return (scale.unsqueeze(-1) * groups).flatten(1)


FORMAT = gguf_format("q6_k", decode, halves=(208,))
