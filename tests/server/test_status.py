"""Models, health, metrics and token counts."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.request import FinishReason, OutputDelta
from headrace.core.status import EngineSnapshot, ExpertSnapshot
from headrace.server.app import create_app
from headrace.server.client import EngineState, Phase
from headrace.server.metrics import Metrics
from headrace.server.settings import ServerSettings
from tests.fixtures.http_server import serving
from tests.fixtures.scripted import BOS, ByteFrontend, ScriptedClient, say

from .conftest import Served

READY = EngineState(Phase.READY)


def values(text: bytes | str) -> dict[str, float]:
    text = text if isinstance(text, str) else text.decode()
    return {
        s.name + "".join(f"[{v}]" for v in s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_models_carry_the_context_under_every_name(served: Served):
    (model,) = served.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("toy", "model", "headrace")
    assert model["max_model_len"] == model["context_length"] == model["meta"]["n_ctx"] == 64
    assert model["input_modalities"] == ["text"]
    assert served.http.get("/v1/models/toy").json() == model
    assert served.http.get("/v1/models/other/name").status_code == 404
    assert [m.id for m in served.openai.models.list()] == ["toy"]
    assert served.openai.models.retrieve("toy").id == "toy"


def test_served_model_names():
    app = create_app(
        ScriptedClient(lambda r: say(r, ["ok"])),
        ByteFrontend(),
        ServerSettings(model_ids=("org/name", "alias")),
    )
    body = {"messages": [{"role": "user", "content": "x"}]}
    with serving(app) as base, httpx.Client(base_url=base) as http:
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["org/name", "alias"]
        assert http.get("/v1/models/org/name").json()["id"] == "org/name"
        reply = http.post("/v1/chat/completions", json={**body, "model": "alias"}).json()
        assert reply["model"] == "org/name"
        assert http.post("/v1/chat/completions", json={**body, "model": "toy"}).status_code == 404


def test_health_has_the_context(served: Served):
    health = served.http.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert health.json()["context"] == 64
    assert health.json()["model"] == "toy"
    assert health.json()["memory_nbytes"] == {
        "host": {"weights": 1000, "kv": 2000, "workspace": 30}
    }
    assert health.json()["expert_memory_nbytes"] is None
    assert health.json()["choices"] == [{"name": "threads", "value": "1", "reason": "one core"}]


def test_b120_an_engine_that_hangs_is_said_and_asked_no_more(served: Served):
    limit = ServerSettings().stuck_s
    try:
        for silent, ok in ((0.0, True), (limit - 1, True), (limit + 1, False), (0.0, True)):
            served.engine.silent_s = silent
            health, metrics = served.http.get("/health"), served.http.get("/metrics").text
            assert health.status_code == (200 if ok else 503)
            assert health.json()["status"] == ("ok" if ok else "stuck")
            assert values(metrics)["headrace_ready"] == ok
            reply = served.chat()
            assert reply.status_code == (200 if ok else 503)
            if not ok:
                assert health.json()["silent_s"] == silent
                error = reply.json()["error"]
                assert error["code"] == "engine_stuck"
                assert f"{silent:.0f} s" in error["message"]
                assert "--stuck-after" in error["message"]
                explain = served.http.get("/v1/explain")
                assert explain.status_code == 503
                assert explain.json()["error"]["code"] == "engine_stuck"
    finally:
        served.engine.silent_s = 0.0


def test_an_engine_may_be_waited_for_for_ever():
    client = ScriptedClient(lambda request: say(request, ["ok"]))
    client.silent_s = 1e9
    with serving(create_app(client, ByteFrontend(), ServerSettings(stuck_s=0))) as base:
        assert httpx.get(f"{base}/health").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_monitors_may_ask_for_the_head_alone(served: Served, path: str):
    whole, head = served.http.get(path), served.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
    before, served.engine.state = served.engine.state, EngineState(Phase.DEAD)
    try:
        assert served.http.head(path).status_code == 503
    finally:
        served.engine.state = before


def test_health_and_metrics_agree_on_memory(served: Served):
    """The same numbers under the same names, of a mixture on a GPU too."""
    assert served.engine.info is not None
    before = served.engine.info, served.engine.snapshot
    memory = {
        "host": {"weights": 61_000, "kv": 0, "workspace": 7},
        "gpu": {"weights": 4_000, "experts": 12_000, "kv": 300, "graphs": 5},
    }
    served.engine.info = dataclasses.replace(served.engine.info, memory=memory)
    served.engine.snapshot = dataclasses.replace(served.engine.snapshot, experts=EXPERTS)
    try:
        health = served.http.get("/health").json()
        metrics = values(served.http.get("/metrics").text)
    finally:
        served.engine.info, served.engine.snapshot = before
    assert health["memory_nbytes"] == memory
    for place, purposes in memory.items():
        for purpose, nbytes in purposes.items():
            assert metrics[f"headrace_memory_bytes[{place}][{purpose}]"] == nbytes
    # 100 slots of 4 MB; pinned, pageable and mapped as the engine says
    kinds = {"slots": 400_000_000, "pinned": 30, "pageable": 20, "mapped": 10}
    assert health["expert_memory_nbytes"] == kinds
    for kind, nbytes in kinds.items():
        assert metrics[f"headrace_expert_memory_bytes[{kind}]"] == nbytes


def test_metrics_follow_the_engine(served: Served):
    before = values(served.http.get("/metrics").text)
    served.script(lambda r: say(r, ["ab", "c"]))
    served.chat()
    after = values(served.http.get("/metrics").text)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert gained("headrace_generation_tokens_total") == 3
    assert gained("headrace_prompt_tokens_total") == 1 + len(b"user:hi;assistant:")
    assert gained("headrace_requests_finished_total[stop]") == 1
    assert gained("headrace_time_to_first_token_seconds_count") == 1
    assert gained("headrace_inter_token_seconds_count") == 1  # "c"; the first delta is the first
    assert after["headrace_kv_blocks"] == 100
    assert after["headrace_memory_bytes[host][weights]"] == 1000
    assert after["headrace_memory_bytes[host][kv]"] == 2000
    assert after["headrace_ready"] == 1


def test_two_apps_have_metrics_of_their_own():
    """A global registry would refuse the second set of names."""
    first, second = Metrics(), Metrics()
    first.render(EngineSnapshot(steps_total=5), READY)
    assert values(second.render(EngineSnapshot(), READY))["headrace_steps_total"] == 0


def test_b153_totals_that_go_back_are_clamped_and_logged(caplog: pytest.LogCaptureFixture):
    metrics = Metrics()
    start = EngineSnapshot(steps_total=10, requests_finished={"stop": 4})
    metrics.render(start, READY)
    with caplog.at_level(logging.WARNING):
        text = metrics.render(
            dataclasses.replace(start, steps_total=7, requests_finished={"stop": 3}), READY
        )
    assert values(text)["headrace_steps_total"] == 10
    assert values(text)["headrace_requests_finished_total[stop]"] == 4
    assert "steps_total went back from 10 to 7" in caplog.text
    again = metrics.render(dataclasses.replace(start, steps_total=9), READY)
    assert values(again)["headrace_steps_total"] == 12


def test_a_dead_engine_runs_nothing():
    busy = EngineSnapshot(running=3, waiting=2, kv_blocks_used=9, steps_total=1)
    text = Metrics().render(busy, EngineState(Phase.DEAD))
    assert values(text)["headrace_requests_running"] == 0
    assert values(text)["headrace_kv_blocks_used"] == 0
    assert values(text)["headrace_ready"] == 0
    assert values(text)["headrace_steps_total"] == 1


def test_token_times(monkeypatch: pytest.MonkeyPatch):
    times = iter([10.0, 10.5, 10.75, 11.75])  # arrival; first token; two more; other sequence
    monkeypatch.setattr("headrace.server.metrics.time.perf_counter", lambda: next(times))
    metrics = Metrics()
    observe = metrics.request_timer()

    def delta(index: int, *ids: int, finish: FinishReason | None = None) -> OutputDelta:
        return OutputDelta("r", index, "", ids, finish_reason=finish)

    for one in (delta(0, 1), delta(0, 2, 3), delta(1, 4), delta(0, finish=FinishReason.STOP)):
        observe(one)
    text = values(metrics.render(EngineSnapshot(), READY))
    assert text["headrace_time_to_first_token_seconds_sum"] == 0.5
    assert text["headrace_inter_token_seconds_count"] == 2
    assert text["headrace_inter_token_seconds_sum"] == 0.25


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"content": "ab"}, [BOS, 97, 98]),
        ({"prompt": "ab", "add_special": False}, [97, 98]),
        ({"messages": [{"role": "user", "content": "x"}]}, [BOS, *b"user:x;assistant:"]),
    ],
)
def test_tokenize(served: Served, body: dict[str, Any], tokens: list[int]):
    reply = served.http.post("/tokenize", json=body).json()
    assert reply == {"tokens": tokens, "count": len(tokens), "max_model_len": 64}


def test_tokenize_takes_one_text(served: Served):
    for body in (
        {},
        {"content": "a", "prompt": "b"},
        {"messages": served.ask, "add_special": True},
    ):
        assert served.http.post("/tokenize", json=body).status_code == 400


def test_detokenize(served: Served):
    reply = served.http.post("/detokenize", json={"tokens": [BOS, *"ü".encode()]}).json()
    assert reply["content"] == "ü"
    assert served.http.post("/detokenize", json={"tokens": [999]}).status_code == 400


EXPERTS = ExpertSnapshot(
    slots_total=100,
    slots_used=90,
    slot_nbytes=4_000_000,
    pinned_nbytes=30,
    pageable_nbytes=20,
    mapped_nbytes=10,
    lookups_total=40,
    hits_total=10,
    bytes_total={"resident": 400, "fetched": 300, "computed": 900},
    split=(0, 1, 1, 2),
    rates_gbps={"pcie": 51.5, "cpu": 80.0},
    stalls_total=3,
    stall_seconds_total=0.25,
)


def test_expert_metrics_show_slots_hits_paths_split_and_stalls():
    metrics = Metrics()
    assert b"headrace_expert" not in metrics.render(EngineSnapshot(), READY)  # a dense model
    found = values(metrics.render(EngineSnapshot(experts=EXPERTS), READY))
    want = {
        "slots": 100,
        "slots_used": 90,
        "hit_ratio": 0.25,
        "lookups_total": 40,
        "hits_total": 10,
        "bytes_total[resident]": 400,
        "bytes_total[fetched]": 300,
        "bytes_total[computed]": 900,
        "memory_bytes[slots]": 400_000_000,
        "memory_bytes[pinned]": 30,
        "memory_bytes[pageable]": 20,
        "memory_bytes[mapped]": 10,
        "split[0]": 0,
        "split[3]": 2,
        "path_bytes_per_second[pcie]": 51.5e9,
        "stalls_total": 3,
        "stall_seconds_total": 0.25,
    }
    for name, value in want.items():
        assert found[f"headrace_expert_{name}"] == value, name


def test_expert_counters_follow_and_a_dead_engine_holds_nothing():
    metrics = Metrics()
    metrics.render(EngineSnapshot(experts=EXPERTS), READY)
    later = dataclasses.replace(
        EXPERTS, hits_total=25, bytes_total={"resident": 1000, "promoted": 50}, stalls_total=2
    )
    found = values(metrics.render(EngineSnapshot(experts=later), EngineState(Phase.DEAD)))
    assert found["headrace_expert_hits_total"] == 25
    assert found["headrace_expert_bytes_total[resident]"] == 1000
    assert found["headrace_expert_bytes_total[promoted]"] == 50
    assert found["headrace_expert_stalls_total"] == 3  # went back: ignored
    assert found["headrace_expert_slots_used"] == 0
    assert found["headrace_expert_memory_bytes[pinned]"] == 0
