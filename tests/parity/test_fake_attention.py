"""The accuracy benchmark's attention is the product's: same keys and values, same result."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.attention.fake import VARIANTS, Variant, fake_attention, nvfp4
from headrace.ops.reference.attention_lowbit import sealed_append, sealed_attention
from tests.fixtures.sealed import SealedPool, keys_and_values, random_directions

BY_NAME = {v.name: v for v in VARIANTS}
PRODUCT = [
    ("fp8", "fp8", 0),
    ("nvfp4k-fp8v, R = 0", "nvfp4k-fp8v", 0),
    ("nvfp4k-fp8v, R = 4", "nvfp4k-fp8v", 4),
]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("name", "kv_format", "rank"), PRODUCT)
def test_product_formats_equal_the_paged_reference(name, kv_format, rank, window):
    tokens = 700  # more than one block of rows, and a page that is not full
    k, v = keys_and_values(tokens, 2, 64, seed=1)
    q = torch.randn(tokens, 4, 64, generator=torch.Generator().manual_seed(2))
    pool = SealedPool(kv_format, head_dim=64, block_tokens=64, rank=rank, batch_tokens=704)
    batch = pool.batch([(pool.blocks(tokens), 0, tokens)])
    sealed_append(k, v, pool.cache, batch)
    want = sealed_attention(q, pool.cache, batch, 0.125, window)
    along = random_directions(2, 4, 64)[0]
    got = fake_attention(
        q, k.transpose(0, 1), v.transpose(0, 1), BY_NAME[name], 0.125, window, along
    )
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_compensation_is_exact_where_nothing_is_quantised(monkeypatch):
    """The paper's algebra: with NVFP4 switched off, subtracting means changes nothing."""
    monkeypatch.setattr("benchmarks.attention.fake.nvfp4", lambda x, **_: x)
    k, v = (x.transpose(0, 1) for x in keys_and_values(200, 2, 32, seed=3))
    q = torch.randn(200, 4, 32, generator=torch.Generator().manual_seed(4))
    exact = fake_attention(q, k, v, Variant("exact"), 0.2)
    paper = dataclasses.replace(BY_NAME["paper"], values="f32")
    got = fake_attention(q, k, v, paper, 0.2)
    # the compensation itself is bf16
    assert float((got - exact).abs().max() / exact.abs().max()) < 0.02


def test_full_nvfp4_loses_most_and_nvfp4_is_idempotent():
    k, v = (x.transpose(0, 1) for x in keys_and_values(300, 2, 64, seed=5))
    q = torch.randn(300, 4, 64, generator=torch.Generator().manual_seed(6))
    exact = fake_attention(q, k, v, Variant("exact"), 0.125)
    along = random_directions(2, 4, 64)[0]
    error = {
        name: float((fake_attention(q, k, v, BY_NAME[name], 0.125, None, along) - exact).norm())
        for name in ("bf16", "fp8", "nvfp4k-fp8v, R = 0", "direct", "full NVFP4")
    }
    assert error["bf16"] < error["fp8"] < error["nvfp4k-fp8v, R = 0"] < error["direct"]
    assert error["direct"] < error["full NVFP4"]
    once = nvfp4(k)
    assert torch.equal(nvfp4(once), once)
