"""The integer numerics of AVX-512 VNNI and BF16: two terms per activation, never one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.ops.records import Activation, ExpertWeights
from tests.fixtures.cpu_cases import isas, needs_native, random_f32
from tests.fixtures.cpu_oracle import activation, error, random_packed, values_of

pytestmark = needs_native

if isas():
    from headrace.ops.cpu import control
    from headrace.ops.cpu import linear as ops

# x = s (256 h + l) with s = peak / 32512: rounding errs by s / sqrt(12) = 8.9e-6 of the block's peak, and
# a normal block's peak is about 2.5 standard deviations: 2.3e-5 of a sum, 1e-4 at four sigma. One int8
# term would err by 6e-3. Two bfloat16 terms: 2^-17 each.
TOLERANCE = 1e-4
FORMATS = ("mxfp4", "mxfp4_gguf", "q4_0", "q4_1", "q8_0", "bf16")


@pytest.fixture(autouse=True)
def vnni():
    try:
        control.select_isa("avx512_vnni")
    except ConfigError as problem:
        pytest.skip(problem.message)
    yield
    control.select_isa("")


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("cols", [32, 96, 576, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_products_match_float64(name: str, cols: int, tokens: int):
    rng = np.random.default_rng(cols + tokens)
    w, x = random_packed(name, 37, cols, rng), random_f32(rng, tokens, cols)
    expected = x.double().numpy() @ values_of(w).astype(np.float64).T
    assert error(ops.linear(x, w), expected) < TOLERANCE


def test_bf16_takes_any_number_of_columns():
    rng = np.random.default_rng(1)
    w, x = random_packed("bf16", 5, 77, rng), random_f32(rng, 2, 77)
    expected = x.double().numpy() @ values_of(w).astype(np.float64).T
    assert error(ops.linear(x, w), expected) < TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_alone_equals_the_row_among_others(name: str):
    rng = np.random.default_rng(2)
    w, x = random_packed(name, 64, 256, rng), random_f32(rng, 64, 256)
    whole = ops.linear(x, w)
    for row in (0, 17, 63):
        assert torch.equal(ops.linear(x[row : row + 1], w)[0], whole[row])


@pytest.mark.parametrize("tokens", [2, 40])
def test_gated_product_and_experts_match_float64(tokens: int):
    rng = np.random.default_rng(3)
    gate, up = random_packed("mxfp4", 64, 128, rng), random_packed("mxfp4", 64, 128, rng)
    down, x = random_packed("mxfp4", 128, 64, rng), random_f32(rng, tokens, 128)
    x64 = x.double().numpy()
    g, u, d = (values_of(w).astype(np.float64) for w in (gate, up, down))
    with np.errstate(over="ignore"):  # exp(-gate) of the oracle; 1 / inf is the right 0
        hidden = activation(x64 @ g.T, x64 @ u.T, "silu")
    assert error(ops.gated_linear(x, gate, up, Activation()), hidden) < 4 * TOLERANCE
    ids = torch.zeros((tokens, 1), dtype=torch.int32)
    out = ops.moe(
        x, ids, torch.ones((tokens, 1)), ExpertWeights([gate], [up], [down]), Activation()
    )
    assert error(out, hidden @ d.T) < 8 * TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
def test_nan_activations_are_not_hidden(name: str):
    rng = np.random.default_rng(4)
    w, x = random_packed(name, 4, 64, rng), random_f32(rng, 1, 64)
    x[0, 40] = float("nan")
    assert bool(torch.isnan(ops.linear(x, w)).all())
