"""Faults of clients, of the engine and of HTTP itself: the status and the OpenAI error object."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from headrace.core.errors import (
    ConfigError,
    DoesNotFitError,
    EngineDeadError,
    RequestError,
)
from headrace.core.request import RequestFailed
from headrace.server.app import create_app
from headrace.server.client import EngineState, Phase, error_from
from headrace.server.settings import ServerSettings
from tests.fixtures.http_server import serving
from tests.fixtures.scripted import ByteFrontend, Fail, ScriptedClient, say

from .conftest import Served

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"99999999": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"x": 5}),
        ("logit_bias", {"258": 5}),
        ("logit_bias", {"07": 5, "7": 1}),
        ("stop_token_ids", [99999999]),
        ("stop_token_ids", [-1]),
    ],
)
def test_b077_token_ids_outside_the_vocabulary_are_400(served: Served, field: str, value: Any):
    error = error_of(served.chat(**{field: value}), 400)
    assert error["param"] == field
    assert served.engine.requests == []
    assert served.chat().status_code == 200  # the next one is served


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [100, 900, 100_000])
@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "x", "more": %s}]}',
        '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": %s}}]}]}',
        '{"messages": [], "unknown": %s}',
        "%s",
    ],
)
def test_bodies_that_nest_too_deeply_are_400(served: Served, body: str, levels: int):
    content = body % (nested(levels) if body != "%s" else nested(levels + 1))
    response = served.http.post("/v1/chat/completions", content=content)
    assert "more than 100 levels deep" in error_of(response, 400)["message"]
    assert served.engine.requests == []


def test_bodies_may_nest(served: Served):
    """The object, the list of messages and the message are three levels of the hundred."""
    for levels, status in ((97, 200), (98, 400)):
        body = f'{{"messages": [{{"role": "user", "content": "x", "more": {nested(levels)}}}]}}'
        assert served.http.post("/v1/chat/completions", content=body).status_code == status
    # Many brackets are not deep.
    many: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 200
    assert served.chat(messages=many, max_tokens=1).status_code == 400  # a context of 64 tokens
    assert served.chat(metadata={"a": [[] for _ in range(500)]}).status_code == 200


@pytest.mark.parametrize("penalty", [1e-40, 0.0099, 100.5])
def test_penalties_that_no_logit_survives_are_400(served: Served, penalty: float):
    error = error_of(served.chat(repetition_penalty=penalty), 400)
    assert error["param"] == "repetition_penalty"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_b073_empty_stop_string_is_400(served: Served, stop: Any):
    assert error_of(served.chat(stop=stop), 400)["param"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": "hi"}, "messages"),
    ],
)
def test_wrong_values_are_400_naming_the_field(served: Served, fields: dict[str, Any], param: str):
    error = error_of(served.chat(**fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert "hint:" in error["message"]


def test_messages_say_what_is_allowed(served: Served):
    """Where several kinds of value are possible, the message is about the one that was tried."""
    error = error_of(served.complete(prompt=["a", 1]), 400)
    assert "a string, strings, token ids, or lists of token ids" in error["message"]
    error = error_of(served.chat(stop=["a"] * 65), 400)
    assert "at most 64 items" in error["message"]
    assert len(error["message"]) < 300  # a long value is not repeated in full
    error = error_of(served.chat(temperature="1"), 400)
    assert error["message"].startswith('temperature: Input should be a valid number (found "1")')
    error = error_of(served.chat(stream="yes"), 400)
    assert '(found "yes")' in error["message"]


def test_unknown_field_is_refused_by_name(served: Served):
    error = error_of(served.chat(temperatur=0.5), 400)
    assert error["param"] == "temperatur"
    assert "temperature" in error["message"]  # among the known fields


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"modalities": ["text", "audio"]},
        {"logit_processors": ["x"]},
        {"suffix": "tail"},
        {"guided_json": {}},
        {"min_tokens": 3},
    ],
)
def test_b079_fields_not_implemented_are_refused(served: Served, field: dict[str, Any]):
    (name,) = field
    error = error_of(served.chat(**field), 400)
    assert error["param"] == name
    assert "not supported" in error["message"]
    assert served.engine.requests == []


def test_fields_that_ask_for_nothing_are_accepted(served: Served):
    response = served.chat(
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        response_format={"type": "text"},
        modalities=["text"],
        suffix=None,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="k",
        temperature=None,
        stop=None,
        logit_bias=None,
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN}',
        b'{"a":' * 100_000,
        b"[" * 100_000,
    ],
)
def test_body_that_is_not_a_json_object_is_400(served: Served, body: bytes):
    response = served.http.post("/v1/chat/completions", content=body)
    error_of(response, 400)


def test_no_such_route_is_404_and_wrong_method_405(served: Served):
    error_of(served.http.get("/v1/nothing"), 404)
    response = served.http.get("/v1/chat/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_other_model_is_404_listing_the_served_one(served: Served):
    error = error_of(served.chat(model="gpt-4o"), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "toy" in error["message"]
    with pytest.raises(openai.NotFoundError):
        served.openai.chat.completions.create(model="gpt-4o", messages=served.ask)


def test_b126_prompt_over_the_context_is_400_with_limit_and_count(served: Served):
    # "user:" + 64 + ";assistant:" + the begin token, where the context holds 64.
    body = {"messages": [{"role": "user", "content": "x" * 64}]}
    for stream in (False, True):
        error = error_of(served.chat(**body, stream=stream), 400)
        assert error["code"] == "context_length_exceeded"
        assert "64 tokens" in error["message"]
        assert "81 tokens" in error["message"]
    with pytest.raises(openai.BadRequestError) as raised:
        served.openai.chat.completions.create(model="toy", messages=body["messages"])  # type: ignore[arg-type]
    assert raised.value.code == "context_length_exceeded"
    assert served.engine.requests == []


def test_b124_prompt_of_exactly_the_context_less_one_is_untouched(served: Served):
    served.complete(prompt=[97] * 64)
    assert served.engine.requests == []
    assert served.complete(prompt=[97] * 63).status_code == 200
    assert served.engine.requests[0].prompt_token_ids == (97,) * 63


def test_refusal_by_the_engine_keeps_its_status_in_a_stream(served: Served):
    """The response starts with the first event, so an early refusal is not an open stream."""
    served.script(lambda r: [Fail(RequestError("too many", param="n"))])
    assert error_of(served.chat(stream=True), 400)["param"] == "n"


def test_b120_allocation_failure_is_that_requests_error(served: Served):
    served.script(lambda r: [Fail(DoesNotFitError("an allocation of 5 MB failed"))])
    assert error_of(served.chat(), 503)["code"] == "out_of_memory"
    served.script(lambda r: say(r, ["fine"]))
    assert served.chat().status_code == 200


def test_unexpected_exception_is_500_without_its_text(served: Served):
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("secret")

    served.script(broken)
    error = error_of(served.chat(), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]


def test_failures_from_the_engine_get_their_class_back():
    failed = RequestFailed("r", "bad", hint="h", param="p", code="c", error_class="RequestError")
    error = error_from(failed)
    assert type(error) is RequestError
    assert (error.message, error.hint, error.param, error.code) == ("bad", "h", "p", "c")
    assert type(error_from(RequestFailed("r", "x", error_class="ConfigError"))) is ConfigError
    for name in ("SystemExit", "outcome_of", "dataclass", "OUTCOMES", "nothing"):
        error = error_from(RequestFailed("r", "x", error_class=name))
        assert type(error).__name__ == "InternalError"


def test_loading_and_dead_engines_answer_503():
    engine = ScriptedClient(lambda r: say(r, ["ok"]))
    app = create_app(engine, None)
    with serving(app) as base, httpx.Client(base_url=base) as http:
        engine.state = EngineState(Phase.LOADING, "weights", 0.25)
        response = http.post("/v1/chat/completions", json=ASK)
        error = error_of(response, 503)
        assert error["code"] == "loading"
        assert "weights, 25%" in error["message"]
        assert response.headers["retry-after"] == "2"
        health = http.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "stage": "weights", "fraction": 0.25}

        engine.state = EngineState(Phase.READY)
        assert http.get("/health").json()["stage"] == "tokenizer"
        assert error_of(http.get("/v1/models"), 503)["code"] == "loading"
        app.state.services.frontend = ByteFrontend()
        assert http.get("/health").status_code == 200

        engine.state = EngineState(Phase.DEAD, error=EngineDeadError("killed by signal 9"))
        error = error_of(http.post("/v1/chat/completions", json=ASK), 503)
        assert error["code"] == "engine_dead"
        assert "killed by signal 9" in error["message"]
        health = http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "dead"


def test_api_key_in_both_header_styles():
    app = create_app(
        ScriptedClient(lambda r: say(r, ["ok"])), ByteFrontend(), ServerSettings(api_key="k-ä")
    )
    raw = "k-ä".encode()
    with serving(app) as base, httpx.Client(base_url=base) as http:
        right = [{"authorization": b"Bearer " + raw}, {"x-api-key": raw}]
        wrong = [{}, {"authorization": b"Bearer no"}, {"x-api-key": b"k"}, {"authorization": raw}]
        for headers in right:
            assert http.get("/v1/models", headers=headers).status_code == 200
            assert http.post("/v1/chat/completions", json=ASK, headers=headers).status_code == 200
        for headers in wrong:
            error = error_of(http.get("/v1/models", headers=headers), 401)
            assert error["code"] == "invalid_api_key"
            assert http.get("/metrics", headers=headers).status_code == 401
        assert http.get("/health").status_code == 200


def test_body_over_the_limit_is_413():
    app = create_app(
        ScriptedClient(lambda r: say(r, ["ok"])),
        ByteFrontend(),
        ServerSettings(max_body_nbytes=200),
    )

    def parts() -> Any:
        for _ in range(10):
            yield b" " * 50

    with serving(app) as base, httpx.Client(base_url=base) as http:
        url = "/v1/chat/completions"
        error_of(http.post(url, content=b" " * 201), 413)
        error_of(http.post(url, content=parts()), 413)  # chunked: no declared length
        assert http.post(url, json=ASK).status_code == 200


def test_cors_for_listed_origins_only():
    app = create_app(
        ScriptedClient(lambda r: say(r, ["ok"])),
        ByteFrontend(),
        ServerSettings(cors_origins=("https://app.example",), api_key="k"),
    )
    with serving(app) as base, httpx.Client(base_url=base) as http:
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        good = http.options(
            "/v1/chat/completions", headers={"origin": "https://app.example", **preflight}
        )
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://app.example"
        bad = http.options(
            "/v1/chat/completions", headers={"origin": "https://evil.example", **preflight}
        )
        assert bad.status_code == 400
        refused = http.get("/v1/models", headers={"origin": "https://app.example"})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_browser_form_post_is_refused(served: Served):
    """Browsers send text/plain across origins without asking first."""
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    content = b'{"messages": [{"role": "user", "content": "hi"}]}'
    error_of(served.http.post("/v1/chat/completions", content=content, headers=headers), 400)
    assert served.engine.requests == []
    del headers["origin"]
    response = served.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 200


def test_a_key_that_stands_twice_is_refused(served: Served):
    body = b'{"model": "toy", "prompt": "a", "prompt": "b"}'
    headers = {"content-type": "application/json"}
    response = served.http.post("/v1/completions", content=body, headers=headers)
    assert "'prompt' stands twice" in error_of(response, 400)["message"]
