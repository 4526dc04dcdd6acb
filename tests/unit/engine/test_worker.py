"""The worker's loop: driven through plain queues here, through a real process at the end."""

import multiprocessing
import pickle
import queue
import threading
import time

from headrace.core.config import EngineConfig
from headrace.core.errors import DeviceLostError
from headrace.core.messages import (
    Cancel,
    Explain,
    Explained,
    Fatal,
    Outputs,
    Ready,
    Shutdown,
    Snapshot,
    Submit,
)
from headrace.core.request import FinishReason
from headrace.engine import explain_requests
from headrace.engine.worker import run_worker, serve
from tests.fixtures.late_device import late_engine
from tests.fixtures.toy_engine import (
    Collected,
    ScriptedDecoder,
    ToyDecoder,
    answer,
    make_request,
    says,
    toy_engine,
)


class Served:
    """``serve`` in a thread; events are read until a condition holds."""

    def __init__(self, engine):
        self.commands, self.events = queue.Queue(), queue.Queue()
        self.seen = []
        self.thread = threading.Thread(
            target=serve, args=(engine, self.commands, self.events), daemon=True
        )
        self.thread.start()

    def until(self, condition):
        while True:
            event = self.events.get(timeout=20)
            self.seen.append(event)
            if condition(event):
                return event

    def collected(self):
        done = Collected()
        for event in self.seen:
            if isinstance(event, Outputs):
                done.take(event.items)
        return done

    def end(self):
        self.commands.put(Shutdown())
        self.thread.join(20)
        assert not self.thread.is_alive()
        while not self.events.empty():
            self.seen.append(self.events.get())


def long_answer():
    """A loop amid the answer of a request "a", which would go on for 100,000 tokens."""
    served = Served(
        toy_engine(ScriptedDecoder(lambda position: 65), context=100_000, num_blocks=6300)
    )
    served.commands.put(Submit(make_request("a", [1])))
    served.until(lambda e: isinstance(e, Outputs))
    return served


def idle(event):
    return (
        isinstance(event, Snapshot)
        and event.snapshot.steps_total > 0
        and not (event.snapshot.running or event.snapshot.waiting)
    )


def test_requests_are_served_and_the_idle_state_is_reported():
    served = Served(toy_engine())
    assert isinstance(served.until(lambda e: True), Ready)
    served.commands.put(Submit(make_request("a", [1, 2, 3], max_tokens=5)))
    served.commands.put(Submit(make_request("b", [4, 5], max_tokens=4)))
    snapshot = served.until(idle).snapshot
    while len(served.collected()) < 2 or snapshot.generation_tokens_total < 9:
        snapshot = served.until(idle).snapshot
    done = served.collected()
    assert done[("a", 0)].token_ids == answer(toy_engine(), [1, 2, 3], max_tokens=5).token_ids
    assert snapshot.requests_finished == {"length": 2}
    assert snapshot.kv_blocks_used == 0
    served.end()
    assert not [e for e in served.seen if isinstance(e, Fatal)]


def test_an_answer_is_sent_before_a_step_behind_it_has_landed_and_the_idle_state_knows_of_it():
    engine, device = late_engine(decoder=says("abc", 3))
    work_until, sent_first, said = device.work_until, [], []

    def watched(count):
        # The last wait is for the dropped step: by then the answer's end has been sent.
        sent_first.append("stop" in said)
        work_until(count)

    device.work_until = watched
    served = Served(engine)
    put = served.events.put

    def sent(event):
        if isinstance(event, Outputs):
            said.extend(item.finish_reason.value for item in event.items if item.finish_reason)
        put(event)

    served.events.put = sent
    served.commands.put(Submit(make_request("a", [65, 66, 67], max_tokens=50)))
    # A step for each token, the prompt's first, and the one that was dropped.
    served.until(
        lambda e: idle(e) and e.snapshot.steps_total == e.snapshot.generation_tokens_total + 1
    )
    assert served.collected()[("a", 0)].text == "abc"
    assert device.done == device.queued
    assert sent_first[-1]
    assert not any(sent_first[:-1])
    served.end()


def test_outputs_of_a_step_come_as_one_message():
    served = Served(toy_engine(ScriptedDecoder(lambda position: 65)))
    for i in range(4):
        served.commands.put(Submit(make_request(f"r{i}", [i + 1], max_tokens=30)))
    served.until(lambda e: isinstance(e, Outputs) and len(e.items) == 4)
    served.end()


def test_impossible_requests_fail_with_their_own_error():
    served = Served(toy_engine(context=20))
    served.commands.put(Submit(make_request("long", [1] * 30)))
    served.commands.put(Submit(make_request("bad", [1], top_p=3.0)))
    served.until(lambda e: len(served.collected().failed) == 2)
    failed = served.collected().failed
    assert failed["long"].error_class == "ContextLengthError"
    assert failed["long"].code == "context_length_exceeded"
    assert failed["bad"].error_class == "RequestError"
    assert failed["bad"].param == "top_p"
    served.end()


def test_b154_a_cancel_reaches_a_running_request_and_the_gauges_fall_to_zero():
    served = long_answer()
    served.commands.put(Cancel("a"))
    served.commands.put(Cancel("nobody"))
    snapshot = served.until(idle).snapshot
    assert (snapshot.kv_blocks_used, snapshot.requests_aborted_total) == (0, 1)
    assert served.collected()[("a", 0)].finish_reason is FinishReason.CANCELLED
    served.end()


def test_a_cancel_is_answered_where_there_is_no_news():
    served = Served(toy_engine())
    served.commands.put(Submit(make_request("a", [1], max_tokens=2)))
    before = served.until(lambda e: idle(e) and e.snapshot.requests_finished == {"length": 1})
    time.sleep(0.05)
    while not served.events.empty():
        before = served.events.get()
    for ended in ("a", "nobody"):
        served.commands.put(Cancel(ended))
        assert served.until(lambda e: True) == before
    served.end()


def test_steps_that_cannot_be_watched_are_refused_and_go_on():
    served = long_answer()
    served.commands.put(Explain("why", "decode", 4, 60.0))
    answer = served.until(lambda e: isinstance(e, (Explained, Fatal)))
    assert isinstance(answer, Explained)
    assert answer.report is None
    assert "no operations to watch" in answer.message
    served.until(lambda e: isinstance(e, Outputs))  # the request is served as before
    served.end()
    assert served.collected()[("a", 0)].finish_reason is FinishReason.CANCELLED


def test_a_failure_without_words_is_told_by_its_name(monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(explain_requests, "this_machine", fails)
    served = Served(toy_engine())
    served.commands.put(Explain("why", "decode", 4, 60.0))
    answer = served.until(lambda e: isinstance(e, Explained))
    assert (answer.report, answer.message) == (None, "MemoryError: ")
    served.end()


def test_shutdown_gives_every_request_its_last_word():
    served = long_answer()
    served.end()
    assert served.collected()[("a", 0)].finish_reason is FinishReason.CANCELLED
    assert served.seen[-1].snapshot.running == 0


def test_b120_a_fatal_fault_is_reported_and_ends_the_loop():
    decoder = ToyDecoder()
    decoder.fail = lambda tokens: DeviceLostError("the device is gone")
    served = Served(toy_engine(decoder))
    served.commands.put(Submit(make_request("a", [1])))
    event = served.until(lambda e: isinstance(e, Fatal))
    assert event.error_class == "EngineDeadError"
    assert "the device is gone" in event.message
    served.thread.join(20)
    assert not served.thread.is_alive()


def test_an_idle_loop_does_not_spin():
    served = Served(toy_engine())
    served.until(lambda e: isinstance(e, Ready))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.05
    served.end()


def test_a_model_that_is_not_there_is_fatal():
    commands, events = queue.Queue(), queue.Queue()
    run_worker(EngineConfig("/nowhere/at/all"), commands, events)
    event = events.get_nowait()
    while not isinstance(event, Fatal):
        event = events.get_nowait()
    assert event.error_class in ("ModelNotFoundError", "CheckpointError", "ConfigError")
    assert "/nowhere/at/all" in event.message


def test_messages_cross_processes():
    engine = toy_engine()
    for message in (
        Submit(make_request("a", [1])),
        Ready(engine.info),
        Snapshot(engine.snapshot()),
    ):
        assert pickle.loads(pickle.dumps(message)) == message


def test_a_real_process_starts_fails_legibly_and_ends():
    context = multiprocessing.get_context("spawn")
    commands, events = context.Queue(), context.Queue()
    process = context.Process(
        target=run_worker, args=(EngineConfig("/nowhere/at/all"), commands, events), daemon=True
    )
    process.start()
    event = events.get(timeout=60)
    while not isinstance(event, Fatal):
        event = events.get(timeout=60)
    process.join(30)
    assert process.exitcode == 0
    commands.close()
    events.close()
