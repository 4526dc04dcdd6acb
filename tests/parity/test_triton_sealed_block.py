"""A layer's attention over sealed pages as one operation: the bits of its parts one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.ops.records import AttentionBlock, RopeTable
from headrace.ops.registry import resolve
from tests.fixtures.kernel_cases import dense, moved, normal
from tests.fixtures.sealed_cases import sealed_case
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]
OPS = resolve(("triton", "reference")) if HAS_TRITON else None
HIDDEN, HEADS, KV_HEADS, DIM, PAGE = 48, 4, 2, 32, 16


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_the_block_is_its_parts(fmt: str, interleaved: bool):
    """Three rows: one within a page, one that fills its page, one that begins a page."""
    rng = np.random.default_rng(3)
    sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, HIDDEN)
    weights = tuple(
        dense(rng, fmt, n, k) for n, k in zip(sizes, (HIDDEN, HIDDEN, HIDDEN, HEADS * DIM))
    )
    biases = (normal(rng, sizes[0]), None, normal(rng, sizes[2]), normal(rng, HIDDEN))
    table = RopeTable(*(0.7 * normal(rng, 80, 12) for _ in range(2)), interleaved)
    norms = (normal(rng, DIM), normal(rng, sizes[1]))
    block = AttentionBlock(
        normal(rng, HIDDEN), 1e-5, weights, biases, *norms, table, (HEADS, KV_HEADS, DIM), 0.1, 30,
        normal(rng, HEADS),
    )  # fmt: skip
    tokens = [PAGE + 5, 3 * PAGE, 2 * PAGE + 1]
    case = sealed_case("nvfp4k-fp8v", tokens, kv_heads=KV_HEADS, dim=DIM, page=PAGE, rank=4)
    case.fill([n - 1 for n in tokens])
    spans = [(s, n - 1, n) for s, n in enumerate(tokens)]
    x = normal(rng, len(tokens), HIDDEN)
    x, block, batch = moved((x, block, case.batch(spans)), DEVICE)
    caches = [moved(case.copy().cache, DEVICE) for _ in range(2)]
    assert OPS.chosen["attention_block"].takes_sealed
    found = OPS.attention_block(x, block, caches[0], batch)

    normed = OPS.rmsnorm(x, block.norm, block.eps)
    q, k, v = OPS.linear_group(normed, block.weights[:3], block.biases[:3])
    q = OPS.rmsnorm(q.view(-1, DIM), block.q_norm, block.eps).view(-1, HEADS, DIM)
    k = OPS.rmsnorm(k.view(-1, sizes[1]), block.k_norm, block.eps).view(-1, KV_HEADS, DIM)
    q = OPS.rope(q, block.table, batch.positions)
    k = OPS.rope(k, block.table, batch.positions)
    OPS.sealed_append(k, v.view(-1, KV_HEADS, DIM), caches[1], batch)
    mixed = OPS.sealed_attention_decode(q, caches[1], batch, 0.1, 30, block.sinks)
    flat = mixed.reshape(len(tokens), -1)
    expected = OPS.linear(flat, block.weights[3], block.biases[3], x)
    # Both turn by the same products; a compiler may fuse a multiplication into either of them.
    error = (found - expected).abs().max() / expected.abs().max()
    assert float(error) < (1e-5 if fmt == "f32" else 2e-3)
    if INTERPRETED:
        assert torch.equal(found, expected)
        for name in ("key_codes", "value_codes", "page_scales", "key_residuals"):
            a, b = (getattr(cache, name) for cache in caches)
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
