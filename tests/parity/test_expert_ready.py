"""x that the CPU's experts have before the request for it: numbered, prepared ahead, and waited for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from headrace.experts.items import Items, items_of
from headrace.experts.request_block import HEADER_X_NUMBER, READY_COLS
from headrace.ops.registry import cpu_experts
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_requests import Requests
from tests.fixtures.expert_slabs import CLAMPED, make_case

pytestmark = needs_native
PATIENCE_S = 20.0
AHEAD_S = 0.2  # the service looks every 50 microseconds


def question(requests: Requests, seed: int, layer: int) -> tuple[torch.Tensor, Items]:
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.permutation(4)[:2].reshape(1, 2)).int()
    weights = torch.from_numpy(rng.random((1, 2), dtype=np.float32))
    x, work = requests.case.x(rng, 1), items_of(ids, weights, 2)
    requests.fill(x, work, layer)
    return x, work


def direct(requests: Requests, x: torch.Tensor, work: Items) -> torch.Tensor:
    case = requests.case
    return cpu_experts().run_now(
        *(case.layout, case.base, len(case.slabs), case.act),
        *(x, work.items, work.pair_token, work.pair_weight),
    )


def ready(requests: Requests) -> torch.Tensor:
    return requests.view(requests.fields.ready, 4 * requests.fields.ready_parts)


@pytest.fixture
def requests() -> Requests:
    """Two layers, x of two numbered parts."""
    hidden = READY_COLS + 64
    return Requests(
        make_case("mxfp4", hidden=hidden, inner=64, slices=2, bias=True, act=CLAMPED), max_tokens=2
    )


@pytest.mark.parametrize("ahead", [True, False])
def test_x_is_used_as_it_was_when_its_number_came(requests: Requests, ahead: bool) -> None:
    """Behind its number x is prepared at once: what becomes of the block's x later does not matter. A request
    whose x has another number finds nothing prepared."""
    service = requests.service(2)
    service.start()
    try:
        for number in range(1, 9):
            x, work = question(requests, number, layer=(number - 1) % 2)
            requests.header[HEADER_X_NUMBER] = number
            ready(requests).fill_(number)
            if ahead:
                time.sleep(AHEAD_S)
                requests.x.fill_(float("nan"))
            service.request(PATIENCE_S)
            assert torch.equal(requests.out[:1], direct(requests, x, work))
    finally:
        service.stop(PATIENCE_S)


def test_a_request_waits_for_all_parts_of_its_x(requests: Requests) -> None:
    service = requests.service(2)
    service.start()
    try:
        x, work = question(requests, 3, layer=1)
        requests.header[HEADER_X_NUMBER] = 2
        requests.x[0, READY_COLS:] = float("nan")
        ready(requests)[0] = 2
        asked = threading.Thread(target=service.request, args=(PATIENCE_S,))
        asked.start()
        time.sleep(AHEAD_S)
        assert int(requests.words["ack"][0]) != int(requests.words["seq"][0])
        requests.x[0, READY_COLS:] = x[0, READY_COLS:]
        ready(requests)[1] = 2
        asked.join(PATIENCE_S)
        assert torch.equal(requests.out[:1], direct(requests, x, work))
    finally:
        service.stop(PATIENCE_S)


def test_what_was_prepared_for_another_layer_is_not_used(requests: Requests) -> None:
    """Its matrices may want other terms."""
    service = requests.service(1)
    service.start()
    try:
        x, work = question(requests, 5, layer=0)
        requests.header[HEADER_X_NUMBER] = 2  # layer 1's
        ready(requests).fill_(2)
        time.sleep(AHEAD_S)
        requests.x[:1] = 2 * x
        service.request(PATIENCE_S)
        assert torch.equal(requests.out[:1], direct(requests, 2 * x, work))
    finally:
        service.stop(PATIENCE_S)


def test_the_kernels_number_the_parts_that_the_service_counts() -> None:
    pytest.importorskip("triton")
    from headrace.ops.triton.expert_launch import PREPARE_COLS

    assert PREPARE_COLS == READY_COLS
