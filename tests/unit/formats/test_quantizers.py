"""The encoders: ggml's own results where it has one, exhaustive nearest rounding elsewhere."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from headrace.core.errors import CheckpointError, UserError
from headrace.formats.base import PackedTensor, dequantize, load_formats
from headrace.formats.fp8_e4m3 import quantize as quantize_fp8
from headrace.formats.nvfp4 import quantize as quantize_nvfp4
from tests.fixtures import numerics as num


def quantize(name: str, values: torch.Tensor) -> PackedTensor:
    encoder = load_formats()[name].quantize
    assert encoder is not None
    return encoder(values)


def normal(*shape: int, std: float = 1.0, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(0, std, shape).astype(np.float32))


@pytest.mark.parametrize("std", [1e-6, 1.0, 1000.0])
@pytest.mark.parametrize("name", ["q8_0", "q4_1", "bf16", "f16"])
def test_bytes_equal_gguf(name: str, std: float) -> None:
    values = normal(3, 7, 64, std=std)
    values[0, 0, :32] = 0
    values[1, 0] = -0.5
    values[2, 0] = torch.arange(64) - 31.5  # halves: ties
    packed = quantize(name, values)
    qtype = gguf.GGMLQuantizationType[name.upper()]
    expected = gguf.quants.quantize(values.numpy(), qtype).view(np.uint8)
    (part,) = packed.parts.values()
    np.testing.assert_array_equal(part.view(torch.uint8).numpy(), expected)


TIES = {  # half-way values under a scale of 1, and the neighbour with an even mantissa bit
    0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_gguf", "nvfp4"])
def test_e2m1_ties_go_to_even(name: str) -> None:
    values = torch.zeros(1, 32)
    values[0, 0] = values[0, 16] = 6.0  # largest: scale 1
    for i, tie in enumerate(TIES):
        values[0, 1 + i], values[0, 17 + i] = tie, -tie
        values[0, 9 + i] = float(np.nextafter(np.float32(tie), np.float32(0)))
    packed = (
        quantize_nvfp4(values, torch.tensor(1.0)) if name == "nvfp4" else quantize(name, values)
    )
    found = dequantize(packed)[0].tolist()
    assert found[1:8] == list(TIES.values())
    assert found[17:24] == [-v for v in TIES.values()]
    assert found[9:16] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]


def test_mxfp4_scales_by_hand() -> None:
    """Scale 2 ** (floor(log2 amax) - 2): amax 4 and 7.9 give 1, 8 gives 2, 3.9 gives 1/2."""
    values = torch.zeros(7, 32)
    values[:6, 3] = torch.tensor([4.0, -7.9, 8.0, 3.9, 2.0**-140, 3.0e38])
    packed = quantize("mxfp4", values)
    assert packed.parts["scales"].flatten().tolist() == [127, 127, 128, 126, 0, 252, 0]
    found = dequantize(packed)[:, 3].tolist()
    assert found[:4] == [4.0, -6.0, 8.0, 3.0]  # 7.9 and 3.9 saturate at 6 scales
    assert found[4] == 0.0  # below half of E8M0's smallest scale
    assert found[5] == 6 * 2.0**125
    assert found[6] == 0.0


def test_mxfp4_containers_hold_the_same_numbers() -> None:
    values = normal(2, 5, 96)
    split, inline = quantize("mxfp4", values), quantize("mxfp4_gguf", values)
    assert torch.equal(dequantize(split), dequantize(inline))
    codes, scales, exact = num.mxfp4(values.numpy())
    np.testing.assert_array_equal(split.parts["scales"].numpy(), scales)
    np.testing.assert_array_equal(split.parts["codes"].numpy(), num.nibbles_pairs(codes))
    np.testing.assert_array_equal(
        inline.parts["blocks"].numpy(), num.mxfp4_gguf_blocks(codes, scales)
    )
    np.testing.assert_array_equal(dequantize(split).numpy(), exact)


def test_nvfp4_equals_the_independent_encoder() -> None:
    values = normal(8, 64)
    packed = quantize("nvfp4", values)
    multiplier = np.float32(float(values.abs().max()) / (6 * 448))
    assert packed.parts["global_scale"].item() == multiplier
    codes, scales, exact = num.nvfp4(values.numpy(), multiplier)
    np.testing.assert_array_equal(packed.parts["scales"].numpy(), scales)
    np.testing.assert_array_equal(packed.parts["codes"].numpy() & 0x77, codes & 0x77)
    np.testing.assert_array_equal(dequantize(packed).numpy(), exact)


def test_nvfp4_has_a_multiplier_per_expert_and_keeps_zeros() -> None:
    values = normal(3, 4, 32)
    values[1] *= 100
    values[2] = 0
    packed = quantize("nvfp4", values)
    amax = values[:2].abs().amax((1, 2)).double() / (6 * 448)
    assert packed.parts["global_scale"].tolist() == [*amax.float().tolist(), 1.0]
    assert not dequantize(packed)[2].any()
    error = (dequantize(packed) - values).abs()
    assert (error <= values.abs().amax((1, 2), keepdim=True) / 6).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_nvfp4_refuses_an_impossible_multiplier(bad: float) -> None:
    with pytest.raises(UserError, match="not positive and finite"):
        quantize_nvfp4(normal(1, 16), torch.tensor(bad))


def test_fp8_codes_equal_the_hardware_rounding() -> None:
    """Under a scale of 1, the codes are those of PyTorch's cast, ties and subnormals included."""
    halves = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
    values = halves[halves <= 448].repeat(2).view(2, -1)
    values[1] *= -1
    packed = quantize_fp8(values)
    assert packed.parts["scale"].item() == 1.0
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(packed.parts["codes"], expected)


@pytest.mark.parametrize("block", [False, True])
def test_fp8_equals_the_independent_encoder(block: bool) -> None:
    values = normal(130, 200)
    packed = quantize_fp8(values, block=block)
    codes, scale, exact = num.fp8(values.numpy(), 128 if block else None)
    np.testing.assert_array_equal(packed.parts["scale"].numpy(), scale)
    np.testing.assert_array_equal(packed.parts["codes"].numpy() & 0x7F, codes & 0x7F)
    np.testing.assert_array_equal(dequantize(packed).numpy(), exact)


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "mxfp4", "mxfp4_gguf", "nvfp4", "fp8_e4m3"])
def test_what_cannot_be_quantised_is_refused(name: str) -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.ones(2, 32)
        values[1, 5] = bad
        with pytest.raises(UserError, match=f"cannot quantise to {name}: .*NaN or infinite"):
            quantize(name, values)
    if name != "fp8_e4m3":
        with pytest.raises(CheckpointError, match="a row must be a multiple"):
            quantize(name, torch.ones(2, 40))
    if name in ("q8_0", "q4_1"):
        with pytest.raises(UserError, match="exceeds float16"):
            quantize(name, torch.tensor([[1e7, -1e7] * 16]))
