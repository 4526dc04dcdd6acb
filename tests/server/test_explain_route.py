"""GET /v1/explain: through the server, the process, and a real engine's loop."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import EngineDeadError
from headrace.core.messages import Cancel, Explain, Explained, Shutdown, Snapshot, Submit
from headrace.core.request import GenerationRequest, SamplingParams
from headrace.engine import worker
from headrace.engine.engine import Engine
from headrace.engine.explain_requests import IDLE_STEPS, LEAST_STEPS
from headrace.engine.worker import serve
from headrace.explain import leaf
from headrace.server.process import ProcessClient
from tests.fixtures.fake_worker import fake_worker

from .conftest import Served


def test_the_report_comes_as_json(served: Served):
    name = served.http.get("/v1/models").json()["data"][0]["id"]
    assert served.http.get("/v1/explain").json() == {"model": name, "phase": "decode", "steps": 32}
    answer = served.http.get("/v1/explain", params={"step": "prefill", "steps": "5"})
    assert answer.json() == {"model": name, "phase": "prefill", "steps": 5}


def test_a_parameter_given_twice_is_refused(served: Served):
    answer = served.http.get("/v1/explain?step=decode&step=prefill")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "step"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"step": "both"}, "step"),
        ({"steps": "0"}, "steps"),
        ({"steps": "9999"}, "steps"),
        ({"steps": "x"}, "steps"),
        ({"batch": "3"}, "batch"),
    ],
)
def test_wrong_parameters_are_refused(served: Served, query: dict[str, str], param: str):
    answer = served.http.get("/v1/explain", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_no_such_step_and_a_failure_are_told(served: Served):
    before = served.engine.explained
    try:
        served.engine.explained = lambda c: Explained(c.request_id, None, "", None)
        answer = served.http.get("/v1/explain")
        assert answer.status_code == 400
        assert "no decode step" in answer.json()["error"]["message"]
        served.engine.explained = lambda c: Explained(c.request_id, None, "it broke", "mend it")
        answer = served.http.get("/v1/explain")
        assert answer.status_code == 500
    finally:
        served.engine.explained = before


def test_the_engines_process_answers_or_is_said_to_be_dead():
    async def test() -> None:
        client = ProcessClient(target=fake_worker)
        client.start(EngineConfig(model="good"))
        try:
            await client.settled.wait()
            answer = await client.explain(Explain("a", "decode", 4, 1.0))
            assert answer.report == {"phase": "decode"}
            with pytest.raises(EngineDeadError):
                await client.explain(Explain("b", "prefill", 4, 1.0))
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(test(), 30))


class Inbox:
    """Commands one after the other, then, once the engine idles, the end."""

    def __init__(self, commands: list[Any]) -> None:
        self.commands = list(commands)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.commands:
            return self.commands.pop(0)
        if block:
            return Shutdown()
        raise queue.Empty

    def put(self, item: Any) -> None:
        raise AssertionError("the engine sends commands to itself")


def answers(commands: list[Any]) -> list[Explained]:
    """What a real engine's loop answers to ``commands``."""
    return [event for event in said(commands) if isinstance(event, Explained)]


def said(commands: list[Any]) -> list[Any]:
    """All that a real engine's loop says to ``commands``."""
    inbox, outbox = Inbox(commands), queue.Queue[Any]()
    serve(Engine.load(EngineConfig("tiny", context=256, threads=2, device="cpu")), inbox, outbox)
    return [outbox.get() for _ in range(outbox.qsize())]


def test_an_idle_engine_runs_steps_of_its_own():
    decode, prefill = answers([Explain("a", "decode", 6, 5.0), Explain("b", "prefill", 1, 5.0)])
    assert decode.report is not None
    assert decode.report["phase"] == "decode"
    assert leaf.EXPERTS_GPU in {row["id"] for row in decode.report["rows"]}
    assert prefill.report is not None
    assert prefill.report["tokens"] == 64


def test_an_engine_that_runs_steps_of_its_own_is_not_silent_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(worker, "SNAPSHOT_S", 0.0)
    events = said([Explain("a", "decode", 6, 5.0)])
    answered = next(i for i, event in enumerate(events) if isinstance(event, Explained))
    counted = [e.snapshot.steps_total for e in events[:answered] if isinstance(e, Snapshot)]
    # Idle at first; then the prompt's step, which gives the first token, and one for each other.
    assert counted == list(range(LEAST_STEPS + 1))


def test_a_busy_engine_is_watched_until_its_work_is_over():
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    submit = Submit(GenerationRequest("work", (5, 6, 7), sampling))
    first, second = answers(
        [submit, Explain("a", "decode", 4, 60.0), Explain("b", "decode", 500, 60.0)]
    )
    assert (first.request_id, second.request_id) == ("a", "b")
    assert first.report is not None
    assert second.report is not None
    assert first.report["steps"] <= second.report["steps"]


def test_a_cancelled_request_leaves_nothing_watched():
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    submit = Submit(GenerationRequest("work", (5, 6, 7), sampling))
    (answer,) = answers([submit, Explain("a", "decode", 500, 60.0), Cancel("work")])
    # Its work was over before a step was seen: it runs steps of its own, as an idle engine does.
    assert answer.report is not None
    assert answer.report["steps"] <= IDLE_STEPS


def test_an_engine_that_is_to_end_explains_nothing_first():
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    submit = Submit(GenerationRequest("work", (5, 6, 7), sampling))
    events = said([submit, Explain("a", "decode", 500, 60.0), Shutdown()])
    assert not [event for event in events if isinstance(event, Explained)]
    assert [e.snapshot.steps_total for e in events if isinstance(e, Snapshot)][-1] == 0
