"""fp8, nvfp4, mxfp4 and plain floats: whole tensors, ragged edges, experts, strided rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.formats.base import PackedTensor, dequantize
from tests.fixtures import numerics as num
from tests.unit.formats import bits


def random_bytes(*shape: int, seed: int = 0, below: int = 256) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, below, shape, dtype=np.uint8))


def random_scales(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(9).lognormal(0, 3, shape).astype(np.float32))


@pytest.mark.parametrize("lead", [(), (3,)])
def test_fp8_one_scale(lead: tuple[int, ...]) -> None:
    codes, scale = random_bytes(*lead, 5, 70), random_scales(*lead)
    found = dequantize(PackedTensor("fp8_e4m3", (*lead, 5, 70), {"codes": codes, "scale": scale}))
    expected = num.E4M3[codes.numpy()] * scale.numpy()[..., None, None]
    bits.same_bits(found.numpy(), expected)


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 300), (2, 257, 129), (3, 64, 160)])
def test_fp8_blocks_with_ragged_edges(shape: tuple[int, ...]) -> None:
    rows, cols = shape[-2:]
    codes = random_bytes(*shape)
    scale = random_scales(*shape[:-2], -(-rows // 128), -(-cols // 128))
    found = dequantize(PackedTensor("fp8_e4m3", shape, {"codes": codes, "scale": scale}))
    row, col = np.arange(rows)[:, None] // 128, np.arange(cols)[None] // 128
    expected = num.E4M3[codes.numpy()] * scale.numpy()[..., row, col]
    bits.same_bits(found.numpy(), expected)


def test_fp8_strided_rows() -> None:
    codes = random_bytes(2, 10, 12)
    packed = PackedTensor(
        "fp8_e4m3", (2, 5, 12), {"codes": codes[:, 1::2], "scale": random_scales(2)}
    )
    expected = num.E4M3[codes.numpy()[:, 1::2]] * random_scales(2).numpy()[:, None, None]
    bits.same_bits(dequantize(packed).numpy(), expected)


def unpacked(codes: torch.Tensor) -> np.ndarray:
    raw = codes.numpy()
    return num.E2M1[np.stack((raw & 15, raw >> 4), axis=-1).reshape(*raw.shape[:-1], -1)]


@pytest.mark.parametrize("lead", [(), (4,)])
@pytest.mark.parametrize("step", [1, 2])
def test_nvfp4_is_one_rounding(lead: tuple[int, ...], step: int) -> None:
    """Element 2 i is the low nibble; the multiplier, one per expert, comes last."""
    codes, scales = random_bytes(*lead, 6, 24), random_bytes(*lead, 6, 3, seed=1)
    multiplier = random_scales(*lead)
    parts = {"codes": codes[..., ::step, :], "scales": scales[..., ::step, :]}
    packed = PackedTensor("nvfp4", (*lead, 6 // step, 48), {**parts, "global_scale": multiplier})
    exact = unpacked(codes).astype(np.float64) * num.E4M3[scales.numpy()].repeat(16, axis=-1)
    expected = (exact * multiplier.numpy()[..., None, None].astype(np.float64)).astype(np.float32)
    bits.same_bits(dequantize(packed).numpy(), expected[..., ::step, :])
    if lead:
        bits.same_bits(dequantize(packed.expert(3)).numpy(), expected[3, ::step])


def test_b022_gate_and_up_keep_their_own_multiplier() -> None:
    """The same codes under multipliers 1.0 (gate) and 0.5 (up): up is half of gate."""
    codes, scales = random_bytes(8, 16), random_bytes(8, 2, below=127)
    gate, up = (
        PackedTensor(
            "nvfp4",
            (8, 32),
            {"codes": codes, "scales": scales, "global_scale": torch.tensor(multiplier)},
        )
        for multiplier in (1.0, 0.5)
    )
    expected = unpacked(codes) * num.E4M3[scales.numpy()].repeat(16, axis=-1)
    bits.same_bits(dequantize(gate).numpy(), expected)
    bits.same_bits(dequantize(up).numpy(), expected * np.float32(0.5))


def test_nvfp4_reciprocal_multiplier() -> None:
    """compressed-tensors divides by ``weight_global_scale``: the inverse multiplies here."""
    values = np.random.default_rng(3).normal(0, 1, (4, 32)).astype(np.float32)
    stored = np.float32(6 * 448) / np.abs(values).max()
    codes, scales, expected = num.nvfp4(values, np.float32(1) / stored)
    parts = {
        "codes": torch.from_numpy(codes),
        "scales": torch.from_numpy(scales),
        "global_scale": torch.tensor(stored).reciprocal(),
    }
    bits.same_bits(dequantize(PackedTensor("nvfp4", (4, 32), parts)).numpy(), expected)
    assert np.abs(expected - values).max() < np.abs(values).max() / 6


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("step", [1, 2])
def test_mxfp4_strided_rows_and_experts(lead: tuple[int, ...], step: int) -> None:
    codes, scales = random_bytes(*lead, 6, 48), random_bytes(*lead, 6, 3, seed=1)
    parts = {"codes": codes[..., step - 1 :: step, :], "scales": scales[..., step - 1 :: step, :]}
    found = dequantize(PackedTensor("mxfp4", (*lead, 6 // step, 96), parts))
    with np.errstate(all="ignore"):
        expected = unpacked(codes) * num.E8M0[scales.numpy()].repeat(32, axis=-1)
    bits.same_bits(found.numpy(), expected[..., step - 1 :: step, :])


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_all_two_byte_floats(name: str) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    data = torch.from_numpy(raw).view(dtype)
    found = dequantize(PackedTensor(name, (256, 256), {"data": data})).numpy()
    expected = num.from_bf16(raw) if name == "bf16" else raw.view(np.float16).astype(np.float32)
    bits.same_bits(found, expected)
    bits.same_bits(
        dequantize(PackedTensor(name, (128, 256), {"data": data[1::2]})).numpy(), expected[1::2]
    )


def test_f32_is_itself() -> None:
    data = torch.tensor([1.0, -0.0, 1e-45, float("inf"), float("nan")])
    bits.same_bits(dequantize(PackedTensor("f32", (5,), {"data": data})).numpy(), data.numpy())


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 4, 64)])
@pytest.mark.parametrize("name", ["f32", "q8_0", "mxfp4", "nvfp4", "fp8_e4m3"])
def test_b005_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    cols, lead = shape[-1], shape[:-1]
    byte = torch.uint8
    parts = {
        "f32": {"data": torch.empty(shape)},
        "q8_0": {"blocks": torch.empty(*lead, cols // 32 * 34, dtype=byte)},
        "mxfp4": {
            "codes": torch.empty(*lead, cols // 2, dtype=byte),
            "scales": torch.empty(*lead, cols // 32, dtype=byte),
        },
        "nvfp4": {
            "codes": torch.empty(*lead, cols // 2, dtype=byte),
            "scales": torch.empty(*lead, cols // 16, dtype=byte),
            "global_scale": torch.ones(shape[:-2]),
        },
        "fp8_e4m3": {"codes": torch.empty(shape, dtype=byte), "scale": torch.ones(shape[:-2])},
    }[name]
    found = dequantize(PackedTensor(name, shape, parts))
    assert found.shape == shape
    assert found.dtype == torch.float32
