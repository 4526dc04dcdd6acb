"""Each Triton kernel beside its PyTorch twin: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError
from headrace.formats.base import PackedTensor
from headrace.ops import reference
from headrace.ops.records import Activation, AttentionBlock, DenseBlock, LayerKV, RopeTable
from headrace.ops.registry import resolve
from tests.fixtures.kernel_cases import (
    DTYPES,
    dense,
    dense_experts,
    experts_on,
    moved,
    normal,
    paged_batch,
    paged_cache,
)
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
TWINS = {op.name: op.function for op in reference.OPS}
SEEDS = range(3)
# Widths of a small model, and one that no tile divides.
SHAPES = [(96, 64), (40, 288), (130, 300)]


def close(name: str, found: torch.Tensor, expected: torch.Tensor, exact: bool = False) -> None:
    """Within the operation's tolerance; float32 operands are held to float32's."""
    assert found.shape == expected.shape
    limit = 2e-5 if exact else max(OPS.chosen[name].tolerance, 1e-2 if name == "kv_append" else 0.0)
    assert float((found.cpu() - expected).abs().max()) <= limit * float(expected.abs().max())


def run(name: str, *args: Any) -> Any:
    """The kernel's result for operands on the CPU."""
    assert OPS.chosen[name].backend == "triton"
    return getattr(OPS, name)(*moved(args, DEVICE))


@pytest.mark.parametrize("fmt", DTYPES)
def test_embed(fmt: str):
    rng = np.random.default_rng(0)
    table, ids = dense(rng, fmt, 50, 1300), torch.tensor([0, 49, 7, 7])
    assert torch.equal(run("embed", table, ids).cpu(), TWINS["embed"](table, ids))


@pytest.mark.parametrize("cols", [16, 100, 2880])
def test_rmsnorm(cols: int):
    rng = np.random.default_rng(1)
    args = (normal(rng, 5, cols), normal(rng, cols), 1e-5)
    close("rmsnorm", run("rmsnorm", *args), TWINS["rmsnorm"](*args))


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("fmt", DTYPES)
def test_linear(fmt: str, rows: int):
    for seed, (n, k) in enumerate(SHAPES):
        rng = np.random.default_rng(seed)
        x, w, bias = normal(rng, rows, k), dense(rng, fmt, n, k), normal(rng, n)
        residual = normal(rng, rows, n)
        for args in ((x, w), (x, w, bias), (x, w, None, residual), (x, w, bias, residual)):
            close("linear", run("linear", *args), TWINS["linear"](*args), exact=fmt == "f32")


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("fmt", DTYPES)
def test_linear_group_and_gated_linear(fmt: str, rows: int):
    rng = np.random.default_rng(2)
    x = normal(rng, rows, 96)
    for count in (2, 3, 4):
        weights = tuple(dense(rng, fmt, n, 96) for n in (64, 32, 33, 16)[:count])
        biases = (normal(rng, 64), None, normal(rng, 33), None)[:count]
        found = run("linear_group", x, weights, biases)
        for a, b in zip(found, TWINS["linear_group"](x, weights, biases), strict=True):
            close("linear_group", a, b, exact=fmt == "f32")
            assert a.is_contiguous()
    gate, up = dense(rng, fmt, 50, 96), dense(rng, fmt, 50, 96)
    for act in (Activation(), Activation("swiglu_clamped", limit=1.0)):
        args = (x, gate, up, act)
        close(
            "gated_linear", run("gated_linear", *args), TWINS["gated_linear"](*args), fmt == "f32"
        )


def test_packed_weights_give_the_reference_results():
    """Products of 8-bit terms of the activations, where a format has them; rows as they are stored."""
    from tests.fixtures.cpu_oracle import random_packed

    rng = np.random.default_rng(3)
    w = random_packed("q4_k", 16, 256, rng)
    x, ids = normal(rng, 3, 256), torch.tensor([3, 0])
    want = TWINS["linear"](x, w)
    assert (run("linear", x, w).cpu() - want).abs().max() < 5e-5 * want.abs().max()
    assert torch.equal(run("embed", w, ids).cpu(), TWINS["embed"](w, ids))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_in_place(interleaved: bool):
    rng = np.random.default_rng(4)
    for heads, dim, half in ((3, 40, 16), (9, 64, 32), (2, 48, 12)):
        table = RopeTable(normal(rng, 20, half), normal(rng, 20, half), interleaved)
        x, positions = normal(rng, 5, heads, dim), torch.tensor([0, 19, 3, 3, 7])
        there = x.to(DEVICE)
        found = (
            OPS.rope(there, *moved((table, positions), DEVICE)) if DEVICE.type != "cpu" else None
        )
        if found is None:
            there = x.clone()
            found = OPS.rope(there, table, positions)
        assert found.data_ptr() == there.data_ptr()
        close("rope", found, TWINS["rope"](x.clone(), table, positions))


@pytest.mark.parametrize("scoring", ["softmax_topk", "topk_softmax"])
@pytest.mark.parametrize("normalize", [False, True])
def test_router_topk(scoring: str, normalize: bool):
    rng = np.random.default_rng(5)
    for experts, k in ((6, 2), (32, 4), (128, 8), (100, 5)):
        logits = torch.from_numpy(
            rng.integers(-4, 5, (12, experts)).astype(np.float32)
        )  # many ties
        logits[3, 1] = float("nan")
        logits[4, 2] = float("-inf")
        ids, weights = run("router_topk", logits, k, scoring, normalize)
        want_ids, want_weights = TWINS["router_topk"](logits, k, scoring, normalize)
        assert torch.equal(ids.cpu(), want_ids)
        assert ids.dtype == torch.int32
        close("router_topk", weights, want_weights)


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_route_is_the_choice_of_the_scores(fmt: str, rows: int):
    """Scores of small integers are exact in every type, ties included; experts far from a power of two."""
    rng = np.random.default_rng(rows)
    x, bias = ints(rng, rows, 48), ints(rng, 6)
    weight = PackedTensor(fmt, (6, 48), {"data": ints(rng, 6, 48).to(DTYPES[fmt])})
    logits = x.double() @ weight.parts["data"].double().T + bias.double()
    want_ids, want_weights = TWINS["router_topk"](logits.float(), 3, "topk_softmax", True)
    done = torch.zeros(16, dtype=torch.int32)
    for _again in range(2):
        ids, weights = run("route", x, weight, bias, 3, "topk_softmax", True, done)
        assert torch.equal(ids.cpu(), want_ids)
        close("router_topk", weights, want_weights)


@pytest.mark.parametrize("where", ["row", "weight"])
def test_b026_a_row_without_scores_is_masked_where_scores_and_choice_are_one_kernel(where: str):
    """Of rows of a decoding step; a weight that is no number spoils every row's scores."""
    rng = np.random.default_rng(3)
    x, data = ints(rng, 3, 48), ints(rng, 6, 48)
    weight = PackedTensor("f32", (6, 48), {"data": data})
    done = torch.zeros(16, dtype=torch.int32)
    args = (None, 4, "topk_softmax", True, done)
    clean_ids, clean_weights = run("route", x, weight, *args)
    (x[1] if where == "row" else data[2])[5] = float("nan")
    for _again in range(2):
        ids, weights = (part.cpu() for part in run("route", x, weight, *args))
        bad = [1] if where == "row" else [0, 1, 2]
        assert ids[bad].tolist() == [[0, 1, 2, 3]] * len(bad)
        assert not weights[bad].any()
        good = [row for row in range(3) if row not in bad]
        assert torch.equal(ids[good], clean_ids.cpu()[good])
        assert torch.equal(weights[good], clean_weights.cpu()[good])


def ints(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32))


def test_an_unknown_scoring_is_refused():
    with pytest.raises(InternalError, match="scoring"):
        run("router_topk", torch.zeros(1, 4), 2, "sigmoid", True)


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("fmt", DTYPES)
def test_moe(fmt: str, rows: int):
    for bias in (False, True):
        rng = np.random.default_rng(6)
        experts = dense_experts(rng, fmt, 5, 48, 40, bias=bias)
        x, weights = normal(rng, rows, 48), torch.from_numpy(rng.random((rows, 2), np.float32))
        ids = torch.from_numpy(rng.integers(-1, 5, (rows, 2)).astype(np.int32))
        for act in (Activation(), Activation("swiglu_clamped", limit=1.0)):
            expected = TWINS["moe"](x, ids, weights, experts, act)
            found = OPS.moe(*moved((x, ids, weights), DEVICE), experts_on(experts, DEVICE), act)
            close("moe", found, expected, exact=fmt == "f32")


def test_moe_ids_out_of_range():
    """Of few rows nobody waits for the answer: the row turns NaN, and the sampler refuses it."""
    rng = np.random.default_rng(7)
    experts = experts_on(dense_experts(rng, "bf16", 3, 32, 32, bias=False), DEVICE)
    x, weights = normal(rng, 20, 32).to(DEVICE), torch.ones(20, 1, device=DEVICE)
    ids = torch.zeros(20, 1, dtype=torch.int32, device=DEVICE)
    ids[1] = 3
    with pytest.raises(InternalError, match="0 to 3 of 3"):
        OPS.moe(x, ids, weights, experts, Activation())
    out = OPS.moe(x[:3], ids[:3], weights[:3], experts, Activation())
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


F32, BF16 = torch.float32, torch.bfloat16
ATTENTION = [
    # (heads, kv heads, head dim, block), type of the cache, window
    ((4, 2, 32, 16), F32, None),
    ((4, 2, 32, 16), BF16, 20),
    ((6, 2, 64, 32), BF16, None),
    ((6, 2, 64, 32), F32, 100),
    ((4, 1, 48, 16), F32, 20),
    ((2, 2, 48, 16), BF16, 100),
]


@pytest.mark.parametrize(("heads", "dtype", "window"), ATTENTION)
def test_attention(heads: tuple[int, int, int, int], dtype: torch.dtype, window: int | None):
    num_heads, kv_heads, dim, block = heads
    rng = np.random.default_rng(8)
    cache, tables = paged_cache(rng, [84, 33, 1, 64], (kv_heads, dim, block), dtype)
    sinks = normal(rng, num_heads)
    cases = {
        "attention_prefill": [(0, 15, 84), (1, 0, 33), (2, 0, 1), (3, 63, 64)],
        "attention_decode": [(0, 83, 84), (1, 32, 33), (2, 0, 1), (3, 63, 64)],
    }
    for name, spans in cases.items():
        batch = paged_batch(tables, spans)
        q = 2 * normal(rng, batch.positions.numel(), num_heads, dim)
        for s in (None, sinks):
            args = (q, cache, batch, dim**-0.5, window, s)
            close(name, run(name, *args), TWINS[name](*args), exact=dtype == torch.float32)


@pytest.mark.parametrize("window", [None, 700])
def test_decode_of_many_parts(window: int | None):
    """More keys than one part holds, and a last part that is not full."""
    rng = np.random.default_rng(9)
    cache, tables = paged_cache(rng, [1100, 257], (1, 16, 16), torch.float32)
    batch = paged_batch(tables, [(0, 1099, 1100), (1, 256, 257)])
    q, sinks = normal(rng, 2, 2, 16), normal(rng, 2)
    for s in (None, sinks):
        args = (q, cache, batch, 0.25, window, s)
        close(
            "attention_decode",
            run("attention_decode", *args),
            TWINS["attention_decode"](*args),
            True,
        )


@pytest.mark.parametrize("qk_norm", [None, "head", "row"])
@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_attention_block(fmt: str, qk_norm: str | None):
    """Two decoding rows, and where nothing is fused: seventeen of them, and a prompt's chunk."""
    rng = np.random.default_rng(14)
    hidden, heads, kv_heads, dim = 48, 4, 2, 32
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim, hidden)
    cols = (hidden, hidden, hidden, heads * dim)
    weights = tuple(dense(rng, fmt, n, k) for n, k in zip(sizes, cols, strict=True))
    biases = (normal(rng, sizes[0]), None, normal(rng, sizes[2]), normal(rng, hidden))
    widths = {None: (None, None), "head": (dim, dim), "row": sizes[:2]}[qk_norm]
    q_norm, k_norm = (None if w is None else normal(rng, w) for w in widths)
    norm, sinks = normal(rng, hidden), normal(rng, heads)
    dtype = DTYPES["f32" if fmt == "f32" else "bf16"]
    for interleaved, spans in (
        (False, [(0, 39, 40), (1, 20, 21)]),
        (True, [(0, 37, 40)]),
        (True, [(s, 39, 40) for s in range(2, 19)]),  # one each: no two share a place
    ):
        table = RopeTable(*(0.7 * normal(rng, 60, 12) for _ in range(2)), interleaved)
        shape = (heads, kv_heads, dim)
        block = AttentionBlock(
            norm, 1e-5, weights, biases, q_norm, k_norm, table, shape, 0.1, 30, sinks
        )
        contexts = [40, 21] + [40] * 17
        cache, tables = paged_cache(rng, contexts, (kv_heads, dim, 16), dtype)
        batch = paged_batch(tables, spans)
        slots = tables[[s for s, _, e in spans for _ in range(len(batch.positions) // len(spans))]]
        slots = slots[torch.arange(len(slots)), batch.positions // 16] * 16 + batch.positions % 16
        batch = replace(batch, slots=slots.long())
        x = normal(rng, len(batch.positions), hidden)
        there = moved(cache, DEVICE)
        ours = LayerKV(there.keys.clone(), there.values.clone())
        found = OPS.attention_block(*moved((x, block), DEVICE), ours, moved(batch, DEVICE))
        expected = TWINS["attention_block"](x, block, cache, batch)
        close("attention_block", found, expected, exact=fmt == "f32")
        close("kv_append", ours.values.nan_to_num(), cache.values.nan_to_num(), fmt == "f32")


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_dense_block(fmt: str):
    rng = np.random.default_rng(15)
    gate, up, down = (dense(rng, fmt, *s) for s in ((40, 48), (40, 48), (48, 40)))
    for act in (Activation(), Activation("swiglu_clamped", limit=1.0)):
        block = DenseBlock(normal(rng, 48), 1e-5, gate, up, down, act)
        for rows in (1, 3, 20):
            x = normal(rng, rows, 48)
            found = run("dense_block", x, block)
            close("dense_block", found, TWINS["dense_block"](x, block), exact=fmt == "f32")
            if rows <= 16:  # the bits of the operations one by one
                here = moved((x, block), DEVICE)
                normed = OPS.rmsnorm(here[0], here[1].norm, 1e-5)
                inner = OPS.gated_linear(normed, here[1].gate, here[1].up, act)
                assert torch.equal(found, OPS.linear(inner, here[1].down, None, here[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_append(dtype: torch.dtype):
    rng = np.random.default_rng(10)
    k, v, slots = normal(rng, 3, 2, 24), normal(rng, 3, 2, 24), torch.tensor([1, 17, 40])
    found, expected = (
        paged_cache(np.random.default_rng(11), [50], (2, 24, 16), dtype)[0] for _ in range(2)
    )
    found = moved(found, DEVICE)
    OPS.kv_append(*moved((k, v), DEVICE), found, slots.to(DEVICE))
    TWINS["kv_append"](k, v, expected, slots)
    for a, b in ((found.keys, expected.keys), (found.values, expected.values)):
        assert torch.equal(a.cpu().nan_to_num(9), b.nan_to_num(9))


needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096), (20000, 576), (960, 576)])
def test_products_at_real_sizes(n: int, k: int):
    for rows in (1, 5, 16, 100):
        rng = np.random.default_rng(rows)
        x, w, residual = normal(rng, rows, k), dense(rng, "bf16", n, k), normal(rng, rows, n)
        args = (x, w, normal(rng, n), residual)
        close("linear", run("linear", *args), TWINS["linear"](*args))
    up = dense(rng, "bf16", n, k)
    args = (x[:7], w, up, Activation("swiglu_clamped"))
    close("gated_linear", run("gated_linear", *args), TWINS["gated_linear"](*args))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("heads", [(64, 8, 64, 32), (32, 8, 128, 32), (9, 3, 64, 16)])
@pytest.mark.parametrize("window", [None, 128])
def test_attention_at_real_sizes(
    heads: tuple[int, int, int, int], dtype: torch.dtype, window: int | None
):
    num_heads, kv_heads, dim, block = heads
    rng = np.random.default_rng(12)
    cache, tables = paged_cache(rng, [5000, 1023, 17], (kv_heads, dim, block), dtype)
    sinks = normal(rng, num_heads)
    cases = {
        "attention_prefill": [(0, 4600, 5000), (1, 0, 1023), (2, 16, 17)],
        "attention_decode": [(0, 4999, 5000), (1, 1022, 1023), (2, 16, 17)],
    }
    for name, spans in cases.items():
        batch = paged_batch(tables, spans)
        q = 2 * normal(rng, batch.positions.numel(), num_heads, dim)
        args = (q, cache, batch, dim**-0.5, window, sinks)
        close(name, run(name, *args), TWINS[name](*args), exact=dtype == F32)


@pytest.mark.gpu
@needs_gpu
def test_a_row_alone_is_the_row_among_sixteen_bit_for_bit():
    """Products of few rows and decoding attention: what keeps streams from feeling each other."""
    rng = np.random.default_rng(13)
    x, w = normal(rng, 16, 2880).to(DEVICE), moved(dense(rng, "bf16", 5120, 2880), DEVICE)
    together = OPS.linear(x, w)
    contexts = [1, 300, 257, 4000, 64, 1000, 31, 2049] * 2
    cache, tables = moved(paged_cache(rng, contexts, (2, 64, 32), BF16), DEVICE)
    q = normal(rng, 16, 8, 64).to(DEVICE)
    spans = [(i, c - 1, c) for i, c in enumerate(contexts)]
    mixed = OPS.attention_decode(q, cache, moved(paged_batch(tables, spans), DEVICE), 0.1)
    for i in range(16):
        assert torch.equal(OPS.linear(x[i : i + 1], w)[0], together[i])
        alone = moved(paged_batch(tables, spans[i : i + 1]), DEVICE)
        assert torch.equal(OPS.attention_decode(q[i : i + 1], cache, alone, 0.1)[0], mixed[i])
