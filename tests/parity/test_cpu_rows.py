"""RMSNorm, RoPE, routing, the KV cache and attention against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError
from headrace.ops.records import LayerKV, RopeTable
from tests.fixtures.cpu_cases import PagedCase, isas, needs_native, random_f32
from tests.fixtures.cpu_oracle import attend, error

pytestmark = needs_native

if isas():
    from headrace.ops.cpu import _native, control
    from headrace.ops.cpu.attention import attention, kv_append
    from headrace.ops.cpu.rows import rmsnorm, rope, router_topk


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest):
    control.select_isa(request.param)
    yield request.param
    control.select_isa("")


def test_exponential_is_within_two_ulp(isa: str):
    x = torch.cat([torch.linspace(-104, 89, 400_001), torch.linspace(-1e-3, 1e-3, 1001)])
    found = torch.empty_like(x)
    _native.exponential(x.data_ptr(), x.numel(), found.data_ptr())
    exact = np.exp(x.double().numpy())
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = exact.astype(np.float32)
        ulp = np.spacing(nearest).astype(np.float64)
    finite = np.isfinite(nearest)
    off = np.abs(found.double().numpy() - exact)[finite] / ulp[finite]
    assert off.max() <= 2.0
    assert torch.isinf(found[torch.from_numpy(~finite)]).all()
    special = torch.tensor([0.0, -math.inf, math.inf, math.nan, -1e30])
    _native.exponential(special.data_ptr(), 5, special.data_ptr())
    assert special[:3].tolist() == [1.0, 0.0, math.inf]
    assert math.isnan(special[3])
    assert special[4] == 0.0


@pytest.mark.parametrize("size", [1, 16, 37, 576])
def test_rmsnorm(isa: str, size: int):
    rng = np.random.default_rng(size)
    x, weight = random_f32(rng, 5, size), random_f32(rng, size)
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    assert error(rmsnorm(x, weight, 1e-5), expected) < 1e-6
    heads = random_f32(rng, 3, 4, size)
    assert torch.equal(rmsnorm(heads, weight, 1e-5)[1, 2], rmsnorm(heads[1, 2:3], weight, 1e-5)[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool):
    rng = np.random.default_rng(1)
    angles = rng.normal(size=(40, 6))
    table = RopeTable(
        torch.from_numpy(np.cos(angles).astype(np.float32)),
        torch.from_numpy(np.sin(angles).astype(np.float32)),
        interleaved,
    )
    x = random_f32(rng, 3, 2, 16)
    positions = torch.tensor([0, 39, 7])
    expected = x.double().numpy()
    for t, p in enumerate(positions.tolist()):
        for i in range(6):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 6)
            rotated = (expected[t, :, a] + 1j * expected[t, :, b]) * np.exp(1j * angles[p, i])
            expected[t, :, a], expected[t, :, b] = rotated.real, rotated.imag
    found = rope(x, table, positions)
    assert found is x
    assert error(x, expected) < 1e-6
    with pytest.raises(InternalError, match="40"):
        rope(x, table, torch.tensor([0, 40, 1]))


def test_router_topk_orders_and_weights(isa: str):
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
    p = np.exp(logits.double().numpy())
    p /= p.sum(-1, keepdims=True)
    ids, weights = router_topk(logits, 2, "softmax_topk", False)
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert error(weights, np.take_along_axis(p, ids.long().numpy(), 1)) < 1e-6
    _, normal = router_topk(logits, 3, "softmax_topk", True)
    assert normal.sum(-1).tolist() == pytest.approx([1.0, 1.0])
    ids, weights = router_topk(logits, 3, "topk_softmax", False)
    assert ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    top = np.exp([3.0, 3.0, 1.0])
    assert weights[0].tolist() == pytest.approx((top / top.sum()).tolist(), rel=1e-6)
    ids, _ = router_topk(torch.tensor([[-math.inf, 1.0, -math.inf]]), 3, "topk_softmax", False)
    assert ids.tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("scoring", ["softmax_topk", "topk_softmax"])
def test_b026_nan_router_row_is_masked(isa: str, scoring: str):
    logits = random_f32(np.random.default_rng(2), 3, 8)
    alone = router_topk(logits[[0, 2]], 4, scoring, True)
    logits[1] = math.nan
    ids, weights = router_topk(logits, 4, scoring, True)
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert weights[1].tolist() == [0.0] * 4
    assert torch.equal(ids[[0, 2]], alone[0])
    assert torch.equal(weights[[0, 2]], alone[1])


def test_kv_append_rounds_bf16_to_nearest_even():
    rng = np.random.default_rng(3)
    k, v = random_f32(rng, 4, 2, 8), random_f32(rng, 4, 2, 8)
    k[0, 0, 0], v[0, 0, 0] = math.nan, math.inf
    for dtype in (torch.float32, torch.bfloat16):
        cache = LayerKV(
            torch.zeros(3, 2, 16, 8, dtype=dtype), torch.zeros(3, 2, 16, 8, dtype=dtype)
        )
        slots = torch.tensor([0, 47, 16, 21])
        kv_append(k, v, cache, slots)
        for t, slot in enumerate(slots.tolist()):
            where = (slot // 16, slice(None), slot % 16)
            assert torch.equal(cache.keys[where].nan_to_num(7), k[t].to(dtype).nan_to_num(7))
            assert torch.equal(cache.values[where], v[t].to(dtype))
        assert int((cache.values != 0).any(-1).sum()) == 8
        for bad in (-1, 48):
            with pytest.raises(InternalError, match=str(bad)):
                kv_append(k, v, cache, torch.tensor([0, 1, 2, bad]))


@dataclass(frozen=True)
class Case:
    contexts: list[int]
    spans: list[tuple[int, int, int]]
    heads: tuple[int, int, int]  # query heads, key heads, dimensions
    block: int
    window: int | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "gqa": Case([70, 300], [(0, 0, 70), (1, 250, 300)], (9, 3, 64), 16),
    "decode": Case(
        [70, 300, 5], [(0, 69, 70), (1, 299, 300), (2, 4, 5)], (9, 3, 64), 32, sinks=True
    ),
    "window_bf16": Case([333], [(0, 0, 333)], (4, 2, 40), 64, 50, True, torch.bfloat16),
    "split_decode": Case([900], [(0, 899, 900)], (4, 2, 128), 128),
    "split_window": Case([900], [(0, 899, 900)], (4, 1, 16), 16, 300, True),
    "small_head": Case([20, 9], [(0, 0, 20), (1, 3, 9)], (2, 2, 6), 16),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(isa: str, name: str):
    c = CASES[name]
    rng = np.random.default_rng(4)
    heads, kv_heads, head = c.heads
    case = PagedCase(rng, c.contexts, kv_heads, head, c.block, c.dtype)
    batch = case.batch(c.spans)
    q = random_f32(rng, batch.positions.numel(), heads, head)
    sinks = random_f32(rng, heads) if c.sinks else None
    found = attention(q, case.cache, batch, 0.2, c.window, sinks)
    wide, wide_sinks = q.double().numpy(), None if sinks is None else sinks.double().numpy()
    at = 0
    for s, start, end in c.spans:
        rows = slice(at, at + end - start)
        at = rows.stop
        expected = attend(
            wide[rows],
            case.keys[s],
            case.values[s],
            0.2,
            np.arange(start, end),
            c.window,
            wide_sinks,
        )
        assert error(found[rows], expected) < 3e-6


@pytest.mark.parametrize("length", [17, 80])
def test_b031_prompt_longer_than_the_window(isa: str, length: int):
    rng = np.random.default_rng(5)
    case = PagedCase(rng, [length], 1, 16, 16)
    q = random_f32(rng, length, 2, 16)
    found = attention(q, case.cache, case.batch([(0, 0, length)]), 0.25, window=16)
    assert torch.isfinite(found).all()
    expected = attend(q.double().numpy(), case.keys[0], case.values[0], 0.25, np.arange(length), 16)
    assert error(found, expected) < 3e-6


def test_attention_never_reads_past_a_row():
    """Later keys of the same tile are NaN: neither they nor unwritten slots may touch a row."""
    rng = np.random.default_rng(6)
    case = PagedCase(rng, [40], 1, 16, 16)
    q = random_f32(rng, 40, 1, 16)
    clean = attention(q, case.cache, case.batch([(0, 0, 40)]), 0.25)
    block, row = int(case.tables[0, 30 // 16]), 30 % 16
    case.cache.keys[block, :, row] = math.nan
    case.cache.values[block, :, row] = math.nan
    found = attention(q, case.cache, case.batch([(0, 0, 40)]), 0.25)
    assert torch.equal(found[:30], clean[:30])
    assert torch.isnan(found[30:]).all()


def test_attention_refuses_positions_without_a_block():
    rng = np.random.default_rng(7)
    case = PagedCase(rng, [40], 1, 16, 16)
    batch = case.batch([(0, 47, 49)])
    with pytest.raises(InternalError, match="48"):
        attention(random_f32(rng, 2, 1, 16), case.cache, batch, 1.0)
