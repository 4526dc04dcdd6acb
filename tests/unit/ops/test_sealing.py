"""The codec of sealed pages against NumPy, its limits, and that bytes do not depend on chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.core.kv_formats import FIRST_TOKENS, FORMATS
from headrace.core.numeric import E2M1_VALUES, E4M3_VALUES
from headrace.ops.reference.attention_lowbit import sealed_append, sealed_attention
from headrace.ops.reference.sealing import (
    e2m1_codes,
    pages_of,
    power_of_two_scale,
    read_keys,
    read_values,
    seal,
)
from tests.fixtures.sealed import SealedPool, keys_and_values, random_directions

FORMAT_CASES = [("fp8", 0), ("nvfp4k-fp8v", 0), ("nvfp4k-fp8v", 4)]


def page(k: torch.Tensor) -> torch.Tensor:
    """[P, H, D] -> bfloat16 [1, H, P, D]"""
    return k.transpose(0, 1)[None].bfloat16()


def test_e2m1_rounds_to_nearest_with_ties_to_even():
    grid = np.array(E2M1_VALUES[:8])
    x = torch.cat((torch.linspace(-7, 7, 2801), torch.tensor([0.25, 0.75, 1.25, 2.5, 3.5, 5.0])))
    codes = e2m1_codes(x, torch.tensor(1.0)).numpy()
    for value, code in zip(x.numpy().astype(np.float64), codes, strict=True):
        distance = np.abs(np.abs(value) - grid)
        nearest = np.flatnonzero(distance == distance.min())
        expected = nearest[0] if len(nearest) == 1 else next(n for n in nearest if n % 2 == 0)
        assert code & 7 == expected
        assert bool(code & 8) == (value < 0 and expected > 0)


@pytest.mark.parametrize("largest", [448.0, 2688.0])
def test_scales_are_the_least_power_of_two_that_holds_the_largest(largest):
    amax = torch.tensor([0.0, largest, largest * 1.0001, largest / 2, 1e-3, 7e4, 1.0])
    scale = power_of_two_scale(amax, largest).double()
    assert scale[0] == 1
    assert bool((amax[1:].double() <= largest * scale[1:]).all())
    assert bool((amax[1:].double() > largest * scale[1:] / 2).all())
    assert bool((torch.frexp(scale).mantissa == 0.5).all())


@pytest.mark.parametrize("first", [False, True])
def test_a_page_is_read_back_as_the_definition_says(first):
    """NumPy, element by element, float64: reference vector, groups of 8 + 8 channels, scales."""
    k, v = keys_and_values(32, 1, 32, seed=4)
    directions = random_directions(1, 4, 32)[0]
    made = seal(page(k), page(v), nvfp4=True, first=torch.tensor([first]), directions=directions)
    keys = page(k)[0, 0].double().numpy()
    start = FIRST_TOKENS if first else 0
    mean = torch.tensor(keys[start:].mean(0)).float().bfloat16()
    assert torch.equal(made.key_refs[0, 0], mean)
    centred = keys - mean.double().numpy()
    g = float(made.page_scales[0, 0, 0])
    step = np.array(E4M3_VALUES)[made.key_scales[0, 0].numpy()]
    packed = made.key_codes[0, 0].numpy()
    codes = np.concatenate((packed & 15, packed >> 4), 1)
    for t in range(32):
        if t < start:
            assert not codes[t].any()
            assert not step[t].any()
            continue
        for channel in range(32):
            group = channel % 16 // 8
            members = [8 * group + i for i in range(8)] + [16 + 8 * group + i for i in range(8)]
            amax = np.abs(centred[t, members]).max() / g
            # E4M3 has 3 mantissa bits: half a step is at most 1/16
            assert step[t, group] == pytest.approx(amax / 6, rel=1 / 16)
            value = E2M1_VALUES[codes[t, channel]] * step[t, group] * g
            limit = step[t, group] * g  # half of the largest gap of E2M1 (4 to 6)
            assert abs(value - centred[t, channel]) <= limit * (1 + 1e-6)
    plain = read_keys(made, None, torch.float64)[0, 0].numpy()
    exact = keys[start:] @ directions[0].double().numpy().T
    with_residual = read_keys(made, directions, torch.float64)[0, 0].numpy()
    before = np.abs(plain[start:] @ directions[0].double().numpy().T - exact)
    after = np.abs(with_residual[start:] @ directions[0].double().numpy().T - exact)
    # what is left along U is E4M3's rounding of the residual
    assert np.all(after <= before / 16 + 16 * g * 2.0**-10 + 1e-12)


def test_values_are_within_fp8_of_what_was_stored_at_any_magnitude():
    k, v = keys_and_values(32, 2, 16)
    for factor in (1e-6, 1.0, 3e4):
        made = seal(page(k), page(v * factor), nvfp4=False)
        stored = page(v * factor).float()
        error = (read_values(made) - stored).abs()
        floor = stored.abs().amax((-2, -1), keepdim=True) / 448 * 2.0**-9
        assert bool((error <= stored.abs() / 16 + floor).all())
        assert made.value_codes.shape == (1, 2, 16, 32)  # transposed


@pytest.mark.parametrize(("kv_format", "rank"), FORMAT_CASES)
def test_bytes_depend_on_keys_and_values_only_not_on_chunks(kv_format, rank):
    tokens, generator = 150, np.random.default_rng(0)
    k, v = keys_and_values(tokens, 2, 32)
    seen = []
    for cuts in (
        [tokens],
        [1] * tokens,
        [31, 2, 64, 53],
        list(generator.multinomial(tokens, [0.1] * 10)),
    ):
        pool = SealedPool(kv_format, rank=rank)
        blocks = pool.blocks(tokens)
        start = 0
        for count in (int(c) for c in cuts if c):
            batch = pool.batch([(blocks, start, count)])
            sealed_append(k[start : start + count], v[start : start + count], pool.cache, batch)
            start += count
        pages = pages_of(pool.cache, torch.tensor(blocks[: tokens // 32]))
        seen.append([p for p in vars(pages).values() if p is not None])
        if pool.cache.first_keys is not None:
            seen[-1].append(pool.cache.first_keys[blocks[0]])
            assert torch.equal(seen[-1][-1], k[:16].transpose(0, 1).bfloat16())
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize(("kv_format", "rank"), FORMAT_CASES)
@pytest.mark.parametrize("window", [None, 20, 70])
def test_a_row_sees_sealed_pages_before_its_own_and_bf16_in_its_own(kv_format, rank, window):
    """Against a softmax written out row by row, in chunks and alone."""
    tokens, heads = 110, 4
    k, v = keys_and_values(tokens, 2, 32)
    q = torch.randn(
        tokens, heads, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    pool = SealedPool(kv_format, rank=rank)
    blocks = pool.blocks(tokens)
    got, start = [], 0
    for count in (40, 1, 23, 1, 45):
        batch = pool.batch([(blocks, start, count)])
        sealed_append(k[start : start + count], v[start : start + count], pool.cache, batch)
        rows = q[start : start + count]
        got.append(sealed_attention(rows, pool.cache, batch, 0.2, window, sinks))
        start += count
    got = torch.cat(got).numpy()
    pages = pages_of(pool.cache, torch.tensor(blocks[:3]))
    sealed_k = read_keys(pages, pool.cache.directions, torch.float64)
    if pool.cache.first_keys is not None:
        sealed_k[0, :, :16] = pool.cache.first_keys[blocks[0]].double()
    sealed_k = sealed_k.transpose(0, 1).flatten(1, 2).numpy()
    sealed_v = read_values(pages, torch.float64).transpose(0, 1).flatten(1, 2).numpy()
    own_k, own_v = (x.bfloat16().double().numpy() for x in (k, v))
    for row in range(tokens):
        page_start = row // 32 * 32
        low = 0 if window is None else max(0, row - window + 1)
        for head in range(heads):
            kv = head // 2
            ks = np.concatenate(
                (sealed_k[kv, min(low, page_start) : page_start], own_k[page_start : row + 1, kv])
            )
            vs = np.concatenate(
                (sealed_v[kv, min(low, page_start) : page_start], own_v[page_start : row + 1, kv])
            )
            skip = max(0, low - page_start)
            logits = ks[skip:] @ q[row, head].numpy() * 0.2
            top = max(logits.max(), float(sinks[head]))
            p = np.exp(logits - top)
            want = p @ vs[skip:] / (p.sum() + np.exp(float(sinks[head]) - top))
            np.testing.assert_allclose(got[row, head], want, rtol=1e-9, atol=1e-9)


def test_03_4_bytes_per_token_at_32k_are_those_of_the_allocator():
    from benchmarks.attention.bytes import kv_bytes_per_token

    for heads, tokens, limit in ((128, 32768, 1 / 2.35),):
        packed = kv_bytes_per_token("nvfp4k-fp8v", tokens, heads)
        plain = kv_bytes_per_token("bf16", tokens, heads)
        assert packed <= plain * limit
    assert FORMATS["nvfp4k-fp8v"].page_nbytes(64, 128, 4) == 64 * (64 + 8 + 4 + 128) + 8 + 256
