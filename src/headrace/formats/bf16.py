"""bfloat16: the upper half of a binary32, so that widening is a shift by 16 bits.

::

    15 | 14 ... 7 | 6 ... 0
     s | exponent | mantissa         bias 127, as in binary32

Source: "BFLOAT16 - Hardware Numerics Definition", Intel 2018; GGUF type 30, safetensors ``BF16``.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import plain_format

FORMAT = plain_format("bf16", torch.bfloat16)
