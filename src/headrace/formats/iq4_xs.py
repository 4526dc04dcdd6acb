"""IQ4_XS: 256 weights in 136 bytes, w = d * (s - 32) * table[q] per group of 32.

::

    byte  0    1  | 2    3                    | 4 ... 7              | 8 ... 135
          d (f16) | bits 4-5 of the scales s, | bits 0-3 of the      | 8 groups of 16 bytes: byte
                  | little-endian: group g at | scales: byte 4 + g/2,| 8 + 16 g + l holds weights
                  | bits 2 g and 2 g + 1      | low nibble if even g | 32 g + l, 32 g + 16 + l

The code book is ``core.numeric.IQ4_VALUES``.

Source: llama.cpp, ggml/src/ggml-common.h (``block_iq4_xs``) and ggml-quants.c; GGUF type 23.
"""

from __future__ import annotations

import torch

from headrace.core.numeric import IQ4_VALUES
from headrace.formats.packing import gguf_format, half, lookup, pairs_interleaved, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 136] to float32 [n, 256]."""
    low = pairs_interleaved(blocks[:, 4:8])
    high = shifted(blocks[:, 2:4].unsqueeze(-1), (0, 2, 4, 6), 3).flatten(1)
    scale = half(blocks, 0) * ((low | (high << 4)).to(torch.float32) - 32)
    groups = lookup(IQ4_VALUES, shifted(blocks[:, 8:].reshape(-1, 8, 16), (0, 4), 0xF))
    return (scale.view(-1, 8, 1, 1) * groups).flatten(1)


FORMAT = gguf_format("iq4_xs", decode, halves=(0,))
