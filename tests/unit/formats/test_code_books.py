"""E2M1, E8M0 and E4M3: all codes against the specifications' formulas, alone and inside formats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.core import numeric
from headrace.formats.base import PackedTensor, dequantize
from tests.fixtures import numerics as num
from tests.unit.formats import bits

# One block in which every byte of a row says 1.0: E2M1 code 2 in both nibbles.
ONES = np.full((1, 16), 0x22, np.uint8)


def mxfp4_block(container: str, scale: int, nibbles: np.ndarray) -> PackedTensor:
    if container == "mxfp4":
        parts = {"codes": torch.from_numpy(nibbles), "scales": torch.tensor([[scale]]).byte()}
        return PackedTensor("mxfp4", (1, 32), parts)
    raw = np.concatenate((np.array([[scale]], np.uint8), nibbles), axis=1)
    return PackedTensor("mxfp4_gguf", (1, 32), {"blocks": torch.from_numpy(raw)})


@pytest.mark.parametrize("container", ["mxfp4", "mxfp4_gguf"])
@pytest.mark.parametrize(
    ("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, math.nan)]
)
def test_b017_e8m0_ends(container: str, byte: int, value: float) -> None:
    found = dequantize(mxfp4_block(container, byte, ONES)).numpy()
    bits.same_bits(found, np.full((1, 32), value, np.float32))


@pytest.mark.parametrize("container", ["mxfp4", "mxfp4_gguf"])
def test_b018_all_e8m0_bytes(container: str) -> None:
    assert num.E8M0[134] == 128.0
    for byte in range(256):
        found = dequantize(mxfp4_block(container, byte, ONES)).numpy()
        expected = math.nan if byte == 255 else math.ldexp(1.0, byte - 127)
        bits.same_bits(found, np.full((1, 32), expected, np.float32))


def test_b018_all_e4m3_bytes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    parts = {"codes": codes, "scale": torch.tensor(1.0)}
    found = dequantize(PackedTensor("fp8_e4m3", (1, 256), parts))
    bits.same_bits(found.numpy()[0], num.E4M3)
    bits.same_bits(found.numpy(), codes.view(torch.float8_e4m3fn).to(torch.float32).numpy())
    by_hand = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x7E: 448.0}
    for byte, value in by_hand.items():
        assert found[0, byte] == value
        assert found[0, byte | 0x80] == -value
    assert torch.signbit(found[0, 0x80])
    assert torch.isnan(found[0, [0x7F, 0xFF]]).all()


def test_all_e4m3_scales_of_nvfp4() -> None:
    """256 blocks of 16 ones, each under another scale byte, times a multiplier of 0.5."""
    parts = {
        "codes": torch.full((16, 128), 0x22, dtype=torch.uint8),
        "scales": torch.arange(256, dtype=torch.uint8).view(16, 16),
        "global_scale": torch.tensor(0.5),
    }
    found = dequantize(PackedTensor("nvfp4", (16, 256), parts)).numpy()
    expected = np.repeat(num.E4M3 * np.float32(0.5), 16).reshape(16, 256)
    bits.same_bits(found, expected)


def test_all_e2m1_codes_by_hand() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert list(numeric.E2M1_VALUES) == magnitudes + [-m for m in magnitudes]
    assert math.copysign(1, numeric.E2M1_VALUES[8]) == -1
    assert list(num.E2M1) == list(numeric.E2M1_VALUES)


def test_tables_in_core_are_the_specifications() -> None:
    for table, formula in ((numeric.E8M0_VALUES, num.e8m0), (numeric.E4M3_VALUES, num.e4m3)):
        assert len(table) == 256
        for byte, value in enumerate(table):
            want = formula(byte)
            assert math.isnan(value) if math.isnan(want) else value == want


def test_b007_both_nibble_orders() -> None:
    """Nibbles 0..15 twice: one vector from either container, another if the orders are mixed."""
    vector = list(range(16)) * 2
    hugging_face = np.frombuffer(bits.nibbles_pairs(vector), np.uint8).reshape(1, 16).copy()
    gguf_order = np.frombuffer(bits.nibbles_split(vector), np.uint8).reshape(1, 16).copy()
    expected = num.E2M1[vector][None] * np.float32(4)
    bits.same_bits(dequantize(mxfp4_block("mxfp4", 129, hugging_face)).numpy(), expected)
    bits.same_bits(dequantize(mxfp4_block("mxfp4_gguf", 129, gguf_order)).numpy(), expected)
    mixed = dequantize(mxfp4_block("mxfp4", 129, gguf_order)).numpy()
    assert (mixed != expected).any()


def test_mxfp4_overflow_is_infinite_and_nan_covers_zero() -> None:
    codes = np.frombuffer(bits.nibbles_pairs([0, 2, 3, 4, 7, 15, 8, 0] * 4), np.uint8)
    block = codes.reshape(1, 16).copy()
    found = dequantize(mxfp4_block("mxfp4", 254, block))[0, :8].tolist()
    inf = math.inf
    assert found[:6] == [0.0, 2.0**127, 1.5 * 2.0**127, inf, inf, -inf]
    assert torch.isnan(dequantize(mxfp4_block("mxfp4", 255, block))).all()
