"""GGUF block types: bit for bit the values of the ``gguf`` package, and of blocks made by hand."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.unit.formats import bits

from headrace.core.numeric import FORMATS, IQ4_VALUES
from headrace.formats.base import PackedTensor, dequantize

TYPES = tuple(n for n, f in FORMATS.items() if f.gguf_type is not None and f.block_weights > 1)
HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)},
}
# Zeros of both signs, subnormals, the smallest normal, 1, the largest number, infinities, NaNs.
HALF_BITS = (
    *(0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00),
    *(0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFC01),
)


def packed(name: str, raw: npt.NDArray[np.uint8], cols: int) -> PackedTensor:
    return PackedTensor(name, (*raw.shape[:-1], cols), {"blocks": torch.from_numpy(raw)})


def oracle(name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    qtype = gguf.GGMLQuantizationType(FORMATS[name].gguf_type)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(raw, qtype)
    if name == "mxfp4_gguf":  # gguf's integer table has no negative zero, E2M1 has (code 8)
        codes = raw.reshape(*raw.shape[:-1], -1, 17)[..., 1:]
        codes = np.concatenate((codes & 15, codes >> 4), axis=-1).reshape(values.shape)
        values = np.where(codes == 8, np.float32(-0.0), values)
    return values


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_equal_gguf(name: str) -> None:
    fmt = FORMATS[name]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (37, 3 * fmt.block_nbytes), dtype=np.uint8)
    if name == "mxfp4_gguf":
        raw[:, 0 :: fmt.block_nbytes] %= 255  # 255 is the one byte where gguf departs from the MX
    found = dequantize(packed(name, raw, 3 * fmt.block_weights))
    bits.same_bits(found.numpy(), oracle(name, raw))


@pytest.mark.parametrize("name", sorted(HALVES))
def test_extreme_scales_equal_gguf(name: str) -> None:
    fmt = FORMATS[name]
    rng = np.random.default_rng(2)
    pairs = [(a, b) for a in HALF_BITS for b in HALF_BITS]
    raw = rng.integers(0, 256, (len(pairs), fmt.block_nbytes), dtype=np.uint8)
    for row, values in zip(raw, pairs, strict=True):
        for offset, value in zip(HALVES[name], values, strict=False):
            row[offset : offset + 2] = np.array([value], "<u2").view(np.uint8)
    found = dequantize(packed(name, raw, fmt.block_weights))
    bits.same_bits(found.numpy(), oracle(name, raw))


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x0F, 0xF0, 0x55, 0xAA])
@pytest.mark.parametrize("name", sorted(HALVES))
def test_uniform_bytes_equal_gguf(name: str, fill: int) -> None:
    fmt = FORMATS[name]
    raw = np.full((1, fmt.block_nbytes), fill, np.uint8)
    for offset in HALVES[name]:
        raw[:, offset : offset + 2] = np.array([0x3555], "<u2").view(np.uint8)  # 1 / 3
    bits.same_bits(dequantize(packed(name, raw, fmt.block_weights)).numpy(), oracle(name, raw))


F = np.float32


def from_hand(name: str, rng: np.random.Generator) -> tuple[bytes, npt.NDArray[np.float32]]:
    """One block of chosen fields, and the weights that they stand for."""
    d, m = (float(np.float16(v)) for v in rng.normal(0, 0.01, 2))
    low, high = {"q8_0": (-128, 128), "q3_k": (-4, 4), "q6_k": (-32, 32)}.get(name, (0, 16))
    if name in ("q5_0", "q5_1", "q5_k"):
        high = 32
    if name == "q2_k":
        high = 4
    q = rng.integers(low, high, FORMATS[name].block_weights)
    ints = [int(v) for v in q]
    w = q.astype(F)
    table = np.array(IQ4_VALUES, F)
    if name == "q4_0":
        return bits.pack_q4_0(d, ints), F(d) * (w - 8)
    if name == "q4_1":
        return bits.pack_q4_1(d, m, ints), F(d) * w + F(m)
    if name == "q5_0":
        return bits.pack_q5_0(d, ints), F(d) * (w - 16)
    if name == "q5_1":
        return bits.pack_q5_1(d, m, ints), F(d) * w + F(m)
    if name == "q8_0":
        return bits.pack_q8_0(d, ints), F(d) * w
    if name == "iq4_nl":
        return bits.pack_iq4_nl(d, ints), F(d) * table[q]
    groups = {"q2_k": 16, "q3_k": 16, "q6_k": 16}.get(name, 8)
    w = w.reshape(groups, -1)
    if name in ("q2_k", "q4_k", "q5_k"):
        s, low_s = rng.integers(0, 16 if name == "q2_k" else 64, (2, groups))
        pack = {"q2_k": bits.pack_q2_k, "q4_k": bits.pack_q4_k, "q5_k": bits.pack_q5_k}[name]
        block = pack(d, m, [int(v) for v in s], [int(v) for v in low_s], ints)
        scale, minimum = F(d) * s.astype(F), F(m) * low_s.astype(F)
        return block, (scale[:, None] * w - minimum[:, None]).ravel()
    s = rng.integers(-128 if name == "q6_k" else -32, 128 if name == "q6_k" else 32, groups)
    signed = [int(v) for v in s]
    scale = (F(d) * s.astype(F))[:, None]
    if name == "q3_k":
        return bits.pack_q3_k(d, signed, ints), (scale * w).ravel()
    if name == "q6_k":
        return bits.pack_q6_k(d, signed, ints), (scale * w).ravel()
    return bits.pack_iq4_xs(d, signed, ints), (scale * table[q].reshape(8, 32)).ravel()


@pytest.mark.parametrize("name", sorted(HALVES))
def test_hand_made_blocks(name: str) -> None:
    rng = np.random.default_rng(3)
    made = [from_hand(name, rng) for _ in range(8)]
    raw = np.frombuffer(b"".join(block for block, _ in made), np.uint8).reshape(4, -1).copy()
    expected = np.concatenate([weights for _, weights in made]).reshape(4, -1)
    found = dequantize(packed(name, raw, expected.shape[1]))
    bits.same_bits(found.numpy(), expected)


@pytest.mark.parametrize("name", TYPES)
def test_strided_rows_and_experts(name: str) -> None:
    """Interleaved gate and up rows are two strided views; experts lead; both are one tensor."""
    fmt = FORMATS[name]
    raw = np.random.default_rng(4).integers(0, 255, (3, 10, 2 * fmt.block_nbytes), dtype=np.uint8)
    whole = packed(name, raw, 2 * fmt.block_weights)
    values = oracle(name, raw)
    bits.same_bits(dequantize(whole).numpy(), values)
    for parity in (0, 1):
        view = torch.from_numpy(raw)[:, parity::2]
        half_ = PackedTensor(name, (3, 5, whole.cols), {"blocks": view})
        bits.same_bits(dequantize(half_).numpy(), values[:, parity::2])
        bits.same_bits(dequantize(half_.expert(2)).numpy(), values[2, parity::2])
    one = PackedTensor(name, (whole.cols,), {"blocks": torch.from_numpy(raw)[1, 3]})
    bits.same_bits(dequantize(one).numpy(), values[1, 3])


def test_more_rows_than_a_piece() -> None:
    """A tensor that is decoded in several pieces is put together in order."""
    raw = np.random.default_rng(5).integers(0, 256, (2, 1500, 34 * 24), dtype=np.uint8)
    found = dequantize(packed("q8_0", raw, 768))
    bits.same_bits(found.numpy(), oracle("q8_0", raw))
