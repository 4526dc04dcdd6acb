"""Tokens chosen by kernels, beside the host's sampler: interpreted on a CPU, compiled on a GPU.

The interpreter adds up a row in a few programs at small vocabularies; on a GPU vocabularies are whole.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError
from headrace.core.request import SamplingParams
from headrace.engine.sampler import SamplingState, choose, uniform
from headrace.ops.records import GREEDY_RULE, NO_RULE, Rule
from headrace.ops.reference.sampling import mass_bits
from headrace.ops.reference.sampling import sample as reference
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.triton_interpreter import DEVICE, HAS_TRITON, INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="nowhere to run kernels"),
]
if HAS_TRITON:
    from headrace.ops.triton.sampling import CHUNK, ROOM, sample

KINDS = ("plain", "peaked", "flat", "equal", "ties", "masked")
PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 10**6, "top_p": 0.9},
    {"top_k": 200, "top_p": 0.999, "min_p": 0.001},
    {"top_k": 6000, "top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999, "temperature": 2.0},
    {"min_p": 0.02, "top_p": 0.95, "temperature": 1.5},
    {"temperature": 0.0011, "top_p": 0.9},
    {"temperature": 0.0, "top_p": 0.5},
]

# (kind of row, vocabulary, chunk, room): a row is one chunk or many; candidates are all listed, or only
# those between two edges, or do not fit. Interpreted, each launch of a row and chunk takes 10 ms.
FEW = [
    *((kind, 500, 512, 512) for kind in KINDS),
    ("plain", 1, 64, 64), ("plain", 190, 64, 64),
    ("flat", 190, 64, 64), ("ties", 190, 64, 64), ("plain", 190, 64, 16), ("flat", 120, 64, 4),
    ("ties", 120, 64, 4),
]  # fmt: skip
MANY = [
    *((kind, vocab, None, None) for kind in KINDS for vocab in (1, 300, 5003, 151_936, 201_088)),
    *((kind, 3001, 256, 64) for kind in KINDS),
]


def rule(seed: int, position: int, **params: float) -> Rule:
    p = SamplingParams(**params)
    if p.temperature == 0 or p.top_k == 1:
        return GREEDY_RULE
    return p.temperature, p.min_p, float(p.top_k), p.top_p, uniform(seed, 0, position)


def run(logits, rules, chunk=None, room=None) -> tuple[list[int], np.ndarray]:
    """(token ids, largest logits) by the kernels."""
    counters = torch.zeros(len(rules), dtype=torch.int32, device=DEVICE)
    given = torch.from_numpy(np.ascontiguousarray(logits, np.float32)).to(DEVICE)
    listed = torch.tensor(rules, dtype=torch.float64).to(DEVICE)
    tokens = torch.full((len(rules),), -1, dtype=torch.int64, device=DEVICE)
    found = sample(given, listed, counters, tokens, chunk or CHUNK, room or ROOM).cpu().numpy()
    assert not counters.any()
    assert tokens.tolist() == found[0].tolist()
    return found[0].tolist(), found[1].view(np.float32)


def host(logits, params, seed, position) -> int:
    return choose(logits, SamplingState(SamplingParams(**params), seed, 0, ()), position)


def make(kind: str, rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    if kind == "peaked":
        return logits * 8
    if kind == "flat":
        return logits * 0.02
    if kind == "equal":
        return np.full_like(logits, -1.25)
    if kind == "ties":
        return np.round(logits * 3) / 2
    if kind == "masked":
        logits[rng.random(logits.shape) < 0.5] = -math.inf
        logits[:, rng.integers(vocab)] = 2.5
    return logits * 2


@pytest.mark.parametrize(("kind", "vocab", "chunk", "room"), FEW if INTERPRETED else MANY)
def test_tokens_are_the_hosts(kind: str, vocab: int, chunk: int | None, room: int | None):
    """All rules in one batch, beside each other."""
    logits = make(kind, np.random.default_rng(5), len(PARAMS), vocab)
    rules = [rule(i, vocab, **p) for i, p in enumerate(PARAMS)]
    found, largest = run(logits, rules, chunk, room)
    expected = [host(l, p, i, vocab) for i, (l, p) in enumerate(zip(logits, PARAMS))]
    assert found == expected
    np.testing.assert_array_equal(largest, logits.max(-1))
    counters = torch.zeros(len(rules), dtype=torch.int32)
    twin = reference(torch.from_numpy(logits), torch.tensor(rules, dtype=torch.float64), counters)
    assert twin[0].tolist() == expected
    np.testing.assert_array_equal(twin[1].numpy().view(np.float32), logits.max(-1))


def test_neighbours_and_shapes_change_nothing():
    """A row alone, in any batch and place, and in chunks of any size: the same token."""
    rng = np.random.default_rng(1)
    vocab = 150 if INTERPRETED else 201_088
    logits = np.concatenate([make(k, rng, 2, vocab) for k in ("plain", "flat", "ties")])
    rules = [rule(i, 3, **PARAMS[i + 8]) for i in range(len(logits))]
    together, _ = run(logits, rules)
    assert [run(logits[i : i + 1], rules[i : i + 1])[0][0] for i in range(len(rules))] == together
    order = rng.permutation(len(rules))
    mixed, _ = run(
        np.concatenate([logits[order], logits[:4]]),
        [rules[i] for i in order] + [NO_RULE, GREEDY_RULE, NO_RULE, rules[3]],
        128,
        64,
    )
    assert [mixed[int(np.flatnonzero(order == i)[0])] for i in range(len(rules))] == together
    assert mixed[len(rules) + 1] == int(logits[1].argmax())
    assert mixed[-1] == together[3]
    assert mixed[len(rules)] == mixed[-2] == 0  # ids that may be fed to the next step


def test_rows_that_are_not_finite_say_so_and_others_are_drawn():
    logits = np.random.default_rng(2).standard_normal((5, 300)).astype(np.float32)
    logits[0, 200], logits[0, 250] = math.nan, 9.0
    logits[1, 17] = math.inf
    logits[2] = -math.inf
    logits[4, 280] = -math.nan
    rules = [rule(i, 1, top_p=0.9) for i in range(4)] + [GREEDY_RULE]
    found, largest = run(logits, rules, 128, 64)
    assert found[:3] == [200, 17, 0]
    assert found[4] == 280
    assert np.isnan(largest[[0, 4]]).all()
    assert largest[1:3].tolist() == [math.inf, -math.inf]
    assert found[3] == host(logits[3], {"top_p": 0.9}, 3, 1)


def test_zeros_of_both_signs_are_equal():
    logits = np.array([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], np.float32)
    assert run(logits, [GREEDY_RULE] * 2)[0] == [1, 1]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, range(8)),
        # e^-2 = 0.135, e^-1 = 0.368, 1: the masses are 1, 2 x 0.368, 3 x 0.135 and 2 x 0.0498, 2.24 in all
        ({"top_p": 0.75}, [1, 2, 5]),
        ({"top_k": 5}, [1, 2, 3, 4, 5]),
        ({"top_k": 2, "top_p": 0.99}, [1, 2]),
        ({"min_p": 0.1}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_draws_follow_the_distribution(params, kept):
    """Shares of evenly spread numbers are the probabilities, in order of token id."""
    logits = np.array([-3, -1, 0, -2, -2, -1, -2, -3], np.float32) + np.float32(4.0)
    kept = np.array(kept)
    p = np.exp(logits.astype(np.float64))[kept]
    edges = np.concatenate([[0.0], np.cumsum(p / p.sum())])
    draws = 25 if INTERPRETED else 4000
    numbers = (np.arange(draws) + 0.5) / draws
    base = rule(0, 0, **params)
    found, _ = run(np.tile(logits, (draws, 1)), [(*base[:4], u) for u in numbers], 64, 64)
    expected = kept[np.searchsorted(edges, numbers, side="right") - 1]
    near = np.abs(numbers[:, None] - edges).min(1) < 1e-6
    assert (np.array(found)[~near] == expected[~near]).all()


def test_numbers_at_the_ends_pick_the_first_and_the_last_that_weigh_something():
    logits = np.array([[-math.inf, 1.0, 0.5, 1.0, -math.inf]], np.float32)
    for number, token in ((0.0, 1), (1 - 2.0**-53, 3)):
        assert run(logits, [(1.0, 0.0, 0.0, 1.0, number)])[0] == [token]
        assert run(logits, [(1.0, 0.0, 3.0, 0.999, number)])[0] == [token]


def test_masses_of_a_vocabulary_fit_into_64_bits():
    for vocab in (1, 2**18, 2**18 + 1, 10**6):
        assert vocab * 2 ** mass_bits(vocab) <= 2**62
    assert mass_bits(201_088) == 44


def test_what_does_not_fit_together_is_refused():
    logits, rules = torch.zeros(2, 5), torch.tensor([NO_RULE] * 2, dtype=torch.float64)
    counters = torch.zeros(2, dtype=torch.int32)
    for function in (sample, reference):
        for wrong in (
            (logits.double(), rules, counters),
            (logits, rules.float(), counters),
            (logits, rules[:1], counters),
            (logits, rules, counters[:1]),
            (logits, rules, counters, counters),
        ):
            with pytest.raises(InternalError, match="sample: "):
                function(*wrong)
    assert sample(logits[:0], rules[:0], counters).shape == (2, 0)
