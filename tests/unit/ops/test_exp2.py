"""The exp2 polynomial (bar 03.7)."""

import numpy as np
import torch

from headrace.core.exp2 import EXP2_DEGREE_3, EXP2_MAX_RELATIVE_ERROR
from headrace.ops.reference.exp2 import exp2_polynomial


def test_03_7_relative_error_over_one_octave_is_below_the_bar():
    x = torch.linspace(0, 1, 1 << 20, dtype=torch.float64)[:-1].float()
    exact = np.exp2(x.double().numpy())
    error = np.abs(exp2_polynomial(x).double().numpy() / exact - 1).max()
    assert error <= EXP2_MAX_RELATIVE_ERROR < 8.8e-5


def test_no_polynomial_of_its_form_is_better():
    """The error alternates at four extrema of equal size: de la Vallee-Poussin's condition."""
    x = np.linspace(0, 1, 100_001)
    error = np.polyval(EXP2_DEGREE_3[::-1], x) / np.exp2(x) - 1
    inner = np.flatnonzero(np.diff(np.sign(np.diff(error)))) + 1
    extrema = np.append(error[inner], error[-1])
    assert len(extrema) == 4
    assert np.all(np.diff(np.sign(extrema)) != 0)
    assert np.ptp(np.abs(extrema)) < 1e-7


def test_every_octave_is_scaled_exactly_and_small_arguments_end_at_the_least_normal():
    f = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    base = exp2_polynomial(f)
    assert exp2_polynomial(torch.tensor([0.0])).item() == 1.0
    for n in (-126, -30, -1, 5, 100):
        near = torch.floor(f + n) == n  # f + n rounds; compare where the fraction survives
        scaled = exp2_polynomial((f + n)[near])
        expected = base[near].double() * 2.0**n
        assert float((scaled.double() / expected - 1).abs().max()) < 2e-5
    assert exp2_polynomial(torch.tensor([-1e4, float("-inf")])).tolist() == [2.0**-126] * 2
