"""Slices of experts on the CPU against float64, and against themselves in another order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import InternalError
from headrace.experts.items import Items, items_of
from headrace.experts.slice_reference import run_items
from tests.fixtures.cpu_cases import isas, needs_native
from tests.fixtures.cpu_oracle import error
from tests.fixtures.expert_slabs import CLAMPED, SILU, choose, make_case, routed, run

pytestmark = needs_native

if isas():
    from headrace.ops.cpu import control, expert_service

FORMATS = ("mxfp4", "bf16", "q8_0", "q4_k", "q6_k", "fp8_e4m3", "nvfp4", "iq4_nl", "f32")
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("tokens", "bias", "act"), [(1, False, SILU), (3, True, CLAMPED), (37, False, SILU)]
)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_match_float64(name: str, tokens: int, bias: bool, act):
    size = 512 if name in ("q4_k", "q6_k") else 288 if name == "nvfp4" else 256
    case = make_case(name, hidden=size, inner=size, bias=bias, act=act)
    x, ids, weights, work = routed(case, tokens, 2)
    expected = case.expected(x, ids, weights)
    assert error(run_items(case.layout, case.slabs, act, x, work), expected) < 1e-12
    assert error(run(case, x, work), expected) < expert_service.tolerance(case.layout)


@pytest.mark.parametrize(
    ("hidden", "inner", "slices"),
    [(32, 32, 1), (96, 160, 5), (544, 96, 3), (2880, 960, 1), (64, 2880, 5), (2880, 576, 1)],
)
def test_mxfp4_in_any_shape(hidden: int, inner: int, slices: int):
    case = make_case("mxfp4", hidden=hidden, inner=inner, slices=slices, bias=True, act=CLAMPED)
    x, ids, weights, work = routed(case, 5, 3)
    assert error(run(case, x, work), case.expected(x, ids, weights)) < expert_service.tolerance(
        case.layout
    )


def test_down_may_have_another_format_than_gate():
    for name, down in (("q4_k", "q6_k"), ("mxfp4", "bf16"), ("bf16", "mxfp4")):
        case = make_case(name, down=down)
        x, ids, weights, work = routed(case, 3, 2)
        found = run(case, x, work)
        assert error(found, case.expected(x, ids, weights)) < expert_service.tolerance(case.layout)


def test_fp8_with_one_factor_for_each_block():
    case = make_case("fp8_e4m3", hidden=384, inner=512)
    assert case.layout.block_factors
    x, ids, weights, work = routed(case, 2, 2)
    assert (
        error(run(case, x, work), case.expected(x, ids, weights)) < expert_service.FLOAT_TOLERANCE
    )


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["mxfp4", "q8_0", "bf16", "q4_k"]),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 5),
    seeds,
)
def test_bits_depend_on_neither_threads_nor_instruction_set(name, tokens, k, threads, blocks, seed):
    hidden, inner = (512, 768) if name == "q4_k" else (32 * blocks + 64, 96)
    case = make_case(name, hidden=hidden, inner=inner, slices=3, bias=True, act=CLAMPED, seed=seed)
    x, _, _, work = routed(case, tokens, k, seed)
    whole = run(case, x, work, 1)
    assert torch.equal(run(case, x, work, threads), whole)
    try:
        for isa in isas():
            control.select_isa(isa)
            assert torch.equal(run(case, x, work, threads), whole)
    finally:
        control.select_isa("")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["mxfp4", "q8_0"]), st.integers(2, 16), st.integers(1, 3), seeds)
def test_a_token_alone_equals_the_token_among_others(name, tokens, k, seed):
    """Neither other tokens nor other items change a token's bits in a decoding step."""
    case = make_case(name, hidden=160, inner=64, slices=2, seed=seed)
    rng = np.random.default_rng(seed)
    ids, weights = (torch.from_numpy(a) for a in choose(rng, tokens, 4, k))
    x = case.x(rng, tokens)
    whole = run(case, x, items_of(ids, weights, 2))
    for t in {0, tokens // 2, tokens - 1}:
        alone = run(case, x[t : t + 1], items_of(ids[t : t + 1], weights[t : t + 1], 2))
        assert torch.equal(alone[0], whole[t])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**12 - 1), seeds)
def test_slices_split_between_two_places_add_up(tokens, mask, seed):
    """What the CPU does not compute, somebody else does: the partial sums are the whole."""
    case = make_case("mxfp4", hidden=64, inner=96, slices=3, seed=seed)
    x, ids, weights, work = routed(case, tokens, 2, seed)
    chosen = torch.tensor([mask >> i & 1 == 1 for i in range(len(work.items))])
    parts = [
        run(case, x, Items(work.items[c], work.pair_token, work.pair_weight))
        for c in (chosen, ~chosen)
    ]
    expected = case.expected(x, ids, weights)
    assert error(parts[0] + parts[1], expected) < expert_service.TERMS_TOLERANCE


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 4), seeds)
def test_every_choice_becomes_one_pair_of_each_slice(tokens, k, slices, seed):
    rng = np.random.default_rng(seed)
    ids, weights = choose(rng, tokens, 8, k)
    ids[rng.random(ids.shape) < 0.2] = -1
    work = items_of(torch.from_numpy(ids), torch.from_numpy(weights), slices)
    found: dict[tuple[int, int, int], float] = {}
    for expert, part, first, pairs in work.items.tolist():
        for p in range(first, first + pairs):
            key = (int(work.pair_token[p]), expert, part)
            assert key not in found
            found[key] = float(work.pair_weight[p])
    wanted = {
        (t, int(ids[t, s]), part): float(weights[t, s])
        for t in range(tokens)
        for s in range(k)
        for part in range(slices)
        if ids[t, s] >= 0
    }
    assert found == wanted
    keys = [tuple(i[:2]) for i in work.items.tolist()]
    assert keys == sorted(set(keys))


def test_b027_an_expert_named_twice_counts_once_with_both_weights_and_minus_one_never():
    ids = torch.tensor([[2, -1, 2]], dtype=torch.int32)
    work = items_of(ids, torch.tensor([[0.25, 9.0, 0.5]]), 2)
    assert work.items.tolist() == [[2, 0, 0, 1], [2, 1, 0, 1]]
    assert work.pair_weight.tolist() == [0.75]


def test_no_items_give_zeros():
    case = make_case("mxfp4", hidden=64, inner=64)
    x = torch.ones(3, 64)
    none = torch.full((3, 2), -1, dtype=torch.int32)
    found = run(case, x, items_of(none, torch.ones(3, 2), case.layout.num_slices))
    assert torch.equal(found, torch.zeros(3, 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_no_numbers_reach_the_output(value: float):
    case = make_case("mxfp4", hidden=64, inner=64)
    x, _, _, work = routed(case, 2, 1)
    x[1, 5] = value
    found = run(case, x, work)
    assert bool(found[0].isfinite().all())
    assert not bool(found[1].isfinite().any())


def test_activations_of_any_size_and_empty_blocks_are_kept():
    case = make_case("mxfp4", hidden=128, inner=64)
    x, ids, weights, work = routed(case, 4, 2)
    x[0] = 0.0
    x[1, 32:96] = 0.0
    x[2] *= 1e-20
    x[3, :32] *= 1e-38
    expected = case.expected(x, ids, weights)
    found = run(case, x, work)
    for row in range(4):
        assert error(found[row], expected[row]) < expert_service.TERMS_TOLERANCE


@pytest.mark.parametrize(
    ("change", "meaning"),
    [
        ((0, 0, 9), "expert is out of range"),
        ((0, 0, -1), "expert is out of range"),
        ((0, 1, 7), "slice is out of range"),
        ((1, 1, 0), "do not ascend"),
        ((0, 3, 99), "beyond the request's"),
        ((0, 2, -1), "beyond the request's"),
    ],
)
def test_items_out_of_range_are_refused(change: tuple[int, int, int], meaning: str):
    case = make_case("mxfp4", hidden=64, inner=64)
    x, _, _, work = routed(case, 2, 2)
    work.items[change[0], change[1]] = change[2]
    with pytest.raises(InternalError, match=meaning):
        run(case, x, work)
    work = routed(case, 2, 2)[3]
    work.pair_token[0] = 2
    with pytest.raises(InternalError, match="token is out of range"):
        run(case, x, work)
