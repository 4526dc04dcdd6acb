"""Each CPU kernel beside its PyTorch twin, through the registry's own records and tolerances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError
from headrace.ops import cpu, reference
from headrace.ops.records import (
    Activation,
    AttentionBlock,
    DenseBlock,
    ExpertWeights,
    RopeTable,
)
from headrace.ops.registry import OP_NAMES, OPTIONAL, resolve
from tests.fixtures.cpu_cases import PagedCase, needs_native, random_f32
from tests.fixtures.cpu_oracle import ALL_FORMATS, random_packed

pytestmark = needs_native
TWINS = {op.name: op.function for op in reference.OPS}
OURS = {op.name: op for op in cpu.OPS}


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    limit = OURS[name].tolerance * float(expected.abs().max())
    assert float((found - expected).abs().max()) <= limit


def both(name: str, *args: object):
    return OURS[name].function(*args), TWINS[name](*args)


def test_every_operation_is_here():
    assert tuple(OURS) == tuple(name for name in OP_NAMES if name not in OPTIONAL)
    found = resolve(("cpu", "reference")).describe()
    assert {backend for name, backend in found.items() if name not in OPTIONAL} == {"cpu"}


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_products(name: str):
    rng = np.random.default_rng(1)
    w, x, bias = random_packed(name, 40, 512, rng), random_f32(rng, 6, 512), random_f32(rng, 40)
    same("embed", *both("embed", w, torch.tensor([0, 39, 7])))
    same("linear", *both("linear", x, w, bias, random_f32(rng, 6, 40)))
    for found, expected in zip(*both("linear_group", x, (w, w), (bias, None)), strict=True):
        same("linear_group", found, expected)
    for act in (Activation(), Activation("swiglu_clamped")):
        same("gated_linear", *both("gated_linear", 0.1 * x, w, w, act))


def test_rows():
    rng = np.random.default_rng(2)
    x = random_f32(rng, 5, 64)
    same("rmsnorm", *both("rmsnorm", x, random_f32(rng, 64), 1e-5))
    for interleaved in (False, True):
        table = RopeTable(random_f32(rng, 9, 16), random_f32(rng, 9, 16), interleaved)
        q, positions = random_f32(rng, 5, 2, 40), torch.arange(5)
        same(
            "rope",
            *(f(q.clone(), table, positions) for f in (OURS["rope"].function, TWINS["rope"])),
        )
    x[2, 5] = float("nan")
    for scoring in ("softmax_topk", "topk_softmax"):
        for normalize in (False, True):
            found, expected = both("router_topk", x, 4, scoring, normalize)
            assert torch.equal(found[0], expected[0])
            same("router_topk", found[1], expected[1])


def test_moe():
    rng = np.random.default_rng(3)
    experts = ExpertWeights(
        [random_packed("q4_0", 64, 96, rng) for _ in range(4)],
        [random_packed("mxfp4_gguf", 64, 96, rng) for _ in range(4)],
        [random_packed("q8_0", 96, 64, rng) for _ in range(4)],
        *(random_f32(rng, 4, n) for n in (64, 64, 96)),
    )
    ids = torch.from_numpy(rng.integers(-1, 4, (20, 2)).astype(np.int32))
    for act in (Activation(), Activation("swiglu_clamped")):
        args = (random_f32(rng, 20, 96), ids, random_f32(rng, 20, 2), experts, act)
        same("moe", *both("moe", *args))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(window: int | None, dtype: torch.dtype):
    rng = np.random.default_rng(4)
    case = PagedCase(rng, [90, 33], 2, 32, 16, dtype)
    sinks = random_f32(rng, 4)
    for name, spans in (
        ("attention_prefill", [(0, 30, 90), (1, 0, 33)]),
        ("attention_decode", [(0, 89, 90), (1, 32, 33)]),
    ):
        batch = case.batch(spans)
        q = random_f32(rng, batch.positions.numel(), 4, 32)
        for s in (None, sinks):
            same(name, *both(name, q, case.cache, batch, 0.2, window, s))
    k, v, slots = random_f32(rng, 3, 2, 32), random_f32(rng, 3, 2, 32), torch.tensor([1, 17, 40])
    caches = [PagedCase(np.random.default_rng(5), [50], 2, 32, 16, dtype).cache for _ in range(2)]
    OURS["kv_append"].function(k, v, caches[0], slots)
    TWINS["kv_append"](k, v, caches[1], slots)
    for a, b in zip((caches[0].keys, caches[0].values), (caches[1].keys, caches[1].values)):
        assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))


@pytest.mark.parametrize("qk_norm", [None, 32, "row"])
def test_attention_block(qk_norm: int | str | None):
    """Beside its twin, and bit for bit what the operations give one by one."""
    rng = np.random.default_rng(6)
    hidden, heads, kv_heads, dim, rows = 96, 4, 2, 32, 2
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim, hidden)
    cols = (hidden, hidden, hidden, heads * dim)
    weights = tuple(random_packed("q8_0", n, k, rng) for n, k in zip(sizes, cols, strict=True))
    biases = (random_f32(rng, sizes[0]), None, random_f32(rng, sizes[2]), None)
    widths = (None, None) if qk_norm is None else (sizes[:2] if qk_norm == "row" else (32, 32))
    q_norm, k_norm = (None if w is None else random_f32(rng, w) for w in widths)
    table = RopeTable(random_f32(rng, 99, 16), random_f32(rng, 99, 16), False)
    norm, sinks, x = random_f32(rng, hidden), random_f32(rng, heads), random_f32(rng, rows, hidden)
    block = AttentionBlock(
        norm, 1e-5, weights, biases, q_norm, k_norm, table, (heads, kv_heads, dim), 0.02, 20, sinks
    )
    cases = [PagedCase(np.random.default_rng(7), [90, 33], kv_heads, dim, 16) for _ in range(3)]
    batch = cases[0].batch([(0, 89, 90), (1, 32, 33)])
    found = OURS["attention_block"].function(x, block, cases[0].cache, batch)
    same("attention_block", found, TWINS["attention_block"](x, block, cases[1].cache, batch))

    one = {name: op.function for name, op in OURS.items()}
    q, k, v = one["linear_group"](one["rmsnorm"](x, norm, 1e-5), weights[:3], biases[:3])
    if q_norm is not None and k_norm is not None:
        q = one["rmsnorm"](q.view(-1, q_norm.numel()), q_norm, 1e-5)
        k = one["rmsnorm"](k.view(-1, k_norm.numel()), k_norm, 1e-5)
    q = one["rope"](q.view(rows, heads, dim), table, batch.positions)
    k = one["rope"](k.view(rows, kv_heads, dim), table, batch.positions)
    one["kv_append"](k, v.view(rows, kv_heads, dim), cases[2].cache, batch.slots)
    mixed = one["attention_decode"](q, cases[2].cache, batch, 0.02, 20, sinks)
    assert torch.equal(found, one["linear"](mixed.view(rows, -1), weights[3], None, x))
    for a, b in zip(
        (cases[0].cache.keys, cases[0].cache.values), (cases[2].cache.keys, cases[2].cache.values)
    ):
        assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))


def test_attention_block_names_what_is_out_of_range():
    rng = np.random.default_rng(8)
    weights = tuple(random_packed("q8_0", n, 32, rng) for n in (32, 32, 32, 32))
    table = RopeTable(random_f32(rng, 4, 16), random_f32(rng, 4, 16), False)
    block = AttentionBlock(
        random_f32(rng, 32),
        1e-5,
        weights,
        (None,) * 4,
        None,
        None,
        table,
        (1, 1, 32),
        1.0,
        None,
        None,
    )
    case = PagedCase(rng, [9], 1, 32, 16)
    with pytest.raises(InternalError, match="beyond the rotary table"):
        OURS["attention_block"].function(
            random_f32(rng, 1, 32), block, case.cache, case.batch([(0, 8, 9)])
        )


def test_dense_block():
    rng = np.random.default_rng(9)
    gate, up = random_packed("q4_1", 64, 96, rng), random_packed("q4_1", 64, 96, rng)
    down, norm, x = random_packed("q8_0", 96, 64, rng), random_f32(rng, 96), random_f32(rng, 3, 96)
    for act in (Activation(), Activation("swiglu_clamped")):
        block = DenseBlock(0.01 * norm, 1e-5, gate, up, down, act)
        found, expected = both("dense_block", x, block)
        same("dense_block", found, expected)
        normed = OURS["rmsnorm"].function(x, 0.01 * norm, 1e-5)
        inner = OURS["gated_linear"].function(normed, gate, up, act)
        assert torch.equal(found, OURS["linear"].function(inner, down, None, x))
