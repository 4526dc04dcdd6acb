"""Steps launched ahead: when they are, what becomes of them, and who fails if something does."""

import pytest
import torch

from headrace.core.errors import DeviceLostError, EngineDeadError, WorkerLostError
from headrace.core.request import FinishReason
from headrace.machine.readback import ReadBack
from tests.fixtures.late_device import LateDevice, late_engine
from tests.fixtures.toy_engine import (
    EOS,
    Collected,
    ToyDecoder,
    answer,
    drain,
    make_request,
    says,
    toy_engine,
)

PROMPT = [65, 66, 67]


class Experts:
    """``ExpertRuntime`` that counts, and fails when told to."""

    def __init__(self):
        self.can_run_ahead, self.lost = True, False
        self.begun, self.flying, self.ended, self.closed = [], 0, 0, 0
        self.last = self.misses_of_twice_the_slots = None

    def step_begins(self, num_tokens, *, ahead=False):
        assert ahead or not self.flying
        if not ahead:
            self.lost = False
        self.begun.append(ahead)

    def step_launched(self):
        self.flying += 1

    def step_ended(self):
        self.flying = max(self.flying - 1, 0)
        self.ended += 1
        if self.lost:
            raise WorkerLostError("experts on the CPU: a thread died")

    def snapshot(self):
        return None

    def close(self):
        self.closed = self.flying + 1


def started(engine, *requests, tokens=3):
    """Submit, and step until each has said some tokens."""
    for request in requests:
        engine.submit(request)
    found = Collected()
    while len(found) < len(requests) or min(len(a.token_ids) for a in found.values()) < tokens:
        assert engine.has_work()
        found.take(engine.step())
    return found


def test_the_next_step_is_on_its_way_while_one_is_handled():
    engine, device = late_engine()
    found = started(engine, make_request("r", PROMPT, max_tokens=9))
    # the prompt gives the first token at once; two more have landed, and the next is on its way
    assert device.replays == 3
    assert len(engine._flights) == 1
    assert len(drain(engine, found)[("r", 0)].token_ids) == 9
    # no step behind the last token's: it was known that it would be the last
    assert device.replays == 8
    assert not engine._flights
    assert engine.snapshot().steps_total == 9


def test_a_host_runs_one_after_the_other():
    engine = toy_engine(graphs=True)
    started(engine, make_request("r", PROMPT, max_tokens=9))
    assert not engine._flights


def test_a_step_behind_an_end_is_dropped_and_counts_no_token():
    text = "abc"
    engine, device = late_engine(decoder=says(text, len(PROMPT)))
    engine.submit(make_request("r", PROMPT, max_tokens=50))
    done = Collected()
    while ("r", 0) not in done or done[("r", 0)].finish_reason is None:
        done.take(engine.step())
    found = done[("r", 0)]
    count = len(found.token_ids)
    # The answer did not wait for the step behind it.
    assert len(engine._flights) == 1
    assert device.done < device.queued
    assert engine.snapshot().steps_total == count
    assert found.text == text
    assert found.finish_reason is FinishReason.STOP
    assert found.token_ids[-1] == EOS
    assert found.deltas[-1].usage.completion_tokens == count
    assert (
        device.replays == count
    )  # the first token is the prompt's step's; one row was for nothing
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work()
    assert not engine._flights
    assert device.done == device.queued
    assert engine.snapshot().steps_total == count + 1
    assert engine.snapshot().generation_tokens_total == count
    assert engine.snapshot().kv_blocks_used == 0
    # who comes later finds nothing on its way
    engine.submit(make_request("s", [70], max_tokens=6))
    assert drain(engine)[("s", 0)].token_ids == (
        answer(toy_engine(says(text, len(PROMPT))), [70], max_tokens=6).token_ids
    )


def test_who_arrives_before_a_dropped_step_has_landed_waits_for_it_and_no_more():
    engine, device = late_engine(decoder=says("abc", len(PROMPT)))
    engine.submit(make_request("r", PROMPT, max_tokens=50))
    done = Collected()
    while ("r", 0) not in done or done[("r", 0)].finish_reason is None:
        done.take(engine.step())
    steps = engine.snapshot().steps_total
    engine.submit(make_request("s", [70], max_tokens=1))
    (delta,) = engine.step()
    assert delta.request_id == "s"
    assert delta.usage.completion_tokens == 1
    assert engine.snapshot().steps_total == steps + 2
    assert not engine.has_work()
    assert device.done == device.queued


def test_a_device_lost_under_a_step_that_nobody_needs_ends_the_engine_behind_the_answer():
    experts = Experts()
    decoder = says("abc", len(PROMPT))
    engine, device = late_engine(decoder=decoder, experts=experts)
    engine.submit(make_request("r", PROMPT, max_tokens=50))
    done = Collected()
    while ("r", 0) not in done or done[("r", 0)].finish_reason is None:
        done.take(engine.step())
    assert done[("r", 0)].text == "abc"
    device.is_lost = lambda error: "CUDA error" in str(error)

    def gone():
        raise RuntimeError("CUDA error: gone")

    device._queue.appendleft(gone)
    device.done -= 1
    with pytest.raises(EngineDeadError, match="CUDA error: gone"):
        engine.step()
    engine.close()
    assert experts.closed == 2  # with a step that never ended


def test_a_worker_lost_under_a_step_that_nobody_needs_is_logged(caplog):
    experts = Experts()
    engine, _ = late_engine(decoder=says("abc", len(PROMPT)), experts=experts)
    engine.submit(make_request("r", PROMPT, max_tokens=50))
    done = Collected()
    while ("r", 0) not in done or done[("r", 0)].finish_reason is None:
        done.take(engine.step())
    experts.lost = True
    assert engine.step() == []
    assert "which nobody waited for, failed" in caplog.text
    assert not engine.has_work()
    assert experts.ended == len(experts.begun)
    assert not done.failed


def test_who_arrives_meanwhile_joins_behind_the_step_on_its_way():
    engine, _ = late_engine()
    alone = toy_engine()
    found = started(engine, make_request("a", PROMPT, max_tokens=12))
    engine.submit(make_request("b", PROMPT[::-1], max_tokens=4))
    for steps in range(1, 4):
        found.take(engine.step())
        assert (("b", 0) in found) == (steps >= 2)
    drain(engine, found)
    for name, prompt, count in (("a", PROMPT, 12), ("b", PROMPT[::-1], 4)):
        assert found[(name, 0)].token_ids == answer(alone, prompt, max_tokens=count).token_ids


def test_a_cancel_frees_at_once_and_its_row_is_dropped():
    engine, _ = late_engine()
    both = [make_request("a", PROMPT, max_tokens=12), make_request("b", [70], max_tokens=12)]
    found = started(engine, *both)
    before = engine.snapshot()
    engine.cancel("a")
    now = engine.snapshot()
    assert (now.running, now.kv_blocks_used) == (1, before.kv_blocks_used - 1)
    said = list(found[("a", 0)].token_ids)
    drain(engine, found)
    assert found[("a", 0)].token_ids == said
    assert found[("a", 0)].finish_reason is FinishReason.CANCELLED
    assert found[("b", 0)].token_ids == answer(toy_engine(), [70], max_tokens=12).token_ids


def test_the_last_word_of_a_cancelled_request_waits_for_no_step():
    engine, device = late_engine()
    started(engine, make_request("a", PROMPT, max_tokens=12))
    engine.cancel("a")
    done = device.done
    (delta,) = engine.step()
    assert delta.finish_reason is FinishReason.CANCELLED
    assert device.done == done
    assert engine.has_work()  # the step on its way has to be waited for, by the next call
    assert engine.step() == []
    assert device.done == device.queued
    assert not engine.has_work()


def test_sampled_tokens_are_run_ahead_of_and_are_the_hosts():
    engine, _ = late_engine()
    requests = [
        make_request("greedy", PROMPT, max_tokens=12),
        make_request("drawn", [70], max_tokens=9, temperature=1.0, seed=3),
        make_request("cut", [71, 72], max_tokens=7, temperature=0.8, top_k=9, top_p=0.9, seed=4),
    ]
    for request in requests:
        engine.submit(request)
    found, ahead = Collected(), 0
    while engine.has_work():
        found.take(engine.step())
        ahead += bool(engine._flights)
    assert ahead >= 6  # those behind which nobody ends by length
    for request in requests:
        alone = toy_engine()
        alone.submit(request)
        expected = drain(alone)[(request.request_id, 0)].token_ids
        assert found[(request.request_id, 0)].token_ids == expected


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-4, "seed": 3}, {"logprobs": 1}, {"repetition_penalty": 1.2}]
)
def test_what_the_host_chooses_is_not_run_ahead_of(params):
    engine, _ = late_engine()
    requests = [
        make_request("a", PROMPT, max_tokens=9),
        make_request("b", [70], max_tokens=5, **params),
    ]
    for request in requests:
        engine.submit(request)
    found, most = Collected(), 0
    while engine.has_work():
        found.take(engine.step())
        if engine._scheduler.is_active("b"):
            assert not engine._flights
        most = max(most, len(engine._flights))
    assert most == 1  # once b has ended
    for request in requests:
        alone = toy_engine()
        alone.submit(request)
        assert drain(alone)[(request.request_id, 0)].token_ids == (
            found[(request.request_id, 0)].token_ids
        )


def test_nobody_runs_ahead_while_routes_are_observed():
    engine, _ = late_engine()
    found = started(engine, make_request("a", PROMPT, max_tokens=12))
    engine.watch_routing(lambda layer, ids: None)
    for _ in range(3):
        found.take(engine.step())
    assert not engine._flights
    engine.watch_routing(None)
    found.take(engine.step())
    assert len(engine._flights) == 1
    assert (
        drain(engine, found)[("a", 0)].token_ids
        == answer(toy_engine(), PROMPT, max_tokens=12).token_ids
    )


def test_nobody_runs_ahead_into_a_block_that_would_have_to_be_taken():
    """Two sequences in two blocks each, of four: the fifth would have to be taken from one."""
    engine, _ = late_engine(num_blocks=4, block_tokens=4, prefix_cache=False, max_num_seqs=2)
    both = [make_request("a", PROMPT, max_tokens=12), make_request("b", [70, 71], max_tokens=12)]
    found = started(engine, *both)
    while engine.has_work():
        before = engine.snapshot().preemptions_total
        flying = bool(engine._flights)
        found.take(engine.step())
        assert engine.snapshot().preemptions_total == before or not flying
        engine._scheduler.check()
    assert engine.snapshot().preemptions_total > 0
    for name, prompt in (("a", PROMPT), ("b", [70, 71])):
        assert found[(name, 0)].token_ids == answer(toy_engine(), prompt, max_tokens=12).token_ids


def test_steps_run_ahead_while_somebody_waits_for_room():
    """Of four blocks a has three and one stays free for it: b's two are there once a has ended."""
    engine, _ = late_engine(num_blocks=4, block_tokens=4, max_num_seqs=2, prefix_cache=False)
    requests = [
        make_request("a", range(9), max_tokens=4),
        make_request("b", range(5), max_tokens=4),
    ]
    found = started(engine, requests[0], tokens=1)
    engine.submit(requests[1])
    flying = []
    while ("b", 0) not in found:
        assert engine.has_work()
        found.take(engine.step())
        flying.append((engine.snapshot().waiting, len(engine._flights)))
    # The plan after b came finds no room; two more follow ahead of it, up to a's last token.
    assert flying[:3] == [(1, 1), (1, 1), (1, 0)]
    drain(engine, found)
    for name, prompt in (("a", range(9)), ("b", range(5))):
        assert found[(name, 0)].token_ids == answer(toy_engine(), prompt, max_tokens=4).token_ids


class Broken(ToyDecoder):
    """Gives NaN for the row of one token."""

    bad = -1

    def forward(self, token_ids, batch, kv):
        self.last = token_ids.clone()
        return super().forward(token_ids, batch, kv)

    def logits(self, hidden):
        out = super().logits(hidden)
        out[self.last[-len(out) :].eq(self.bad)] = float("nan")
        return out


def test_logits_that_are_not_finite_fail_their_request_only_with_a_step_behind():
    wanted = answer(toy_engine(), PROMPT, max_tokens=12).token_ids
    other = answer(toy_engine(), [70], max_tokens=12).token_ids
    decoder = Broken()
    decoder.bad = wanted[5]
    assert wanted.index(decoder.bad) == 5
    assert decoder.bad not in [*other, *PROMPT, 70]
    engine, _ = late_engine(decoder=decoder)
    engine.submit(make_request("bad", PROMPT, max_tokens=12))
    engine.submit(make_request("good", [70], max_tokens=12))
    done = drain(engine)
    assert set(done.failed) == {"bad"}
    assert "not finite" in done.failed["bad"].message
    assert done[("bad", 0)].token_ids == wanted[:6]
    assert done[("good", 0)].token_ids == other
    assert engine.snapshot().generation_tokens_total == 18


def test_a_lost_worker_fails_the_step_and_the_one_behind_it_once():
    experts = Experts()
    engine, _ = late_engine(experts=experts)
    found = started(engine, make_request("a", PROMPT, max_tokens=12))
    experts.lost = True
    found.take(engine.step())
    assert set(found.failed) == {"a"}
    assert experts.flying == 1  # the step behind is still on its way: nothing is started anew yet
    assert experts.lost
    engine.submit(make_request("b", [70], max_tokens=6))  # not in the steps that fail
    drain(engine, found)
    assert not experts.lost
    assert set(found.failed) == {"a"}
    assert found[("b", 0)].token_ids == answer(toy_engine(), [70], max_tokens=6).token_ids
    assert experts.ended == len(experts.begun)
    engine.close()
    assert experts.closed == 1


def test_experts_that_are_busy_between_steps_are_not_run_ahead_of():
    experts = Experts()
    experts.can_run_ahead = False
    engine, _ = late_engine(experts=experts)
    engine.submit(make_request("a", PROMPT, max_tokens=6))
    drain(engine)
    assert experts.begun == [False] * 6
    experts.can_run_ahead = True
    engine.submit(make_request("a", PROMPT, max_tokens=6))
    drain(engine)
    assert experts.begun[6:] == [False, False, True, True, True, True]
    assert experts.ended == 12


def test_closing_waits_for_the_step_on_its_way():
    experts = Experts()
    engine, device = late_engine(experts=experts)
    started(engine, make_request("a", PROMPT, max_tokens=12))
    assert device.done < device.queued
    engine.close()
    assert device.done == device.queued
    assert experts.closed == 1


def test_a_launch_that_fails_is_tried_again_in_its_turn():
    engine, _ = late_engine()
    graphs = engine.parts.graphs
    launch, calls = graphs.launch, []

    def failing(*args, ahead=False):
        calls.append(ahead)
        if ahead and len(calls) < 5:
            raise RuntimeError("no")
        launch(*args, ahead=ahead)

    graphs.launch = failing
    engine.submit(make_request("a", PROMPT, max_tokens=9))
    done = drain(engine)
    assert not done.failed
    assert calls[:5] == [False, True, False, True, False]
    assert any(calls[5:])  # steps run ahead again
    assert done[("a", 0)].token_ids == answer(toy_engine(), PROMPT, max_tokens=9).token_ids


def test_a_device_lost_under_a_step_ends_the_engine():
    engine, device = late_engine()
    started(engine, make_request("a", PROMPT, max_tokens=12))
    device.is_lost = lambda error: "CUDA error" in str(error)
    engine.parts.decoder.decoder.fail = lambda tokens: RuntimeError("CUDA error: no")
    with pytest.raises(EngineDeadError, match="CUDA error: no") as caught:
        drain(engine)
    assert isinstance(caught.value.__cause__, DeviceLostError)
    engine.close()


def test_seconds_are_from_result_to_result():
    engine, _ = late_engine()
    seen = []
    engine.observe = seen.append
    engine.submit(make_request("a", PROMPT, max_tokens=9))
    drain(engine)
    assert [s.step for s in seen] == list(range(9))
    assert all(s.batch == s.tokens == 1 for s in seen[1:])
    total = engine.snapshot().step_seconds_total
    assert sum(s.seconds for s in seen) == pytest.approx(total)


def test_readings_come_in_order_and_are_bounded():
    device = LateDevice()
    reading = ReadBack(device, 3, torch.int64)
    source = torch.tensor([1, 2, 3])
    reading.post(source)
    device.push(lambda: source.add_(10))
    reading.post(source[:2])
    device.push(lambda: source.add_(10))
    assert len(reading) == 2
    with pytest.raises(Exception, match="wait for being read"):
        reading.post(source)
    assert reading.take().tolist() == [1, 2, 3]
    assert device.done < device.queued
    assert reading.take().tolist() == [11, 12]
    assert device.done < device.queued  # what was queued behind is not waited for


def test_closing_after_a_fault_gives_back_what_experts_hold():
    """A fault between a step's end and its commit leaves a step on its way that nobody commits."""
    experts = Experts()
    engine, device = late_engine(experts=experts)
    started(engine, make_request("a", PROMPT, max_tokens=12))
    (live,) = engine._sequences.values()

    def push(token_id):
        raise ValueError("no text")

    live.text.push = push
    with pytest.raises(EngineDeadError, match="no text"):
        engine.step()
    assert len(engine._flights) == 1
    engine.close()
    assert device.done == device.queued
    assert experts.closed == 1
