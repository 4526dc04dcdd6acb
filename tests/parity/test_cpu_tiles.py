"""Products of many rows on matrix tiles: two bfloat16 terms for each activation, float32 sums."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation, ExpertWeights
from tests.fixtures.cpu_cases import isas, needs_native, random_f32
from tests.fixtures.cpu_oracle import ALL_FORMATS, activation, error, random_packed, values_of
from tests.fixtures.expert_slabs import CLAMPED, make_case, routed, run
from tests.fixtures.matrix_tiles import selected, usable

pytestmark = needs_native

if isas():
    from headrace.ops.cpu import control
    from headrace.ops.cpu import linear as ops

EXACT = ("bf16", "mxfp4", "mxfp4_gguf")  # formats that bfloat16 holds
# A value in two terms of eight bits errs by 2^-17 of itself at most, and the product of the smaller terms is
# left out; the errors of a sum have random signs, like its parts.
TYPICAL = 1.5e-5


@pytest.fixture(params=usable())
def tiles(request: pytest.FixtureRequest):
    yield from selected(request.param)


def check(found: torch.Tensor, x: torch.Tensor, w: PackedTensor) -> None:
    """Within the bound of every single sum: what terms (2^-17 each, and 2^-16) and float32 leave out."""
    rows, weights = x.double().numpy(), values_of(w).astype(np.float64)
    expected, size = rows @ weights.T, np.abs(rows) @ np.abs(weights).T
    left_out = (1 if w.format in EXACT else 4) * 2.0**-17 + 3 * w.shape[1] * 2.0**-24
    assert (np.abs(found.numpy() - expected) <= left_out * size).all()
    assert error(found, expected) < TYPICAL


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_products_match_float64(tiles: str, name: str):
    for rows, tokens in ((5, 65), (117, 97), (64, 128)):
        rng = np.random.default_rng(tokens)
        w, x = random_packed(name, rows, 768, rng), random_f32(rng, tokens, 768)
        check(ops.linear(x, w), x, w)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_gguf"])
def test_all_scales_and_codes_of_mxfp4(tiles: str, name: str):
    """One activation of 1 at a time shows the weights as they are; below 2^-126 they count as zero."""
    codes = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 8))  # each code in both nibbles
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, 1)
    blocks = np.concatenate([scales[..., None], codes.reshape(256, 8, 16)], 2).reshape(256, -1)
    parts = {"blocks": blocks} if name == "mxfp4_gguf" else {"codes": codes, "scales": scales}
    w = PackedTensor(name, (256, 256), {k: torch.from_numpy(v.copy()) for k, v in parts.items()})
    with np.errstate(over="ignore"):
        expected = values_of(w)
    if name == "mxfp4_gguf":  # gguf gives the NaN exponent 255 a number; ours follows the standard
        expected[255] = np.nan
    expected[np.abs(expected) < 2.0**-126] = 0
    finite = np.isfinite(expected).all(1)
    found = ops.tiled_linear(torch.eye(256), w).numpy().T
    assert np.array_equal(found[finite], expected[finite])
    assert not np.isfinite(found[~finite]).any()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("cols", [1, 16, 33, 48, 77, 272])
def test_columns_that_fill_no_tile(tiles: str, name: str, cols: int):
    if name == "nvfp4" and cols % 16:
        pytest.skip("NVFP4 has blocks of 16")
    rng = np.random.default_rng(cols)
    w, x = random_packed(name, 19, cols, rng), random_f32(rng, 81, cols)
    if name == "nvfp4" and cols == 16:  # too few products for an average
        expected = x.double().numpy() @ values_of(w).astype(np.float64).T
        assert error(ops.linear(x, w), expected) < 4 * TYPICAL
        return
    check(ops.linear(x, w), x, w)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 32, 33, 64, 100])
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 79])
def test_integers_come_out_exactly(tiles: str, rows: int, tokens: int):
    """Integers below 2^15 fill both terms, and all sums stay below 2^24: float32 loses nothing."""
    rng = np.random.default_rng(rows)
    w = rng.integers(-3, 4, (rows, 96))
    x = rng.integers(-(2**15) + 1, 2**15, (tokens, 96))
    packed = PackedTensor("bf16", w.shape, {"data": torch.from_numpy(w).to(torch.bfloat16)})
    found = ops.tiled_linear(torch.from_numpy(x).float(), packed)
    assert np.array_equal(found.numpy(), (x @ w.T).astype(np.float32))


@pytest.mark.parametrize("name", ["mxfp4", "q8_0", "q4_k"])
def test_bias_and_residual_and_group(tiles: str, name: str):
    rng = np.random.default_rng(7)
    w, other = random_packed(name, 72, 512, rng), random_packed("bf16", 30, 512, rng)
    x, bias, residual = random_f32(rng, 90, 512), random_f32(rng, 72), random_f32(rng, 90, 72)
    plain = ops.linear(x, w)
    assert torch.equal(ops.linear(x, w, bias, residual), plain + bias + residual)
    first, second = ops.linear_group(x, (other, w), (None, bias))
    assert torch.equal(first, ops.linear(x, other))
    assert torch.equal(second, plain + bias)


@pytest.mark.parametrize("name", ["mxfp4", "q8_0", "q4_k", "f32"])
def test_rows_of_a_call_do_not_know_each_other(tiles: str, name: str):
    rng = np.random.default_rng(2)
    w, x = random_packed(name, 70, 256, rng), random_f32(rng, 200, 256)
    whole, gated = ops.linear(x, w), ops.gated_linear(x, w, w, Activation())
    for some in (slice(0, 65), slice(7, 90), slice(100, 200)):
        assert torch.equal(ops.linear(x[some], w), whole[some])
        assert torch.equal(ops.gated_linear(x[some], w, w, Activation()), gated[some])
    x[3] = float("nan")
    spoilt = ops.linear(x, w)
    assert bool(torch.isnan(spoilt[3]).all())
    assert torch.equal(spoilt[4:], whole[4:])
    assert torch.equal(spoilt[:3], whole[:3])


def test_calls_of_up_to_64_rows_keep_the_bits_of_all_instruction_sets(tiles: str):
    rng = np.random.default_rng(5)
    w, x = random_packed("q8_0", 40, 512, rng), random_f32(rng, 65, 512)
    few, many = ops.linear(x[:64], w), ops.linear(x, w)
    assert torch.equal(many, ops.tiled_linear(x, w))
    assert not torch.equal(many[:64], few)
    control.select_isa("scalar")
    assert torch.equal(ops.linear(x[:64], w), few)


def test_infinite_activations_are_not_hidden(tiles: str):
    rng = np.random.default_rng(6)
    w = PackedTensor("bf16", (20, 64), {"data": torch.ones((20, 64), dtype=torch.bfloat16)})
    x = random_f32(rng, 70, 64)
    x[10, 40] = float("inf")
    found = ops.linear(x, w)
    assert bool((found[10] == float("inf")).all())
    assert bool(torch.isfinite(found[11:]).all())


def test_gated_product_matches_float64(tiles: str):
    rng = np.random.default_rng(3)
    gate, up = random_packed("q4_0", 90, 128, rng), random_packed("mxfp4", 90, 128, rng)
    x = random_f32(rng, 130, 128)
    rows = x.double().numpy()
    g, u = (rows @ values_of(w).astype(np.float64).T for w in (gate, up))
    with np.errstate(over="ignore"):  # exp(-gate) of the oracle; 1 / inf is the right 0
        expected = activation(g, u, "silu")
    assert error(ops.gated_linear(x, gate, up, Activation()), expected) < 4 * TYPICAL


def test_experts_match_float64(tiles: str):
    """Experts with dozens of rows and with a few, one with none; and rows with no expert at all (-1)."""
    rng = np.random.default_rng(4)

    def some(name: str, rows: int, cols: int) -> list[PackedTensor]:
        return [random_packed(name, rows, cols, rng) for _ in range(5)]

    bias = random_f32(rng, 5, 96)
    experts = ExpertWeights(
        some("bf16", 72, 96), some("f16", 72, 96), some("f32", 96, 72), down_bias=bias
    )
    ids = torch.from_numpy(rng.integers(0, 3, (130, 2)).astype(np.int32))
    ids[:, 1] = (ids[:, 0] + 1) % 3
    ids[::9] = torch.tensor([4, -1], dtype=torch.int32)
    x, weights = random_f32(rng, 130, 96), random_f32(rng, 130, 2)
    rows, expected = x.double().numpy(), np.zeros((130, 96))
    for e in range(5):
        g, u, d = (
            values_of(m[e]).astype(np.float64) for m in (experts.gate, experts.up, experts.down)
        )
        y = activation(rows @ g.T, rows @ u.T, "silu") @ d.T + bias[e].double().numpy()
        expected += y * ((ids == e) * weights.double()).sum(1).numpy()[:, None]
    found = ops.moe(x, ids, weights, experts, Activation())
    assert error(found, expected) < 8 * TYPICAL
    for some_rows in (slice(10, 90), slice(0, 130, 2), slice(64, 130)):
        part = [t[some_rows].contiguous() for t in (x, ids, weights)]
        some_found = ops.moe(part[0], part[1], part[2], experts, Activation())
        # The last expert has too few rows for tiles there.
        rest = part[1][:, 0] != 4
        assert torch.equal(some_found[rest], found[some_rows][rest])
        assert error(some_found, expected[some_rows]) < 8 * TYPICAL


@pytest.mark.parametrize("name", ["mxfp4", "bf16", "q8_0", "q4_k", "fp8_e4m3", "nvfp4"])
def test_requests_of_many_tokens_match_float64(tiles: str, name: str):
    """Some experts with few pairs, which go without tiles, and some with dozens."""
    size = 512 if name == "q4_k" else 288 if name == "nvfp4" else 256
    for tokens, slices in ((17, 1), (37, 2 if size == 256 else 1), (130, 1)):
        case = make_case(name, hidden=size, inner=size, slices=slices, bias=True, act=CLAMPED)
        x, ids, weights, work = routed(case, tokens, 1, seed=tokens)
        found = run(case, x, work)
        # Terms of the inputs and of what lies between; experts of one or two pairs have 15-bit terms.
        limit = 2e-4 if name in ("mxfp4", "q4_k") else 8 * TYPICAL
        assert error(found, case.expected(x, ids, weights)) < limit
        assert torch.equal(run(case, x, work, 1), found)
        assert torch.equal(run(case, x, work, 5), found)


def test_amx_is_named_with_the_reason_why_not():
    if "avx512_amx" in isas():
        pytest.skip("this CPU has AMX")
    with pytest.raises(ConfigError, match=r"avx512_amx.*(AMX|x86|registers)"):
        control.select_isa("avx512_amx")
    assert control.why_no_tiles()


@pytest.mark.skipif("avx512_amx" not in isas(), reason="needs a CPU with AMX")
def test_a_refusal_by_the_kernel_leaves_avx512():
    """The kernel refuses tile registers while a signal stack is too small to save them."""
    code = (
        "import ctypes\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('sp', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]\n"
        "memory = ctypes.create_string_buffer(8192)\n"
        "stack = Stack(ctypes.addressof(memory), 0, 8192)\n"
        "assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0\n"
        "from headrace.ops.cpu import control\n"
        "print(control.isa(), control.why_no_tiles(), sep='|')"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("HEADRACE_ISA", "PYTHONFAULTHANDLER")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    isa, _, reason = done.stdout.strip().partition("|")
    assert isa == "avx512"
    assert "arch_prctl" in reason
