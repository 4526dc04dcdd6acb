"""Whole event streams, byte for byte, but for the id and the time.

The expected streams lie in ``sse/``; they were written by hand from the OpenAI API's reference.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.core.errors import DoesNotFitError
from headrace.core.request import FinishReason, GenerationRequest
from headrace.server.app import create_app
from headrace.server.settings import ServerSettings
from tests.fixtures.http_server import serving
from tests.fixtures.scripted import ByteFrontend, Fail, ScriptedClient, Wait, say

FOLDER = Path(__file__).parent / "sse"
ASK = {"messages": [{"role": "user", "content": "hi"}]}


def words(request: GenerationRequest) -> list[Any]:
    return say(request, ["Hé", "llo"], finish=FinishReason.LENGTH, cached=4)


def two_choices(request: GenerationRequest) -> list[Any]:
    a, b = say(request, ["a", "b"], index=0)
    return [a, *say(request, ["c"], index=1, usage=False), b]


def breaks(request: GenerationRequest) -> list[Any]:
    return [say(request, ["a", "b"])[0], Fail(DoesNotFitError("no memory", hint="use less"))]


def slow(request: GenerationRequest) -> list[Any]:
    return [Wait(0.3), *say(request, ["a"])]


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "chat": (words, "/v1/chat/completions", ASK),
    "chat_usage": (
        words,
        "/v1/chat/completions",
        {**ASK, "stream_options": {"include_usage": True}},
    ),
    "chat_logprobs": (words, "/v1/chat/completions", {**ASK, "logprobs": True, "top_logprobs": 1}),
    "chat_two_choices": (two_choices, "/v1/chat/completions", {**ASK, "n": 2}),
    "chat_error": (breaks, "/v1/chat/completions", ASK),
    "chat_keepalive": (slow, "/v1/chat/completions", ASK),
    "completion_echo": (words, "/v1/completions", {"prompt": "p", "echo": True}),
    "completion_two_prompts": (
        lambda r: [*([Wait(0.05)] if r.prompt_token_ids[-1] == 98 else []), *say(r, ["x"])],
        "/v1/completions",
        {"prompt": ["a", "b"], "stream_options": {"include_usage": True}},
    ),
}


def read(script: Any, path: str, body: dict[str, Any]) -> str:
    keepalive_s = 0.2 if script is slow else 60.0
    app = create_app(
        ScriptedClient(script), ByteFrontend(), ServerSettings(keepalive_s=keepalive_s)
    )
    with serving(app) as base:
        response = httpx.post(f"{base}{path}", json={**body, "stream": True}, timeout=10)
    text = response.content.decode()
    text = re.sub(r"^(: keep-alive\n\n)+", r"\1", text)  # a stalled machine may wait for two
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1-X"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


@pytest.mark.parametrize("name", CASES)
def test_stream_is_the_golden_one(name: str):
    assert read(*CASES[name]) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_joined_text_does_not_depend_on_the_cuts():
    """The same reply in pieces of 1 to 7 characters; characters outside ASCII included."""
    reply = "naïve 🙂 line\r\nbreak\n\ndata: [DONE]\n\n: no comment \u2028 end"
    sizes: list[int] = []

    def cut(request: GenerationRequest) -> list[Any]:
        size = sizes[-1]
        return say(request, [reply[i : i + size] for i in range(0, len(reply), size)])

    app = create_app(ScriptedClient(cut), ByteFrontend())
    with serving(app) as base, httpx.Client(base_url=base) as http:
        for size in range(1, 8):
            sizes.append(size)
            raw = http.post("/v1/chat/completions", json={**ASK, "stream": True}).content
            events = raw.split(b"\n\n")
            assert events[-2:] == [b"data: [DONE]", b""]
            chunks = [json.loads(e.removeprefix(b"data: ")) for e in events[:-2]]
            deltas = [c["choices"][0]["delta"] for c in chunks]
            assert "".join(d.get("content", "") for d in deltas) == reply
            plain = http.post("/v1/chat/completions", json=ASK).json()
            assert plain["choices"][0]["message"]["content"] == reply
