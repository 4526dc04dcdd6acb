"""Products with packed weights: exact expansion, and float64 sums, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError, InternalError, UnsupportedModelError
from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation, ExpertWeights
from tests.fixtures.cpu_cases import isas, needs_native, random_f32
from tests.fixtures.cpu_oracle import (
    ALL_FORMATS,
    E4M3,
    E8M0,
    GGUF_FORMATS,
    activation,
    error,
    random_packed,
    values_of,
)

pytestmark = needs_native

if isas():
    from headrace.ops.cpu import control
    from headrace.ops.cpu import linear as ops
    from headrace.ops.cpu.matrix import handle

# A sum of K <= 1,024 products in 16 float32 lanes: 64 + 4 roundings of 2^-24, each relative to a
# partial sum that random signs keep near the result's own size.
TOLERANCE = 5e-6


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest):
    control.select_isa(request.param)
    yield request.param
    control.select_isa("")


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_expansion_is_exact(isa: str, name: str):
    w = random_packed(name, 9, 512, np.random.default_rng(3))
    assert np.array_equal(ops.dequantize(w).numpy(), values_of(w))


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_expansion_of_raw_bytes_is_exact(isa: str, name: str):
    """Any bytes at all, NaN and infinite scales included."""
    w = random_packed(name, 64, 256, np.random.default_rng(4))
    raw = np.random.default_rng(5).integers(0, 256, w.parts["blocks"].shape, dtype=np.uint8)
    if name == "mxfp4_gguf":  # gguf gives the NaN exponent 255 a number; ours follows the standard
        raw[:, ::17][raw[:, ::17] == 255] = 254
    w = PackedTensor(name, w.shape, {"blocks": torch.from_numpy(raw)})
    with np.errstate(all="ignore"):
        expected = values_of(w)
    assert np.array_equal(ops.dequantize(w).numpy(), expected, equal_nan=True)


def test_all_e8m0_scales(isa: str):
    codes = torch.full((256, 16), 0x72, dtype=torch.uint8)  # 1, 6, 1, 6, ...
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    found = ops.dequantize(PackedTensor("mxfp4", (256, 32), {"codes": codes, "scales": scales}))
    with np.errstate(over="ignore"):
        assert np.array_equal(found[:, 0].numpy(), E8M0.astype(np.float32), equal_nan=True)
        assert np.array_equal(found[:, 1].numpy(), (6 * E8M0).astype(np.float32), equal_nan=True)
    assert float(found[0, 0]) == 2.0**-127
    assert torch.isnan(found[255]).all()
    blocks = torch.cat([scales, codes], 1)
    inline = ops.dequantize(PackedTensor("mxfp4_gguf", (256, 32), {"blocks": blocks}))
    assert np.array_equal(
        inline[:, 0].numpy(), found[:, 0].numpy(), equal_nan=True
    )  # low nibbles: 1
    assert np.array_equal(inline[:, 16].numpy(), found[:, 1].numpy(), equal_nan=True)  # high: 6


def test_all_e4m3_codes_and_scales(isa: str):
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    w = PackedTensor("fp8_e4m3", (1, 256), {"codes": codes, "scale": torch.tensor(0.75)})
    expected = E4M3.astype(np.float32) * np.float32(0.75)
    assert np.array_equal(ops.dequantize(w)[0].numpy(), expected, equal_nan=True)
    parts = {
        "codes": torch.full((256, 8), 0x33, dtype=torch.uint8),  # 1.5
        "scales": codes.reshape(256, 1),
        "global_scale": torch.tensor(3.0),
    }
    found = ops.dequantize(PackedTensor("nvfp4", (256, 16), parts))
    assert np.array_equal(found[:, 5].numpy(), (4.5 * E4M3).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("name", ALL_FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_linear(isa: str, name: str, tokens: int):
    rng = np.random.default_rng(tokens)
    w = random_packed(name, 37, 768, rng)
    x = random_f32(rng, tokens, 768)
    bias, residual = random_f32(rng, 37), random_f32(rng, tokens, 37)
    product = x.double().numpy() @ values_of(w).astype(np.float64).T
    assert error(ops.linear(x, w), product) < TOLERANCE
    whole = product + bias.double().numpy() + residual.double().numpy()
    assert error(ops.linear(x, w, bias, residual), whole) < TOLERANCE


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("cols", [1, 15, 16, 33, 48, 100, 272])
def test_columns_that_fill_no_register(isa: str, name: str, cols: int):
    if name == "nvfp4" and cols % 16:
        pytest.skip("NVFP4 has blocks of 16")
    rng = np.random.default_rng(cols)
    w = random_packed(name, 11, cols, rng)
    assert np.array_equal(ops.dequantize(w).numpy(), values_of(w))
    for tokens in (1, 5, 17):
        x = random_f32(rng, tokens, cols)
        expected = x.double().numpy() @ values_of(w).astype(np.float64).T
        assert error(ops.linear(x, w), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["q4_1", "mxfp4", "bf16"])
def test_strided_rows(isa: str, name: str):
    """Gate and up interleaved: every second row is a matrix of its own."""
    rng = np.random.default_rng(8)
    w = random_packed(name, 24, 96, rng)
    odd = PackedTensor(name, (12, 96), {k: t[1::2] for k, t in w.parts.items()})
    x = random_f32(rng, 6, 96)
    assert torch.equal(ops.linear(x, odd), ops.linear(x, w)[:, 1::2])


def test_fp8_blocks_of_128(isa: str):
    rng = np.random.default_rng(9)
    w = random_packed("fp8_e4m3", 300, 400, rng)
    assert w.parts["scale"].shape == (3, 4)
    assert np.array_equal(ops.dequantize(w).numpy(), values_of(w))


def test_linear_group_is_linear(isa: str):
    rng = np.random.default_rng(10)
    ws = [random_packed(n, rows, 64, rng) for n, rows in (("q8_0", 33), ("q4_1", 8), ("bf16", 5))]
    bias = random_f32(rng, 8)
    for tokens in (1, 7, 30):
        x = random_f32(rng, tokens, 64)
        found = ops.linear_group(x, ws, (None, bias, None))
        for y, w, b in zip(found, ws, (None, bias, None), strict=True):
            assert torch.equal(y, ops.linear(x, w, b))


@pytest.mark.parametrize("kind", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("tokens", [1, 6, 30])
def test_gated_linear(isa: str, kind: str, tokens: int):
    rng = np.random.default_rng(11)
    gate, up = random_packed("q4_0", 45, 96, rng), random_packed("q6_k", 45, 256, rng)
    up = PackedTensor("f32", (45, 96), {"data": ops.dequantize(up)[:, :96]})
    x = 4 * random_f32(rng, tokens, 96)
    wide = x.double().numpy()
    expected = activation(
        wide @ values_of(gate).T.astype(float), wide @ values_of(up).T.astype(float), kind
    )
    assert error(ops.gated_linear(x, gate, up, Activation(kind)), expected) < TOLERANCE


def test_activation_at_the_extremes(isa: str):
    one = PackedTensor("f32", (1, 1), {"data": torch.ones(1, 1)})
    x = torch.tensor([[-200.0], [-88.0], [0.0], [88.0], [200.0]])
    found = ops.gated_linear(x, one, one, Activation("silu"))[:, 0]
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 88.0**2, 200.0**2], abs=1e-30)
    clamped = ops.gated_linear(x, one, one, Activation("swiglu_clamped"))[:, 0]
    assert clamped.tolist() == pytest.approx([0.0, 0.0, 0.0, 56.0, 56.0], rel=1e-4)
    assert torch.isnan(ops.gated_linear(x * float("nan"), one, one, Activation("silu"))).all()
    assert torch.isnan(
        ops.gated_linear(x * float("nan"), one, one, Activation("swiglu_clamped"))
    ).all()


def test_embed(isa: str):
    rng = np.random.default_rng(12)
    w = random_packed("q8_0", 50, 96, rng)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(ops.embed(w, ids), ops.dequantize(w)[ids])
    odd = random_packed("bf16", 50, 37, rng)
    assert torch.equal(ops.embed(odd, ids), ops.dequantize(odd)[ids])
    for bad in (-1, 50):
        with pytest.raises(InternalError, match=str(bad)):
            ops.embed(w, torch.tensor([1, bad]))


def expert_weights(rng: np.random.Generator, count=6, inner=64, hidden=96) -> ExpertWeights:
    return ExpertWeights(
        gate=[random_packed("q4_1", inner, hidden, rng) for _ in range(count)],
        up=[random_packed("mxfp4", inner, hidden, rng) for _ in range(count)],
        down=[random_packed("bf16", hidden, inner, rng) for _ in range(count)],
        gate_bias=random_f32(rng, count, inner),
        up_bias=random_f32(rng, count, inner),
        down_bias=random_f32(rng, count, hidden),
    )


def moe_oracle(x, ids, weights, e: ExpertWeights, kind: str) -> np.ndarray:
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            i = int(ids[t, s])
            if i < 0:
                continue
            row = x[t].double().numpy()
            gate = values_of(e.gate[i]).astype(float) @ row + e.gate_bias[i].double().numpy()
            up = values_of(e.up[i]).astype(float) @ row + e.up_bias[i].double().numpy()
            down = values_of(e.down[i]).astype(float) @ activation(gate, up, kind)
            out[t] += float(weights[t, s]) * (down + e.down_bias[i].double().numpy())
    return out


@pytest.mark.parametrize("kind", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_b027_moe_with_empty_slots(isa: str, kind: str, tokens: int):
    rng = np.random.default_rng(tokens)
    experts = expert_weights(rng)
    ids = torch.from_numpy(rng.integers(-1, 6, (tokens, 3)).astype(np.int32))
    x, weights = random_f32(rng, tokens, 96), torch.from_numpy(rng.random((tokens, 3), np.float32))
    found = ops.moe(x, ids, weights, experts, Activation(kind))
    assert error(found, moe_oracle(x, ids, weights, experts, kind)) < TOLERANCE
    none = ops.moe(x, torch.full_like(ids, -1), weights, experts, Activation(kind))
    assert torch.equal(none, torch.zeros_like(x))


def test_moe_reads_only_touched_experts(isa: str):
    rng = np.random.default_rng(13)
    whole = expert_weights(rng)
    poisoned = PackedTensor(
        "bf16", (96, 64), {"data": torch.full((96, 64), float("nan")).bfloat16()}
    )
    experts = ExpertWeights(whole.gate, whole.up, [*whole.down[:5], poisoned])
    x, weights = random_f32(rng, 4, 96), torch.ones(4, 2)
    ids = torch.tensor([[0, 1], [1, 2], [4, 0], [3, 3]], dtype=torch.int32)
    assert torch.isfinite(ops.moe(x, ids, weights, experts, Activation())).all()


@pytest.mark.parametrize("bad", [-2, 6])
def test_moe_refuses_ids_out_of_range(bad: int):
    rng = np.random.default_rng(14)
    ids = torch.tensor([[0, bad]], dtype=torch.int32)
    with pytest.raises(InternalError, match=str(bad)):
        ops.moe(random_f32(rng, 1, 96), ids, torch.ones(1, 2), expert_weights(rng), Activation())


def test_wrong_parts_are_refused():
    with pytest.raises(UnsupportedModelError, match="iq1_s"):
        handle(PackedTensor("iq1_s", (1, 256), {}))
    short = {"blocks": torch.zeros(4, 17, dtype=torch.uint8)}
    with pytest.raises(InternalError, match="blocks"):
        handle(PackedTensor("q4_0", (4, 32), short))
    with pytest.raises(InternalError, match="multiple of 32"):
        handle(PackedTensor("q4_0", (4, 33), {"blocks": torch.zeros(4, 18, dtype=torch.uint8)}))
    w = PackedTensor("f32", (4, 8), {"data": torch.zeros(4, 8)})
    with pytest.raises(InternalError, match="float32"):
        ops.linear(torch.zeros(1, 8, dtype=torch.float64), w)
    with pytest.raises(InternalError, match="bias"):
        ops.linear(torch.zeros(1, 8), w, torch.zeros(3))


def test_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(control.ISA_VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="sse9"):
        control.available()
    with pytest.raises(ConfigError, match="threads"):
        control.set_num_threads(0)
