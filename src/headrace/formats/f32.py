"""Plain IEEE 754 binary32.

::

    31 | 30 ... 23 | 22 ... 0
     s | exponent  | mantissa

Source: IEEE 754-2019; GGUF type 0, safetensors dtype ``F32``.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import plain_format

FORMAT = plain_format("f32", torch.float32)
