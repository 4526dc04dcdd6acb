"""The polynomial that stands for exp2 in attention, as the kernels compute it."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from headrace.ops.triton.softmax import exp2_polynomial

    @triton.jit
    def polynomial_kernel(x, out, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, exp2_polynomial(tl.load(x + at)))


def evaluated(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    polynomial_kernel[(x.numel() // 4096,)](x, out, BLOCK=4096)
    return out


def relative_error(x: torch.Tensor) -> torch.Tensor:
    exact = torch.exp2(x.double())
    return ((evaluated(x.to(DEVICE)).cpu().double() - exact) / exact).abs()


def test_03_7_the_largest_relative_error_on_one_octave_is_8_8e_5():
    x = torch.arange(1 << 16, dtype=torch.float32) / (1 << 16) - 1
    assert 8e-5 < float(relative_error(x).max()) <= 8.8e-5


def test_it_holds_down_to_the_smallest_probabilities():
    """The largest score itself has probability 1 exactly; what nobody sees is as good as nothing."""
    x = torch.cat((-torch.linspace(0, 125, (1 << 16) - 128), -torch.arange(128.0) % 126))
    assert float(relative_error(x).max()) <= 8.8e-5
    ends = torch.tensor([0.0, float("-inf")]).repeat(2048)
    found = evaluated(ends.to(DEVICE)).cpu()
    assert bool((found[::2] == 1).all())
    assert float(found[1::2].max()) < 2e-38
