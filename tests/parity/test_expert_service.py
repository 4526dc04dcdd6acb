"""Threads that answer requests for experts: the same bits as a direct call, and never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError, InternalError, MachineError
from headrace.experts.items import Items, items_of
from headrace.ops.expert_records import ExpertFault, ServiceFault
from headrace.ops.registry import cpu_experts
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_requests import Requests
from tests.fixtures.expert_slabs import CLAMPED, choose, make_case

pytestmark = needs_native
PATIENCE_S = 20.0  # the machine may be busy; nothing here waits so long


@contextmanager
def serving(requests: Requests, threads: int = 2, **options: float) -> Iterator:
    service = requests.service(threads, **options)
    service.start()
    try:
        yield service
    finally:
        service.stop(PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def small(name: str = "mxfp4", **sizes: int) -> Requests:
    return Requests(make_case(name, hidden=96, inner=64, slices=2, bias=True, act=CLAMPED), **sizes)


def question(requests: Requests, tokens: int, seed: int = 0) -> tuple[torch.Tensor, Items]:
    rng = np.random.default_rng(seed)
    ids, weights = choose(rng, tokens, len(requests.case.slabs), 2)
    return requests.case.x(rng, tokens), items_of(
        torch.from_numpy(ids), torch.from_numpy(weights), 2
    )


def direct(requests: Requests, x: torch.Tensor, work: Items) -> torch.Tensor:
    case = requests.case
    return cpu_experts().run_now(
        *(case.layout, case.base, len(case.slabs), case.act),
        *(x, work.items, work.pair_token, work.pair_weight),
    )


@pytest.mark.parametrize("name", ["mxfp4", "q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_answers_are_those_of_a_direct_call(name: str, threads: int):
    requests = small(name)
    with serving(requests, threads) as service:
        for seed in range(20):
            tokens = seed % 4 + 1
            x, work = question(requests, tokens, seed)
            requests.fill(x, work, layer=seed % 2)
            assert service.request(PATIENCE_S) > 0
            assert torch.equal(requests.out[:tokens], direct(requests, x, work))
            assert bool(requests.out[tokens:].isnan().all()), "rows that nobody asked for"
        stats = service.stats()
        assert (stats.requests, stats.refused) == (20, 0)
        assert stats.nbytes % requests.case.layout.slice_nbytes == 0
        assert stats.busy_s > 0
    assert int(requests.words["abort"]) == 0


def test_a_request_without_items_gives_zeros():
    requests = small()
    with serving(requests) as service:
        x, work = question(requests, 3)
        requests.fill(x, Items(work.items[:0], work.pair_token[:0], work.pair_weight[:0]))
        service.request(PATIENCE_S)
        assert torch.equal(requests.out[:3], torch.zeros(3, 96))


def test_an_item_without_tokens_adds_nothing():
    requests = small()
    with serving(requests) as service:
        x, work = question(requests, 2)
        expected = direct(requests, x, work)
        free = sorted(set(range(4)) - set(work.items[:, 0].tolist()))
        extra = torch.tensor([[e, 0, 1, 0] for e in free], dtype=torch.int32).reshape(-1, 4)
        items = torch.cat([work.items, extra])
        order = torch.argsort(items[:, 0] * 2 + items[:, 1])
        requests.fill(x, Items(items[order], work.pair_token, work.pair_weight))
        service.request(PATIENCE_S)
        assert torch.equal(requests.out[:2], expected)


BAD: dict[ExpertFault, Callable[[Requests], None]] = {
    ExpertFault.LAYER: lambda r: r.header[0:1].fill_(2),
    ExpertFault.TOKENS: lambda r: r.header[1:2].fill_(5),
    ExpertFault.ITEMS: lambda r: r.header[2:3].fill_(r.fields.max_items + 1),
    ExpertFault.PAIRS: lambda r: r.header[3:4].fill_(-1),
    ExpertFault.EXPERT: lambda r: r.items[0, 0:1].fill_(-1),
    ExpertFault.SLICE: lambda r: r.items[0, 1:2].fill_(2),
    ExpertFault.ORDER: lambda r: r.items[1].copy_(r.items[0]),
    ExpertFault.RANGE: lambda r: r.items[0, 3:4].fill_(1 << 30),
    ExpertFault.TOKEN: lambda r: r.pair_token[0:1].fill_(4),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_request_sets_abort_and_the_next_good_one_is_answered(fault: ExpertFault):
    requests = small()
    with serving(requests) as service:
        x, work = question(requests, 4)
        requests.fill(x, work)
        BAD[fault](requests)
        with pytest.raises(InternalError, match=fault.meaning):
            service.request(PATIENCE_S)
        assert service.fault() is fault
        assert bool(requests.out.isnan().all()), "computed rubbish"
        # While abort is set, nothing is answered.
        requests.fill(x, work)
        with pytest.raises(InternalError):
            service.request(PATIENCE_S)
        assert service.stats().requests == 0
        until(lambda: service.heartbeat() > 0)
        time.sleep(0.01)
        requests.words["abort"].zero_()
        service.request(PATIENCE_S)
        assert torch.equal(requests.out, direct(requests, x, work))
        assert service.stats().refused == 1
        assert service.running()


def test_items_that_share_too_many_pairs_are_refused():
    requests = small(
        max_tokens=4, top_k=1
    )  # room for 4 pairs of 2 slices, all experts for 4 tokens are 16
    with serving(requests) as service:
        x, _ = question(requests, 4)
        items = torch.tensor([[e, s, 0, 4] for e in range(4) for s in range(2)], dtype=torch.int32)
        requests.fill(x, Items(items, torch.arange(4, dtype=torch.int32), torch.ones(4)))
        with pytest.raises(InternalError, match="share more pairs"):
            service.request(PATIENCE_S)


def test_idle_threads_sleep_and_a_request_or_a_word_wakes_them():
    requests = small()
    x, work = question(requests, 2)
    with serving(requests, 3, idle_s=0.02) as service:
        for _ in range(2):
            until(lambda: service.awake() == 0)
            requests.fill(x, work)
            service.request(PATIENCE_S)
            assert torch.equal(requests.out[:2], direct(requests, x, work))
        until(lambda: service.awake() == 0)
        service.wake()
        until(lambda: service.awake() == 2)
        before = service.heartbeat()
        until(lambda: service.heartbeat() > before)


def test_a_request_made_before_the_start_is_answered():
    requests = small()
    x, work = question(requests, 1)
    requests.fill(x, work)
    requests.words["seq"].fill_(7)
    with serving(requests):
        until(lambda: int(requests.words["ack"]) == 7)
        assert torch.equal(requests.out[:1], direct(requests, x, work))


@pytest.mark.parametrize("thread", [0, 1])
def test_stopping_during_a_request_ends_in_abort_and_in_bounded_time(thread: int):
    requests = small()
    requests.fill(*question(requests, 2))
    service = requests.service(2)
    service.inject(ServiceFault.HANG, thread)
    service.start()
    if thread == 1:  # the leader answers alone, and then waits for it
        service.request(PATIENCE_S)
    answered = int(requests.words["seq"])
    requests.words["seq"].fill_(answered + 1)
    time.sleep(0.05)
    beats = service.heartbeat()
    time.sleep(0.05)
    assert service.heartbeat() == beats, "the heartbeat stands still while a thread hangs"
    start = time.monotonic()
    service.stop(PATIENCE_S)
    assert time.monotonic() - start < 5
    assert int(requests.words["ack"]) == answered
    assert service.fault() is ExpertFault.STOPPED
    assert not service.running()


@pytest.mark.parametrize("fault", [ServiceFault.DIE, ServiceFault.HANG, ServiceFault.FAIL])
def test_a_lost_thread_becomes_an_error(fault: ServiceFault):
    requests = small()
    requests.fill(*question(requests, 2))
    with serving(requests, 2, stall_s=0.1) as service:
        service.inject(fault, 1)
        with suppress(MachineError):  # the leader may answer one alone
            service.request(PATIENCE_S)
        with pytest.raises(MachineError):
            service.request(PATIENCE_S)
        expected = ExpertFault.WORKER if fault is ServiceFault.FAIL else ExpertFault.STALLED
        assert service.fault() is expected
        assert not service.running()
    # A new service on a zeroed block starts afresh.
    requests.block.zero_()
    x, work = question(requests, 2)
    requests.fill(x, work)
    with serving(requests) as service:
        service.request(PATIENCE_S)
        assert torch.equal(requests.out[:2], direct(requests, x, work))


def test_a_dead_leader_shows_in_its_heartbeat_and_the_host_gives_up():
    requests = small()
    requests.fill(*question(requests, 2))
    with serving(requests, 2) as service:
        service.inject(ServiceFault.DIE, 0)
        with pytest.raises(MachineError, match="no answer within"):
            service.request(0.1)
        assert not service.running()
        requests.words["abort"].fill_(int(ExpertFault.HOST))
        assert service.fault() is ExpertFault.HOST


@pytest.mark.parametrize("thread", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "tokens"), [("mxfp4", 1), ("mxfp4", 4), ("q8_0", 2), ("mxfp4", 40)]
)
def test_the_others_answer_for_a_thread_that_is_late(name: str, tokens: int, thread: int):
    """It comes when the answer is given, so the answer is the others' work."""
    requests = small(name, max_tokens=max(tokens, 4))
    with serving(requests, 3) as service:
        for seed in range(3):
            x, work = question(requests, tokens, seed)
            expected = direct(requests, x, work)
            requests.fill(x, work)
            service.inject(ServiceFault.LATE, thread)
            service.request(PATIENCE_S)
            assert torch.equal(requests.out[:tokens], expected)
        assert service.running()
        assert service.stats().requests == 3


def test_the_log_tells_when_each_thread_was_where():
    requests = small()
    with serving(requests, 3) as service:
        log = service.log_rounds(4).numpy()
        for seed in range(6):  # the newest four stay
            x, work = question(requests, 2, seed)
            requests.fill(x, work)
            service.request(PATIENCE_S)
        nbytes, began, answered = log[:, 0], log[:, 1], log[:, 2]
        points = log[:, 3:].reshape(4, 3, 6)
        # The last round's answer may be there before its last thread.
        until(lambda: bool((points >= began[:, None, None]).all()))
        slices = nbytes // requests.case.layout.slice_nbytes
        assert (slices * requests.case.layout.slice_nbytes == nbytes).all()
        assert slices[6 % 4] == len(work.items), "row n % 4 is round n's"
        assert (points[:, :, 0] >= began[:, None]).all()
        assert (np.diff(points, axis=2) >= 0).all(), "a thread passes its points in order"
        # Nobody sees a phase complete before everybody who worked on it is done with it.
        assert (answered >= began).all()


def test_a_service_that_nobody_stopped_ends_with_its_object():
    requests = small()
    service = requests.service(2)
    service.start()
    del service


def test_options_are_checked():
    requests = small()
    with pytest.raises(ConfigError, match="threads"):
        requests.service(0)
    with pytest.raises(InternalError, match="CPUs"):
        requests.service(2, cpus=(0,))
    requests.block = requests.block[:-1]
    with pytest.raises(InternalError, match="request block"):
        requests.service(2)


def test_threads_run_on_the_cpus_they_are_given():
    requests = small()
    with serving(requests, 2, cpus=(0, 0)) as service:  # two on one CPU: slow, and still right
        x, work = question(requests, 2)
        requests.fill(x, work)
        service.request(PATIENCE_S)
        assert torch.equal(requests.out[:2], direct(requests, x, work))


def test_layers_of_different_formats_leave_each_other_alone():
    """MXFP4 and Q4_K keep activations in terms, each in memory whose padding must stay zero: 288 columns
    end in half a group of MXFP4's. Others compute in float32."""
    kinds = [("mxfp4", "mxfp4"), ("q8_0", "q4_0"), ("mxfp4", "q8_0"), ("q5_0", "mxfp4")]
    cases = [
        make_case(name, down=down, experts=3, hidden=288, inner=288, slices=1, seed=i)
        for i, (name, down) in enumerate(kinds)
    ]
    requests = Requests(cases[0], max_tokens=2, top_k=2, layers=len(cases))
    from headrace.ops.cpu.expert_service import expert_service
    from headrace.ops.expert_records import ServiceOptions

    service = expert_service(
        [case.layout for case in cases], [case.base for case in cases], 3, cases[0].act,
        requests.block, requests.fields, ServiceOptions(2),
    )  # fmt: skip
    service.start()
    try:
        for turn in range(12):
            layer, rng = turn * 7 % len(cases), np.random.default_rng(turn)
            case, tokens = cases[layer], turn % 2 + 1
            x = case.x(rng, tokens)
            ids, weights = choose(rng, tokens, 3, 2)
            work = items_of(torch.from_numpy(ids), torch.from_numpy(weights), 1)
            requests.fill(x, work, layer=layer)
            service.request(PATIENCE_S)
            found = requests.out[:tokens].clone()
            want = case.expected(x, ids, weights)
            error = np.abs(found.numpy() - want).max() / np.abs(want).max()
            assert error < cpu_experts().tolerance(case.layout), (layer, turn)
    finally:
        service.stop(PATIENCE_S)
