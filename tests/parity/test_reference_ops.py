"""The reference operations against float64 NumPy written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError
from headrace.formats.base import PackedTensor, load_formats
from headrace.ops.records import Activation, AttentionBatch, ExpertWeights, LayerKV, RopeTable
from headrace.ops.reference import OPS
from headrace.ops.reference.packed import gather_rows, row_chunks
from headrace.ops.registry import OP_NAMES, resolve

ops = resolve(["reference"])
TOLERANCE = {op.name: op.tolerance for op in OPS}
CLAMPED = Activation("swiglu_clamped", alpha=1.702, limit=7.0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def f32(values: torch.Tensor) -> PackedTensor:
    return PackedTensor("f32", tuple(values.shape), {"data": values})


def f64(values: torch.Tensor) -> np.ndarray:
    return values.double().numpy()


def close(op: str, got: torch.Tensor, want: np.ndarray) -> None:
    assert np.abs(f64(got) - want).max() <= TOLERANCE[op] * np.abs(want).max()


def test_every_operation_is_here() -> None:
    assert {op.name for op in OPS} == set(OP_NAMES) - {"route"}  # which only pays on a GPU
    assert {op.backend for op in OPS} == {"reference"}


def test_rmsnorm() -> None:
    x, weight = random(5, 48), random(48, seed=1)
    want = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + 1e-5) * f64(weight)
    close("rmsnorm", ops.rmsnorm(x, weight, 1e-5), want)


def test_linear_with_bias_and_residual() -> None:
    x, weight, bias, residual = random(3, 40), random(7, 40), random(7), random(3, 7)
    want = f64(x) @ f64(weight).T + f64(bias) + f64(residual)
    close("linear", ops.linear(x, f32(weight), bias, residual), want)
    first, second = ops.linear_group(x, [f32(weight), f32(weight[:2])], [bias, None])
    close("linear_group", first, f64(x) @ f64(weight).T + f64(bias))
    close("linear_group", second, f64(x) @ f64(weight[:2]).T)


@pytest.mark.parametrize(
    "name", ["q4_1", "q8_0", "mxfp4_gguf", "mxfp4", "nvfp4", "fp8_e4m3", "bf16"]
)
def test_packed_rows_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows and single rows are the rows of the whole."""
    record = load_formats()[name]
    assert record.quantize is not None
    packed = record.quantize(random(300, 64))
    whole = record.dequantize(packed)
    monkeypatch.setattr("headrace.ops.reference.packed.CHUNK_ELEMENTS", 128 * 64)
    pieces = list(row_chunks(packed))
    assert [(start, stop) for start, stop, _ in pieces] == [(0, 128), (128, 256), (256, 300)]
    assert torch.equal(torch.cat([rows for _, _, rows in pieces]), whole)
    ids = torch.tensor([299, 0, 131, 131])
    assert torch.equal(gather_rows(packed, ids), whole[ids])
    assert torch.equal(ops.embed(packed, ids), whole[ids])


def test_fp8_blocks_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.formats.fp8_e4m3 import dequantize, quantize

    packed = quantize(random(300, 160) * torch.arange(1.0, 301.0)[:, None], block=True)
    whole = dequantize(packed)
    monkeypatch.setattr("headrace.ops.reference.packed.CHUNK_ELEMENTS", 128 * 160)
    assert torch.equal(torch.cat([rows for _, _, rows in row_chunks(packed)]), whole)
    assert torch.equal(gather_rows(packed, torch.tensor([200, 5])), whole[[200, 5]])


def test_rope_halves_and_pairs() -> None:
    table = RopeTable(random(9, 4), random(9, 4, seed=1), interleaved=False)
    x, positions = random(3, 2, 10), torch.tensor([8, 0, 5])
    cos, sin = f64(table.cos)[positions][:, None], f64(table.sin)[positions][:, None]
    want = f64(x)
    a, b = want[..., :4].copy(), want[..., 4:8].copy()
    want[..., :4], want[..., 4:8] = a * cos - b * sin, b * cos + a * sin
    turned = x.clone()
    assert ops.rope(turned, table, positions) is turned
    close("rope", turned, want)  # dimensions 8 and 9 stay
    want = f64(x)
    a, b = want[..., 0:8:2].copy(), want[..., 1:8:2].copy()
    want[..., 0:8:2], want[..., 1:8:2] = a * cos - b * sin, b * cos + a * sin
    pairs = RopeTable(table.cos, table.sin, interleaved=True)
    close("rope", ops.rope(x.clone(), pairs, positions), want)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None,
) -> np.ndarray:
    """All rows against a full-width mask, float64; the rows are the last positions."""
    rows, heads, dim = q.shape
    total, kv_heads = k.shape[:2]
    out = np.zeros((rows, heads, dim))
    for head in range(heads):
        kv = head // (heads // kv_heads)
        scores = f64(q[:, head]) @ f64(k[:, kv]).T / np.sqrt(dim)
        position = np.arange(total - rows, total)[:, None]
        key = np.arange(total)[None]
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        weights = np.exp(np.where(seen, scores, -np.inf))
        bottom = weights.sum(-1, keepdims=True)
        if sinks is not None:
            bottom += np.exp(float(sinks[head]))
        out[:, head] = weights / bottom @ f64(v[:, kv])
    return out


def paged(k: torch.Tensor, v: torch.Tensor, rows: int) -> tuple[LayerKV, AttentionBatch]:
    """Store keys and values in blocks of 16 in falling order and describe the last ``rows``."""
    total, heads, dim = k.shape
    blocks = list(range(-(-total // 16), 0, -1))
    pages = torch.full((len(blocks) + 1, heads, 16, dim), float("nan"))
    cache = LayerKV(pages, pages.clone())
    slots = torch.tensor([blocks[t // 16] * 16 + t % 16 for t in range(total)])
    ops.kv_append(k, v, cache, slots)
    batch = AttentionBatch(
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        context_lens=torch.tensor([total], dtype=torch.int32),
        block_tables=torch.tensor([blocks], dtype=torch.int32),
        positions=torch.arange(total - rows, total),
        slots=slots[-rows:],
        decode=rows == 1,
    )
    return cache, batch


WINDOW = 8


@pytest.mark.parametrize("length", [WINDOW + 1, 5 * WINDOW, 300])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_b031_longer_than_the_window(length: int, window: int | None, with_sinks: bool) -> None:
    """No NaN, and every row equals the row under a full-width mask."""
    k, v = random(length, 2, 16), random(length, 2, 16, seed=1)
    q, sinks = random(length, 6, 16, seed=2), random(6, seed=3) if with_sinks else None
    want = dense_attention(q, k, v, window, sinks)
    cache, batch = paged(k, v, length)
    got = ops.attention_prefill(q, cache, batch, 0.25, window, sinks)
    assert not got.isnan().any()
    close("attention_prefill", got, want)
    cache, batch = paged(k, v, 1)
    got = ops.attention_decode(q[-1:], cache, batch, 0.25, window, sinks)
    close("attention_decode", got, want[-1:])


def test_router_scores_and_order() -> None:
    logits = random(6, 8)
    ids, weights = ops.router_topk(logits, 3, "softmax_topk", False)
    assert ids.dtype == torch.int32
    order = np.argsort(-f64(logits), axis=-1)[:, :3]
    assert np.array_equal(ids.numpy(), order)
    softmax = np.exp(f64(logits)) / np.exp(f64(logits)).sum(-1, keepdims=True)
    chosen = np.take_along_axis(softmax, order, -1)
    close("router_topk", weights, chosen)
    _, weights = ops.router_topk(logits, 3, "softmax_topk", True)
    close("router_topk", weights, chosen / chosen.sum(-1, keepdims=True))
    # A softmax over the chosen logits is the renormalised softmax over all.
    _, weights = ops.router_topk(logits, 3, "topk_softmax", False)
    close("router_topk", weights, chosen / chosen.sum(-1, keepdims=True))


def test_router_ties_take_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0]])
    ids, _ = ops.router_topk(logits, 4, "softmax_topk", True)
    assert ids.tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("scoring", ["softmax_topk", "topk_softmax"])
def test_b026_nan_row_is_masked_out(scoring: str) -> None:
    logits = random(3, 8)
    clean_ids, clean_weights = ops.router_topk(logits, 4, scoring, True)
    logits[1] = float("nan")
    ids, weights = ops.router_topk(logits, 4, scoring, True)
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert weights[1].tolist() == [0.0] * 4
    assert torch.equal(ids[[0, 2]], clean_ids[[0, 2]])
    assert torch.equal(weights[[0, 2]], clean_weights[[0, 2]])


def experts_of(gate_up: torch.Tensor, down: torch.Tensor, **biases: torch.Tensor) -> ExpertWeights:
    """Experts whose gate rows are the even and whose up rows are the odd ones."""
    return ExpertWeights(
        gate=[f32(w[0::2]) for w in gate_up],
        up=[f32(w[1::2]) for w in gate_up],
        down=[f32(w) for w in down],
        **biases,
    )


def test_b025_interleaved_gate_and_up() -> None:
    """Even rows gate, odd rows up; min(g, 7), clamp(u, -7, 7), g sigmoid(1.702 g) (u + 1)."""
    gate_up, down = 2 * random(3, 24, 16), random(3, 16, 12, seed=1)
    bias, down_bias = random(3, 24, seed=2), random(3, 16, seed=3)
    experts = experts_of(
        gate_up,
        down,
        gate_bias=bias[:, 0::2].contiguous(),
        up_bias=bias[:, 1::2].contiguous(),
        down_bias=down_bias,
    )
    x = random(5, 16, seed=4)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2], [0, 1]], dtype=torch.int32)
    weights = random(5, 2, seed=5).abs()
    want = np.zeros((5, 16))
    clamped = 0
    for row in range(5):
        for place in range(2):
            e = int(ids[row, place])
            both = f64(gate_up[e]) @ f64(x[row]) + f64(bias[e])
            clamped += int((both[0::2] > 7).sum() + (np.abs(both[1::2]) > 7).sum())
            g, u = np.minimum(both[0::2], 7.0), np.clip(both[1::2], -7.0, 7.0)
            inner = g / (1 + np.exp(-1.702 * g)) * (u + 1)
            y = f64(down[e]) @ inner + f64(down_bias[e])
            want[row] += float(weights[row, place]) * y
    assert clamped > 20  # the limits are met on both sides
    close("moe", ops.moe(x, ids, weights, experts, CLAMPED), want)


def test_gated_linear_silu() -> None:
    x, gate, up = random(4, 16), random(6, 16, seed=1), random(6, 16, seed=2)
    g, u = f64(x) @ f64(gate).T, f64(x) @ f64(up).T
    got = ops.gated_linear(x, f32(gate), f32(up), Activation())
    close("gated_linear", got, g / (1 + np.exp(-g)) * u)


def test_b027_padding_contributes_nothing() -> None:
    experts = experts_of(random(3, 24, 16), random(3, 16, 12, seed=1))
    x, weights = random(2, 16), random(2, 2)
    padded = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int32)
    got = ops.moe(x, padded, weights, experts, Activation())
    alone = ops.moe(x[:1], padded[:1, :1], weights[:1, :1], experts, Activation())
    assert torch.equal(got[0], alone[0])
    assert torch.equal(got[1], torch.zeros(16))


@pytest.mark.parametrize("wrong", [3, -2])
def test_expert_out_of_range_is_an_error(wrong: int) -> None:
    experts = experts_of(random(3, 24, 16), random(3, 16, 12, seed=1))
    ids = torch.tensor([[0, wrong]], dtype=torch.int32)
    with pytest.raises(InternalError, match="of 3 experts"):
        ops.moe(random(1, 16), ids, random(1, 2), experts, Activation())
