"""Streamed chat replies over real HTTP, read by the openai client and as raw lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai

from headrace.core.errors import DoesNotFitError
from headrace.core.request import GenerationRequest, OutputDelta
from headrace.server.app import create_app
from headrace.server.settings import ServerSettings
from tests.fixtures.http_server import serving, wait_until
from tests.fixtures.scripted import ByteFrontend, Fail, ScriptedClient, Stall, Wait, say

ASK = [{"role": "user", "content": "hi"}]


def hello(request: GenerationRequest) -> list[Any]:
    return say(request, ["Hel", "lo ", "wörld"], cached=2)


def lines_of(base: str, body: dict[str, Any]) -> list[str]:
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=10) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(response.iter_lines())


def chunks_of(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_openai_client_reads_a_stream():
    with serving(create_app(ScriptedClient(hello), ByteFrontend())) as base:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        chunks = list(client.chat.completions.create(model="toy", messages=ASK, stream=True))
        client.close()
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello wörld"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_b060_one_finish_reason_per_choice_then_done():
    def two(request: GenerationRequest) -> list[Any]:
        start, end = say(request, ["a", "b"], index=0)
        return [start, *say(request, ["c"], index=1, usage=False), end]

    with serving(create_app(ScriptedClient(two), ByteFrontend())) as base:
        lines = lines_of(base, {"messages": ASK, "stream": True, "n": 2})
    reasons = [c["choices"][0] for c in chunks_of(lines)]
    for index in (0, 1):
        given = [r["finish_reason"] for r in reasons if r["index"] == index]
        assert [r for r in given if r is not None] == ["stop"]
        assert given[-1] == "stop"
    assert [line for line in lines if line][-1] == "data: [DONE]"


def test_b060_error_inside_a_stream_is_an_event_then_done():
    def fails(request: GenerationRequest) -> list[Any]:
        return [*say(request, ["par", "tial"])[:1], Fail(DoesNotFitError("no memory", hint="less"))]

    with serving(create_app(ScriptedClient(fails), ByteFrontend())) as base:
        lines = [x for x in lines_of(base, {"messages": ASK, "stream": True}) if x]
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        try:
            list(client.chat.completions.create(model="toy", messages=ASK, stream=True))
        except openai.APIError as error:
            raised = error
        client.close()
    last = json.loads(lines[-2][6:])
    assert last["error"]["code"] == "out_of_memory"
    assert last["error"]["message"].startswith("no memory")
    assert lines[-1] == "data: [DONE]"
    assert "no memory" in raised.message


def test_b061_finish_reason_is_null_until_the_last_chunk():
    with serving(create_app(ScriptedClient(hello), ByteFrontend())) as base:
        lines = lines_of(base, {"messages": ASK, "stream": True})
    choices = [c["choices"][0] for c in chunks_of(lines)]
    assert all("finish_reason" in c for c in choices)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_b062_usage_chunk_only_when_asked():
    with serving(create_app(ScriptedClient(hello), ByteFrontend())) as base:
        body = {"messages": ASK, "stream": True}
        asked = chunks_of(lines_of(base, {**body, "stream_options": {"include_usage": True}}))
        for options in ({"include_usage": False}, {}, None):
            plain = chunks_of(lines_of(base, {**body, "stream_options": options}))
            assert all(len(c["choices"]) == 1 for c in plain)
            assert all("usage" not in c for c in plain)
    assert asked[-1]["choices"] == []
    # 24 bytes of "user:hi;assistant:" and the begin token make the prompt.
    prompt = 1 + len(b"user:hi;assistant:")
    assert asked[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "total_tokens": prompt + 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in asked[:-1])


def test_keepalive_comments_during_silence():
    def slow(request: GenerationRequest) -> list[Any]:
        return [Wait(0.35), *say(request, ["x"])]

    app = create_app(ScriptedClient(slow), ByteFrontend(), ServerSettings(keepalive_s=0.1))
    with serving(app) as base:
        lines = lines_of(base, {"messages": ASK, "stream": True})
    first_data = next(i for i, line in enumerate(lines) if line.startswith("data:"))
    assert lines[:first_data].count(": keep-alive") >= 2


def test_b064_comments_go_on_while_text_is_held_back():
    """Tokens come all the time, and none of their text: a stop string may have begun, or a character."""

    def held_back(request: GenerationRequest) -> list[Any]:
        *_, last = say(request, ["x"])
        silent = replace(last, text="", finish_reason=None, usage=None)
        first = OutputDelta(request.request_id, 0, "a", (97,))
        return [first, *[silent, Wait(0.02)] * 30, last]

    app = create_app(ScriptedClient(held_back), ByteFrontend(), ServerSettings(keepalive_s=0.1))
    with serving(app) as base:
        lines = [x for x in lines_of(base, {"messages": ASK, "stream": True}) if x]
    said = [i for i, line in enumerate(lines) if '"content":"' in line and '""' not in line]
    assert len(said) == 2
    between = lines[said[0] + 1 : said[1]]
    assert len(between) >= 3  # 0.6 s of silence; the event loop may be late, not early
    assert set(between) == {": keep-alive"}


def test_b155_stopping_to_read_cancels():
    def endless(request: GenerationRequest) -> list[Any]:
        return [*say(request, ["a", "b"])[:1], Stall()]

    engine = ScriptedClient(endless)
    with serving(create_app(engine, ByteFrontend())) as base:
        for _ in range(5):
            body = {"messages": ASK, "stream": True}
            url = f"{base}/v1/chat/completions"
            with httpx.stream("POST", url, json=body, timeout=10) as response:
                next(response.iter_lines())
        wait_until(lambda: len(engine.cancelled) == 5)
    assert engine.snapshot.requests_aborted_total == 5
    assert engine.snapshot.running == 0


def test_server_does_not_import_torch():
    code = "import sys, headrace.server.run; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=env).returncode == 0
