"""Tiles of stored weights against the formats' references, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.numeric import E4M3_VALUES, E8M0_VALUES, FORMATS, IQ4_VALUES
from headrace.experts.slab_pack import row_planes
from headrace.formats.base import PackedTensor, dequantize
from tests.fixtures.cpu_oracle import random_packed
from tests.fixtures.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton

FMTS = [name for name in FORMATS if name != "mxfp4_gguf"]  # slabs hold it as mxfp4


def unpacked(w: PackedTensor, *, rows: int = 8, cols: int = 256, first: int = 0) -> torch.Tensor:
    """All rows of ``w`` from column ``first`` on, by tiles that overhang both dimensions."""
    from tests.fixtures.unpack_kernel import unpack_kernel

    planes = {k: torch.from_numpy(v.copy()).to(DEVICE) for k, v in row_planes(w).items()}
    codes = planes[""]
    scales = planes.get("_scales", codes)
    fmt = "mxfp4" if w.format == "mxfp4_gguf" else w.format
    out = torch.full((w.rows, w.cols - first), float("nan"), device=DEVICE)
    grid = (-(-w.rows // rows), -(-(w.cols - first) // cols))
    unpack_kernel[grid](
        codes, scales, out, w.rows, first, codes.stride(0), scales.stride(0), fmt, w.cols,
        rows, cols,
    )  # fmt: skip
    return out.cpu()


def plain(w: PackedTensor) -> PackedTensor:
    """``w`` without its factors, which tiles leave to the caller."""
    for name in ("scale", "global_scale"):
        if name in w.parts:
            w.parts[name].fill_(1.0)
    return w


@pytest.mark.parametrize("name", [*FMTS, "mxfp4_gguf"])
def test_a_tile_equals_the_reference_bit_for_bit(name: str) -> None:
    w = plain(random_packed(name, 13, 1280, np.random.default_rng(3)))
    assert torch.equal(unpacked(w), dequantize(w))


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "q3_k"])
def test_a_tile_begins_at_any_group(name: str) -> None:
    w = random_packed(name, 3, 512, np.random.default_rng(4))
    assert torch.equal(unpacked(w, rows=4, cols=64, first=96), dequantize(w)[:, 96:])


def test_every_scale_byte_of_mxfp4() -> None:
    codes = torch.full((256, 16), 0x22, dtype=torch.uint8)  # 1.0
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    got = unpacked(PackedTensor("mxfp4", (256, 32), {"codes": codes, "scales": scales}), cols=32)
    want = torch.tensor(E8M0_VALUES)[:, None].expand(256, 32)
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got[:255], want[:255])


def test_every_code_of_fp8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    got = unpacked(
        PackedTensor("fp8_e4m3", (1, 256), {"codes": codes, "scale": torch.ones(())}), rows=1
    )[0]
    want = torch.tensor(E4M3_VALUES)
    assert torch.equal(torch.nan_to_num(got, 7e6), torch.nan_to_num(want, 7e6))


def test_every_code_of_iq4() -> None:
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.array([1.0], np.float16).view(np.uint8)
    block[0, 2:] = np.arange(16) | (15 - np.arange(16)) << 4
    got = unpacked(
        PackedTensor("iq4_nl", (1, 32), {"blocks": torch.from_numpy(block)}), rows=1, cols=32
    )[0]
    assert got.tolist() == [*IQ4_VALUES, *reversed(IQ4_VALUES)]
