"""Open items of a request to the CPU's experts: what is taken, told and computed, whatever the threads do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from headrace.core.errors import InternalError
from headrace.experts.items import Items, items_of
from headrace.ops.cpu.expert_service import tolerance
from headrace.ops.expert_records import ExpertFault, Taking
from headrace.ops.registry import cpu_experts
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_requests import Requests
from tests.fixtures.expert_slabs import CLAMPED, make_case

pytestmark = needs_native
PATIENCE_S = 20.0
SLICES = 4
SLOW, FAST = 0xFFFF, 1  # of ``pace``: 4 ms and 64 ns are left


def requests_of(name: str) -> Requests:
    case = make_case(name, hidden=96, inner=128, slices=SLICES, bias=True, act=CLAMPED)
    return Requests(case, max_tokens=2)


@contextmanager
def serving(requests: Requests, threads: int) -> Iterator:
    service = requests.service(threads)
    service.start()
    try:
        yield service
    finally:
        service.stop(PATIENCE_S)


def question(
    requests: Requests, num_open: int, seed: int, tokens: int = 1
) -> tuple[torch.Tensor, Items]:
    """All slices of two experts a token; in the work, the last ``num_open`` rows are open, backwards."""
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(
        rng.permuted(np.tile(np.arange(4), (tokens, 1)), axis=1)[:, :2].copy()
    ).int()
    weights = torch.from_numpy(rng.random((tokens, 2), dtype=np.float32))
    x = requests.case.x(rng, tokens)
    work = items_of(ids, weights, SLICES)
    shuffled = torch.from_numpy(rng.permutation(len(work.items)))
    own, rest = shuffled[num_open:].sort().values, shuffled[:num_open]
    requests.fill(x, Items(work.items[torch.cat([own, rest])], work.pair_token, work.pair_weight))
    requests.header[2], requests.header[4], requests.header[5] = len(own), num_open, num_open
    return x, Items(work.items[torch.cat([own, rest])], work.pair_token, work.pair_weight)


def direct(requests: Requests, x: torch.Tensor, work: Items, count: int) -> torch.Tensor:
    """The first ``count`` items in the order that a direct call wants."""
    case, items = requests.case, work.items[:count]
    order = torch.argsort(items[:, 0] * SLICES + items[:, 1])
    return cpu_experts().run_now(
        *(case.layout, case.base, len(case.slabs), case.act),
        *(x, items[order], work.pair_token, work.pair_weight),
    )


def said(requests: Requests) -> tuple[int, bool, int]:
    """seq, closed, taken."""
    word = int(requests.view(requests.fields.taken, 4)[0])
    return (word >> 8) & 0xFFFFFF, bool(word & 128), word & 127


def pace(requests: Requests, left: int, piece: int = 1, seq: int | None = None) -> None:
    """As the GPU would during the request that comes next."""
    if seq is None:
        seq = int(requests.words["seq"][0]) + 1
    requests.view(requests.fields.pace, 8, torch.int64)[0] = seq << 32 | left << 16 | piece


@pytest.mark.parametrize("name", ["mxfp4", "q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_told_is_what_is_computed(name: str, threads: int):
    """None, all, and what the pace says: the answer is the sum over the own items and the taken ones."""
    requests = requests_of(name)
    own_items = 2 * SLICES
    bound = tolerance(requests.case.layout)
    with serving(requests, threads) as service:
        for seed in range(24):
            num_open, which = seed % 4 + 1, Taking(seed % 3)
            service.take_open(which)
            x, work = question(requests, num_open, seed)
            pace(requests, SLOW if seed % 2 else FAST)
            before = service.stats().nbytes
            assert service.request(PATIENCE_S) > 0
            seq, closed, taken = said(requests)
            assert (seq, closed) == (int(requests.words["seq"][0]), True)
            if which is not Taking.BY_PACE:
                assert taken == (num_open if which is Taking.ALL else 0)
            count = own_items - num_open + taken
            want = direct(requests, x, work, count)
            assert (requests.out[:1] - want).abs().max() <= bound * want.abs().max()
            assert service.stats().nbytes - before == count * requests.case.layout.slice_nbytes
    assert int(requests.words["abort"][0]) == 0


def test_the_pace_decides():
    """A GPU that needs 4 ms more leaves all to the CPU, one that is done leaves nothing."""
    requests = requests_of("mxfp4")
    with serving(requests, 1) as service:
        for seed, left, expected in ((1, SLOW, 3), (2, FAST, 0), (3, 0, 0)):
            question(requests, 3, seed)
            pace(requests, left)
            # The toy's slices take the CPU some microseconds, more on a busy machine: be far from them.
            service.request(PATIENCE_S)
            taken = said(requests)[2]
            assert taken == expected or (expected == 0 and left == FAST), (left, taken)


def test_without_news_of_this_request_the_last_pace_is_what_is_known():
    requests = requests_of("mxfp4")
    with serving(requests, 1) as service:
        question(requests, 2, 1)
        service.request(PATIENCE_S)
        assert said(requests)[2] == 0  # nothing was ever fetched
        question(requests, 2, 2)
        pace(requests, SLOW, SLOW)  # a slice takes 2 ms
        service.request(PATIENCE_S)
        assert said(requests)[2] == 2
        question(requests, 2, 3)  # no news: two fetches of 2 ms
        service.request(PATIENCE_S)
        assert said(requests)[2] == 2


def test_open_items_do_not_change_other_requests():
    requests = requests_of("mxfp4")
    with serving(requests, 2) as service:
        service.take_open(Taking.ALL)
        question(requests, 2, 5)
        service.request(PATIENCE_S)
        before = said(requests)
        x, work = question(requests, 0, 6, tokens=2)
        service.request(PATIENCE_S)
        assert torch.equal(requests.out[:2], direct(requests, x, work, len(work.items)))
        assert said(requests) == before


@pytest.mark.parametrize("num_open", [-1, 5])
def test_too_many_open_items_are_refused(num_open: int):
    requests = requests_of("mxfp4")
    with serving(requests, 1) as service:
        question(requests, 0, 1)
        requests.header[4] = num_open
        with pytest.raises(InternalError):
            service.request(PATIENCE_S)
        assert int(requests.words["abort"][0]) == ExpertFault.ITEMS


def test_an_open_item_that_is_none_is_refused():
    requests = requests_of("mxfp4")
    with serving(requests, 1) as service:
        question(requests, 1, 1)
        requests.items[2 * SLICES - 1, 1] = SLICES
        with pytest.raises(InternalError):
            service.request(PATIENCE_S)
        assert int(requests.words["abort"][0]) == ExpertFault.SLICE
