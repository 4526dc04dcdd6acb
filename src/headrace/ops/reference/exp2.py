"""2^x by the polynomial of ``core.exp2``, in plain PyTorch."""

from __future__ import annotations

import torch

from headrace.core.exp2 import EXP2_DEGREE_3, EXP2_LOWEST


def exp2_polynomial(x: torch.Tensor) -> torch.Tensor:
    """float32 x <= 127 -> about 2^x, as kernels compute it: floor, Horner, exponent bits."""
    x = x.clamp(min=EXP2_LOWEST)
    whole = torch.floor(x)
    fraction = x - whole
    result = torch.full_like(fraction, EXP2_DEGREE_3[3])
    for coefficient in reversed(EXP2_DEGREE_3[:3]):
        result = torch.addcmul(torch.full_like(fraction, coefficient), result, fraction)
    return (result.view(torch.int32) + (whole.int() << 23)).view(torch.float32)
