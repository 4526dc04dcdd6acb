"""What a decoding step computes for a row does not depend on the rows beside it: equal bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.ops.records import Activation, AttentionBlock, DenseBlock, RopeTable
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
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON

# The interpreter multiplies by NumPy, whose order of sums depends on the number of columns.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
FORMATS = ["f32", "f16", "bf16"]
COUNTS = (1, 2, 3, 4, 5, 8, 9, 12, 15)
# (rows, columns): a router's, a tiny one's, more rows than a GPU has programs at a time
SHAPES = [(128, 2880), (4, 64), (1500, 576), (5120, 2880)]


def in_parts(work, rows: int) -> None:
    """``work(first, last)``: results of these rows, each a tensor whose first axis is rows."""
    together = work(0, rows)
    for count in COUNTS:
        for first in range(0, rows - count + 1, count):
            for part, whole in zip(work(first, first + count), together, strict=True):
                assert torch.equal(part, whole[first : first + count]), (count, first)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, shape: tuple[int, int]):
    rng = np.random.default_rng(5)
    n, k = shape
    x, bias, residual = moved((normal(rng, 16, k), normal(rng, n), normal(rng, 16, n)), DEVICE)
    w, other = moved((dense(rng, fmt, n, k), dense(rng, fmt, n, k)), DEVICE)
    act = Activation()
    done = torch.zeros(16, dtype=torch.int32, device=DEVICE)

    def work(a: int, b: int):
        rows = x[a:b]
        routed = OPS.route(rows, w, bias, 4, "topk_softmax", True, done) if n < 200 else ()
        return (
            *routed,
            OPS.linear(rows, w),
            OPS.linear(rows, w, bias, residual[a:b]),
            *OPS.linear_group(rows, (w, other), (bias, None)),
            OPS.gated_linear(rows, w, other, act),
            *(
                OPS.router_topk(OPS.linear(rows, w, bias), 4, "topk_softmax", True)
                if n < 200
                else ()
            ),
        )

    in_parts(work, 16)


@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_blocks_of_a_layer(fmt: str):
    """Both halves of a decoding step; a row alone has a narrower block table, too."""
    rng = np.random.default_rng(6)
    heads, kv_heads, dim, hidden = 4, 2, 32, 64
    tokens = [170, 40, 500, 16, 129, 1, 33, 700]
    cache, tables = paged_cache(rng, tokens, (kv_heads, dim, 16), DTYPES[fmt])
    spans = [(s, n - 1, n) for s, n in enumerate(tokens)]
    half = dim // 2
    block = AttentionBlock(
        norm=normal(rng, hidden),
        eps=1e-5,
        weights=(
            dense(rng, fmt, heads * dim, hidden),
            dense(rng, fmt, kv_heads * dim, hidden),
            dense(rng, fmt, kv_heads * dim, hidden),
            dense(rng, fmt, hidden, heads * dim),
        ),
        biases=(normal(rng, heads * dim), None, None, normal(rng, hidden)),
        q_norm=None,
        k_norm=None,
        table=RopeTable(normal(rng, 800, half), normal(rng, 800, half), False),
        heads=(heads, kv_heads, dim),
        scale=dim**-0.5,
        window=None,
        sinks=normal(rng, heads),
    )
    feed = DenseBlock(
        norm=normal(rng, hidden), eps=1e-5, gate=dense(rng, fmt, 96, hidden),
        up=dense(rng, fmt, 96, hidden), down=dense(rng, fmt, hidden, 96), act=Activation(),
    )  # fmt: skip
    x = normal(rng, len(tokens), hidden).to(DEVICE)
    cache, block, feed = moved((cache, block, feed), DEVICE)
    for window in (None, 20):
        one = replace(block, window=window)

        def work(a: int, b: int, one=one):
            batch = paged_batch(tables, spans[a:b])
            last = torch.tensor([n - 1 for n in tokens[a:b]])
            own = tables[a:b].gather(1, (last // 16).unsqueeze(1)).squeeze(1).long()
            width = -(-max(tokens[a:b]) // 16)  # of the block tables, as an eager step has them
            batch = replace(
                batch, slots=own * 16 + last % 16, block_tables=batch.block_tables[:, :width]
            )
            mixed = OPS.attention_block(x[a:b], one, cache, moved(batch, DEVICE))
            return mixed, OPS.dense_block(mixed, feed)

        in_parts(work, len(tokens))


@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_experts_in_memory(fmt: str):
    rng = np.random.default_rng(7)
    experts = experts_on(dense_experts(rng, fmt, 6, 64, 48, bias=True), DEVICE)
    rows = 16
    x = normal(rng, rows, 64).to(DEVICE)
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(rows)]).int().to(DEVICE)
    weights = torch.rand(rows, 2).to(DEVICE)
    in_parts(lambda a, b: (OPS.moe(x[a:b], ids[a:b], weights[a:b], experts, Activation()),), rows)
