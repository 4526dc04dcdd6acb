"""Experts into slabs and back, in every format: the numbers that the bytes stand for must not change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError, UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.experts.slab import SlabLayout, slab_layout
from headrace.experts.slab_pack import layout_of, read_slab, slice_weights, write_slab
from headrace.formats.base import PackedTensor, dequantize
from headrace.formats.fp8_e4m3 import quantize as quantize_fp8
from headrace.formats.mxfp4 import quantize as quantize_mxfp4
from headrace.formats.mxfp4_gguf import quantize as quantize_mxfp4_gguf
from headrace.formats.nvfp4 import quantize as quantize_nvfp4
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.reference.mixture import moe

Pack = Callable[[torch.Tensor], PackedTensor]
HIDDEN, INTERMEDIATE = 256, 768
# float16 fields of each block type, as llama.cpp's ggml-common.h has them: random bytes there could
# make NaN, which compares equal to nothing.
HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
}


def floats(dtype: torch.dtype, name: str) -> Pack:
    return lambda v: PackedTensor(name, tuple(v.shape), {"data": v.to(dtype)})


def random_blocks(name: str) -> Pack:
    """Random blocks, whatever the values: a copy is a copy."""

    def pack(values: torch.Tensor) -> PackedTensor:
        spec = FORMATS[name]
        rows, cols = values.shape
        seed = int(values.abs().sum() * 1000)
        blocks = np.random.default_rng(seed).integers(
            0, 256, (rows, cols // spec.block_weights, spec.block_nbytes), np.uint8
        )
        for offset in HALVES[name]:
            blocks[..., offset + 1] &= 0x3F  # an exponent below NaN's and infinity's
        flat = torch.from_numpy(blocks.reshape(rows, -1))
        return PackedTensor(name, (rows, cols), {"blocks": flat})

    return pack


PACKS: dict[str, Pack] = {
    "f32": floats(torch.float32, "f32"),
    "f16": floats(torch.float16, "f16"),
    "bf16": floats(torch.bfloat16, "bf16"),
    "mxfp4": quantize_mxfp4,
    "mxfp4_gguf": quantize_mxfp4_gguf,
    "nvfp4": quantize_nvfp4,
    "fp8_e4m3": quantize_fp8,
    "fp8_e4m3 in blocks": lambda v: quantize_fp8(v, block=True),
    **{name: random_blocks(name) for name in HALVES},
}


def make_experts(
    pack: Pack,
    down_pack: Pack | None = None,
    *,
    count: int = 2,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    bias: bool = True,
    interleaved: bool = False,
) -> ExpertWeights:
    rng = torch.Generator().manual_seed(7)

    def values(rows: int, cols: int) -> torch.Tensor:
        # rows of different sizes, so that scales and factors differ
        return torch.randn(rows, cols, generator=rng) * torch.rand(rows, 1, generator=rng)

    gate: list[PackedTensor] = []
    up: list[PackedTensor] = []
    for _ in range(count):
        if interleaved:
            both = pack(values(2 * intermediate, hidden))
            for place, to in enumerate((gate, up)):
                parts = {k: t[place::2] if t.ndim == 2 else t for k, t in both.parts.items()}
                to.append(PackedTensor(both.format, (intermediate, hidden), parts))
        else:
            gate.append(pack(values(intermediate, hidden)))
            up.append(pack(values(intermediate, hidden) / 4))
    down = [(down_pack or pack)(values(hidden, intermediate)) for _ in range(count)]
    if not bias:
        return ExpertWeights(gate, up, down)
    biases = [torch.randn(count, n, generator=rng) for n in (intermediate, intermediate, hidden)]
    return ExpertWeights(gate, up, down, *biases)


def slab_of(experts: ExpertWeights, index: int, layout: SlabLayout) -> torch.Tensor:
    # Old bytes everywhere: what is not written shows.
    slab = torch.full((layout.num_slices, layout.slice_nbytes), 0xA5, dtype=torch.uint8)
    write_slab(experts, index, layout, slab)
    return slab


def assert_same(found: ExpertWeights, experts: ExpertWeights, index: int) -> None:
    for name in ("gate", "up", "down"):
        want = dequantize(getattr(experts, name)[index])
        got = dequantize(getattr(found, name)[0])
        assert torch.equal(want, got), name
        bias = getattr(experts, f"{name}_bias")
        found_bias = getattr(found, f"{name}_bias")
        assert (bias is None) == (found_bias is None)
        if bias is not None:
            assert torch.equal(found_bias[0], bias[index])


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_slab_gives_back_the_expert(name: str, bias: bool) -> None:
    experts = make_experts(PACKS[name], bias=bias)
    layout = layout_of([experts])
    assert layout.num_slices > 1
    for index in (0, 1):
        assert_same(read_slab(slab_of(experts, index, layout), layout), experts, index)


# Random blocks overflow in a product; their bytes are compared above.
@pytest.mark.parametrize("name", [name for name in PACKS if name not in HALVES])
def test_slices_add_up_to_the_expert(name: str) -> None:
    """Each slice computed alone, as the kernels do: their sum is the expert's output."""
    experts = make_experts(PACKS[name])
    layout = layout_of([experts])
    slab = slab_of(experts, 1, layout)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1)) / 16
    act = Activation("swiglu_clamped")
    one = torch.ones(3, 1)
    want = moe(x, torch.ones(3, 1, dtype=torch.int32), one, experts, act)
    pieces = [slice_weights(slab, layout, s) for s in range(layout.num_slices)]
    zero = torch.zeros(3, 1, dtype=torch.int32)
    total = sum((moe(x, zero, one, piece, act) for piece in pieces), torch.zeros_like(want))
    # float32 sums in another order
    assert (total - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", ["mxfp4", "bf16", "q8_0", "nvfp4", "fp8_e4m3"])
def test_interleaved_rows_of_one_tensor(name: str) -> None:
    experts = make_experts(PACKS[name], interleaved=True)
    layout = layout_of([experts])
    assert_same(read_slab(slab_of(experts, 0, layout), layout), experts, 0)


def test_b007_both_mxfp4_containers_make_the_same_slab() -> None:
    a, b = make_experts(quantize_mxfp4), make_experts(quantize_mxfp4_gguf)
    layout = layout_of([a])
    assert layout == layout_of([b])
    assert torch.equal(slab_of(a, 1, layout), slab_of(b, 1, layout))


def test_mxfp4_bytes_by_hand() -> None:
    """Two slices of 32 columns: where the bytes of gate row 33 and down column 40 lie."""
    experts = make_experts(quantize_mxfp4, hidden=64, intermediate=64)
    layout = slab_layout("mxfp4", 64, 64, has_bias=True, num_slices=2)
    slab = slab_of(experts, 0, layout)
    # slice: 64 rows of 32 bytes, then 64 rows of 2 scales, then 64 rows of 16 bytes, 64 of 1
    gate, up, down = (getattr(experts, n)[0] for n in ("gate", "up", "down"))
    assert torch.equal(slab[1, 64:96], gate.parts["codes"][33])  # row 2 of slice 1
    assert torch.equal(slab[1, 96:128], up.parts["codes"][33])
    assert torch.equal(slab[1, 2048 + 6 : 2048 + 8], up.parts["scales"][33])
    start = 2048 + 128
    assert torch.equal(slab[1, start + 16 : start + 32], down.parts["codes"][1, 16:])
    assert slab[1, start + 1024 + 5] == down.parts["scales"][5, 1]
    bias = slab[1, start + 1024 + 64 :][:256].view(torch.float32)
    assert bias[2] == experts.gate_bias[0, 33]
    assert bias[3] == experts.up_bias[0, 33]
    assert not slab[1, start + 1024 + 64 + 256 :][:256].any()  # only slice 0 adds the down bias


def test_b022_gate_and_up_keep_factors_of_their_own() -> None:
    experts = make_experts(quantize_nvfp4, bias=False)
    gate = experts.gate[0].parts | {"global_scale": torch.tensor(1.0)}
    up = experts.up[0].parts | {"global_scale": torch.tensor(0.5)}
    shape = (INTERMEDIATE, HIDDEN)
    changed = ExpertWeights(
        [PackedTensor("nvfp4", shape, gate)], [PackedTensor("nvfp4", shape, up)], experts.down
    )
    layout = layout_of([ExpertWeights(changed.gate, changed.up, experts.down[:1])])
    piece = slice_weights(slab_of(changed, 0, layout), layout, 1)
    assert float(piece.gate[0].parts["global_scale"]) == 1.0
    assert float(piece.up[0].parts["global_scale"]) == 0.5


def test_fp8_blocks_are_never_cut() -> None:
    # 768 = 6 blocks of 128: of the divisors of 6 the nearest to 5 is 6
    layout = layout_of([make_experts(PACKS["fp8_e4m3 in blocks"])])
    assert (layout.num_slices, layout.width) == (6, 128)
    factors = layout.part("gate_up_factors")
    assert (factors.rows, factors.row_nbytes) == (2, 8)  # a band of gate and one of up
    # 192 columns end in half a block: one slice, and the edge's factor counts
    experts = make_experts(PACKS["fp8_e4m3 in blocks"], hidden=160, intermediate=192)
    layout = layout_of([experts])
    assert layout.num_slices == 1
    assert_same(read_slab(slab_of(experts, 1, layout), layout), experts, 1)


def test_gate_in_blocks_and_up_with_one_factor() -> None:
    a, b = make_experts(PACKS["fp8_e4m3 in blocks"]), make_experts(PACKS["fp8_e4m3"])
    experts = ExpertWeights(a.gate, b.up, b.down)
    layout = layout_of([experts])
    assert layout.block_factors
    assert_same(read_slab(slab_of(experts, 0, layout), layout), experts, 0)


def test_down_in_another_block_type() -> None:
    """As llama.cpp's Q4_K_M files are: q4_k with down in q6_k."""
    experts = make_experts(random_blocks("q4_k"), random_blocks("q6_k"))
    layout = layout_of([experts])
    assert (layout.format, layout.down_format, layout.num_slices) == ("q4_k", "q6_k", 3)
    assert_same(read_slab(slab_of(experts, 0, layout), layout), experts, 0)


def test_layers_in_different_formats_are_refused() -> None:
    layers = [make_experts(PACKS[name]) for name in ("q4_k", "q6_k")]
    with pytest.raises(UnsupportedModelError, match=r"q4_k gate and up.*q6_k gate"):
        layout_of(layers)


def test_an_expert_that_is_not_the_layouts() -> None:
    layout = slab_layout("bf16", HIDDEN, INTERMEDIATE, has_bias=True)
    slab = torch.empty((layout.num_slices, layout.slice_nbytes), dtype=torch.uint8)
    with pytest.raises(InternalError, match=r"mxfp4 \[768, 256\], the slab's bf16"):
        write_slab(make_experts(quantize_mxfp4), 0, layout, slab)
    with pytest.raises(InternalError, match="a slab is uint8"):
        write_slab(make_experts(PACKS["bf16"]), 0, layout, slab[:1])
