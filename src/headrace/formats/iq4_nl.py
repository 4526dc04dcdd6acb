"""IQ4_NL: 32 weights in 18 bytes, w = d * table[q] with a code book that is not linear.

::

    byte   0    1 | 2                    | 3          | ... | 17
         d (f16)  | q[0] low, q[16] high | q[1] q[17] | ... | q[15] q[31]

The code book is ``core.numeric.IQ4_VALUES``.

Source: llama.cpp, ggml/src/ggml-common.h (``block_iq4_nl``) and ggml-quants.c; GGUF type 20.
"""

from __future__ import annotations

import torch

from headrace.core.numeric import IQ4_VALUES
from headrace.formats.packing import gguf_format, half, lookup, shifted


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [n, 18] to float32 [n, 32]."""
    return half(blocks, 0) * lookup(IQ4_VALUES, shifted(blocks[:, 2:], (0, 4), 0xF).flatten(1))


FORMAT = gguf_format("iq4_nl", decode, halves=(0,))
