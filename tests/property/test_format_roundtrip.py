"""Quantising what was dequantised keeps the values, for any stored bytes or any weights."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.formats import fp8_e4m3, mxfp4, mxfp4_gguf, nvfp4, q4_1, q8_0
from headrace.formats.base import PackedTensor, dequantize

FEW = settings(max_examples=60, deadline=None)


def byte_arrays(*shape: int, below: int = 256) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.uint8, shape, elements=st.integers(0, below - 1))


def weights(rows: int, cols: int, top: float = 1e4) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, (rows, cols), elements=st.floats(-top, top, width=32))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@FEW
@given(codes=byte_arrays(3, 32), scales=byte_arrays(3, 2, below=253))
def test_mxfp4_keeps_any_finite_block(codes: np.ndarray, scales: np.ndarray) -> None:
    """Up to scale byte 252, beyond which 6 scales exceed float32. Scales may become smaller."""
    parts = {"codes": torch.from_numpy(codes), "scales": torch.from_numpy(scales)}
    values = dequantize(PackedTensor("mxfp4", (3, 64), parts))
    for module in (mxfp4, mxfp4_gguf):
        again = module.FORMAT.quantize(values)
        assert same_bits(dequantize(again), values)


@FEW
@given(values=weights(4, 64))
def test_mxfp4_error_is_half_a_step(values: np.ndarray) -> None:
    exact = torch.from_numpy(values)
    found = dequantize(mxfp4.quantize(exact))
    amax = exact.view(4, 2, 32).abs().amax(-1, keepdim=True).double()
    # Steps are 2 scales at the top (4 to 6, and 6 to 8 saturates): at most amax / 4 away.
    limit = (amax / 4).clamp(min=2.0**-128)
    error = (found - exact).abs().view(4, 2, 32).double()
    assert (error <= limit).all()


@FEW
@given(values=weights(3, 40))
def test_fp8_codes_are_stable(values: np.ndarray) -> None:
    once = fp8_e4m3.quantize(torch.from_numpy(values))
    if once.parts["scale"].item() < 2.0**-110:  # products near float32's subnormals round again
        return
    twice = fp8_e4m3.quantize(dequantize(once))
    assert torch.equal(once.parts["codes"], twice.parts["codes"])
    torch.testing.assert_close(twice.parts["scale"], once.parts["scale"], rtol=2.0**-22, atol=0)


@FEW
@given(values=weights(3, 64))
def test_nvfp4_blocks_with_normal_scales_are_stable(values: np.ndarray) -> None:
    once = nvfp4.quantize(torch.from_numpy(values))
    multiplier = once.parts["global_scale"]
    if multiplier.item() < 2.0**-110:
        return
    twice = nvfp4.quantize(dequantize(once), multiplier)
    # A subnormal scale is rounded by up to a third, so that its block's largest code may be 4.
    normal = once.parts["scales"] >= 0x08
    assert torch.equal(once.parts["scales"][normal], twice.parts["scales"][normal])
    pick = normal.repeat_interleave(8, dim=1)
    assert torch.equal(once.parts["codes"][pick], twice.parts["codes"][pick])


@FEW
@given(values=weights(2, 64))
def test_q8_0_values_are_stable(values: np.ndarray) -> None:
    once = dequantize(q8_0.FORMAT.quantize(torch.from_numpy(values)))
    assert torch.equal(dequantize(q8_0.FORMAT.quantize(once)), once)


@FEW
@given(values=weights(2, 64, top=100.0), spread=st.floats(1.0, 100.0))
def test_q4_1_values_are_stable(values: np.ndarray, spread: float) -> None:
    """Where the minimum does not drown the step: within about 2 ** 12 steps of zero."""
    values[:, 0::32], values[:, 1::32] = -spread, spread
    once = dequantize(q4_1.FORMAT.quantize(torch.from_numpy(values)))
    assert torch.equal(dequantize(q4_1.FORMAT.quantize(once)), once)


@FEW
@given(raw=hnp.arrays(np.uint16, (4, 32)))
def test_two_byte_floats_are_kept(raw: np.ndarray) -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        data = torch.from_numpy(raw.copy()).view(dtype)
        values = dequantize(PackedTensor(name, (4, 32), {"data": data}))
        again = values.to(dtype).view(torch.int16)
        keep = ~torch.isnan(values)
        assert torch.equal(again[keep], data.view(torch.int16)[keep])
