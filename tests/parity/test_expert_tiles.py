"""Several tokens of an expert: exact blocks on matrix tiles, and narrow products of tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.experts.items import items_of
from tests.fixtures.cpu_cases import isas, needs_native
from tests.fixtures.cpu_oracle import error
from tests.fixtures.expert_slabs import CLAMPED, Case, make_case, run
from tests.fixtures.matrix_tiles import selected, usable

pytestmark = needs_native

if isas():
    from headrace.ops.cpu import control

# 15 bits of a block's largest activation, and what lies between; two terms of bfloat16.
INTEGER, TERMS = 1.5e-4, 5e-5
# Whole groups of four blocks; one, two and three blocks more; hidden and inner size differ.
SIZES = ((256, 128), (288, 192), (416, 224), (64, 352))
LEAST_NARROW = {"mxfp4": 6, "bf16": 2}  # tokens of an expert
COUNTS = ((1, 2, 4, 9), (0, 3, 5, 8), (16, 0, 0, 0), (6, 7, 1, 2))
MANY_COUNTS = ((3, 17, 9, 1), (8, 16, 24, 32), (33, 2, 5, 30), (4, 12, 25, 70))


@pytest.fixture(params=usable())
def tiles(request: pytest.FixtureRequest):
    yield from selected(request.param)


def shared(case: Case, counts: tuple[int, ...], seed: int = 0):
    """(x, ids, weights): so many tokens of each expert, in random order."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(len(counts)), counts)[:, None].astype(np.int32)
    rng.shuffle(ids)
    weights = rng.random(ids.shape).astype(np.float32)
    return case.x(rng, len(ids)), ids, weights


def computed(case: Case, x: torch.Tensor, ids: np.ndarray, weights: np.ndarray, threads: int = 2):
    work = items_of(torch.from_numpy(ids), torch.from_numpy(weights), case.layout.num_slices)
    return run(case, x, work, threads)


@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_tokens_of_a_step_have_the_bits_of_vector_instructions_and_of_each_alone(
    tiles: str, hidden: int, inner: int
):
    case = make_case("mxfp4", hidden=hidden, inner=inner, slices=1, bias=True, act=CLAMPED)
    for counts in COUNTS:
        x, ids, weights = shared(case, counts)
        found = computed(case, x, ids, weights)
        assert error(found, case.expected(x, ids, weights)) < INTEGER
        assert torch.equal(computed(case, x, ids, weights, 5), found)
        alone = [
            computed(case, x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(16)
        ]
        assert torch.equal(torch.cat(alone), found)
        control.select_isa("scalar")
        assert torch.equal(computed(case, x, ids, weights), found)
        control.select_isa(tiles)


def test_scales_at_both_ends_and_numbers_that_are_none(tiles: str):
    """Scale byte 0 counts as zero and 255 as infinity; a token that is not finite spoils no other."""
    case = make_case("mxfp4", hidden=256, inner=64, slices=1)
    for byte in (0, 1, 254, 255):
        part = next(p for p in case.layout.parts if p.name == "gate_up_scales")
        case.slabs[1, :, part.offset : part.offset + 8] = byte
        x, ids, weights = shared(case, (2, 12, 1, 1))
        x[ids[:, 0] == 0] = float("inf")
        found = computed(case, x, ids, weights)
        control.select_isa("avx512")
        assert torch.equal(computed(case, x, ids, weights).isnan(), found.isnan())
        assert torch.equal(computed(case, x, ids, weights).nan_to_num(), found.nan_to_num())
        control.select_isa(tiles)
        assert not bool(torch.isfinite(found[ids[:, 0] == 0]).any())
        assert bool(torch.isfinite(found[ids[:, 0] > 1]).all())


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_pieces_of_prompts_match_float64(tiles: str, name: str, hidden: int, inner: int):
    """Narrow products of a few to 32 tokens, whole tiles beyond; and terms or registers below."""
    case = make_case(name, hidden=hidden, inner=inner, slices=1, bias=True, act=CLAMPED)
    for counts in MANY_COUNTS:
        x, ids, weights = shared(case, counts)
        found = computed(case, x, ids, weights)
        assert torch.equal(computed(case, x, ids, weights, 5), found)
        expected = case.expected(x, ids, weights)
        assert error(found, expected) < INTEGER
        for expert, count in enumerate(counts):
            if count >= LEAST_NARROW[name]:
                rows = ids[:, 0] == expert
                assert error(found[rows], expected[rows]) < TERMS


def test_tokens_of_a_prompt_do_not_know_those_that_share_their_expert(tiles: str):
    case = make_case("mxfp4", hidden=288, inner=160, slices=1)
    x, ids, weights = shared(case, (32, 3, 9, 20))
    found = computed(case, x, ids, weights)
    for expert, some in ((0, 6), (0, 15), (0, 24), (2, 7)):
        rows = np.flatnonzero(ids[:, 0] == expert)
        keep = np.sort(np.concatenate([rows[:some], np.flatnonzero(ids[:, 0] == 3)]))
        part = computed(case, x[keep], ids[keep], weights[keep])
        assert torch.equal(part, found[keep])


def test_all_codes_and_scales_in_narrow_products(tiles: str):
    """Gates and ups show single weights: activations are a power of two in one column, else 0. Byte 0 is so
    small beside the others that it counts as nothing, and takes its rows another way."""
    case = make_case("mxfp4", hidden=128, inner=64, experts=1, slices=1)
    rng = np.random.default_rng(3)
    part = next(p for p in case.layout.parts if p.name == "gate_up_scales")
    for first in (2, 60, 127, 190, 250):
        to = case.slabs[0, 0, part.offset : part.offset + part.nbytes].view(128, -1)
        to.copy_(torch.from_numpy(rng.choice(first + np.arange(3), to.shape).astype(np.uint8)))
        if first > 2:
            to[20, 1] = 0
        case.experts.gate[0].parts["scales"].copy_(to[0::2, :4])
        case.experts.up[0].parts["scales"].copy_(to[1::2, :4])
        x = torch.zeros(24, 128)
        x[torch.arange(24), torch.from_numpy(rng.permutation(128)[:24])] = 2.0 ** (127 - first)
        ids, weights = np.zeros((24, 1), np.int32), np.ones((24, 1), np.float32)
        assert error(computed(case, x, ids, weights), case.expected(x, ids, weights)) < TERMS


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_mixtures_of_a_cpu_alone_match_float64(tiles: str, name: str):
    """Calls of more than 64 rows: experts of one row, of narrow products, and of whole tiles."""
    from headrace.ops.cpu import linear as ops

    case = make_case(name, experts=6, hidden=288, inner=160, slices=1, bias=True, act=CLAMPED)
    x, ids, weights = shared(case, (1, 1, 7, 16, 25, 50))
    args = torch.from_numpy(ids), torch.from_numpy(weights), case.experts, case.act
    found, expected = ops.moe(x, *args), case.expected(x, ids, weights)
    assert error(found, expected) < TERMS
    control.select_isa("avx512")
    alone = ops.moe(x, *args)
    control.select_isa(tiles)
    for expert, tiled in enumerate((False, False, True, True, True, True)):
        rows = ids[:, 0] == expert
        assert error(found[rows], expected[rows]) < TERMS
        assert torch.equal(found[rows], alone[rows]) is not tiled
