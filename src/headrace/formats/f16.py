"""IEEE 754 binary16, subnormals included.

::

    15 | 14 ... 10 | 9 ... 0
     s | exponent  | mantissa        bias 15; exponent 31: infinity (mantissa 0) or NaN

Source: IEEE 754-2019; GGUF type 1, safetensors dtype ``F16``.
"""

from __future__ import annotations

import torch

from headrace.formats.packing import plain_format

FORMAT = plain_format("f16", torch.float16)
