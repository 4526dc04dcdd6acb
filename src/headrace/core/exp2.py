"""2^x by a polynomial, for kernels whose exponentials outnumber what special-function units deliver.

With x = n + f, n whole and 0 <= f < 1: 2^x = 2^n p(f), and 2^n is an addition to the exponent bits. p has
degree 3 and p(0) = 1, so that a row's largest probability is exactly 1. Its coefficients minimise the
largest relative error under that condition (Remez exchange on [0, 1], float64, rounded to float32): four
extrema of 8.56e-5, 2^-13.5, less than the rounding of a bf16 or fp8 probability. (FlashAttention-4 uses
the same form; its published coefficients reach 8.77e-5.)
"""

from __future__ import annotations

# Ascending powers of f, exact float32 values.
EXP2_DEGREE_3: tuple[float, float, float, float] = (
    1.0,
    0.6951167583465576,
    0.22764499485492706,
    0.07706703990697861,
)
EXP2_MAX_RELATIVE_ERROR = 8.6e-5
# Below it 2^n would leave the normal numbers; arguments are clamped.
EXP2_LOWEST = -126.0
