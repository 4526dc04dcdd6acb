"""One server per test module; the script of its engine is set by each test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from headrace.server.app import create_app
from headrace.server.settings import ServerSettings
from tests.fixtures.http_server import serving
from tests.fixtures.scripted import ByteFrontend, Script, ScriptedClient, say


@dataclass
class Served:
    """A running server, its scripted engine and two clients."""

    engine: ScriptedClient
    frontend: ByteFrontend
    app: Any
    base: str
    http: httpx.Client
    openai: openai.OpenAI
    ask: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": "hi"}])

    def script(self, script: Script) -> None:
        self.engine.script = script

    def chat(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": self.ask, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "ab", **fields})

    def chunks(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        import json

        with self.http.stream("POST", path, json={"stream": True, **fields}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1] if line.startswith("data:")]


@pytest.fixture(scope="module")
def _running() -> Iterator[Served]:
    engine = ScriptedClient(lambda request: say(request, ["ok"]))
    frontend = ByteFrontend()
    app = create_app(engine, frontend, ServerSettings(keepalive_s=30))
    with serving(app) as base:
        with (
            httpx.Client(base_url=base, timeout=10) as http,
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
        ):
            yield Served(engine, frontend, app, base, http, client)


@pytest.fixture
def served(_running: Served) -> Served:
    _running.script(lambda request: say(request, ["ok"]))
    _running.engine.requests.clear()
    _running.engine.cancelled.clear()
    return _running
