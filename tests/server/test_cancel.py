"""A client that goes away stops its request, wherever the request is and however it was sent."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest

from headrace.core.request import GenerationRequest
from tests.fixtures.http_server import wait_until
from tests.fixtures.scripted import Stall, say

from .conftest import Served


def silent(request: GenerationRequest) -> list[Any]:
    """Waiting in the queue or in prefill: no output at all."""
    return [Stall()]


def one_then_stall(request: GenerationRequest) -> list[Any]:
    return [say(request, ["a", "b"])[0], Stall()]


@pytest.mark.parametrize("phase", [silent, one_then_stall])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_b130_disconnect_cancels(served: Served, phase: Any, stream: bool, path: str):
    served.script(phase)
    body = {"messages": served.ask} if "chat" in path else {"prompt": ["a", "b"]}
    num_requests = 1 if "chat" in path else 2
    text = httpx.Request("POST", served.base + path, json={**body, "stream": stream})
    port = int(served.base.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text.content)}\r\n\r\n"
        sock.sendall(head.encode() + text.content)
        wait_until(lambda: len(served.engine.open) == num_requests)
        assert served.engine.cancelled == []
        left = time.monotonic()
    wait_until(lambda: len(served.engine.cancelled) == num_requests)
    assert time.monotonic() - left < 1.0
    assert served.engine.open == set()


def metric(served: Served, name: str) -> float:
    for line in served.http.get("/metrics").text.splitlines():
        if line.rsplit(" ", 1)[0] == name:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def test_b154_gauges_are_zero_after_cancel_without_new_traffic(served: Served):
    served.script(one_then_stall)
    with served.http.stream(
        "POST", "/v1/chat/completions", json={"messages": served.ask, "stream": True}
    ) as response:
        lines = response.iter_lines()  # dropping the iterator would close the connection
        next(lines)
        assert metric(served, "headrace_requests_running") == 1
        assert metric(served, "headrace_kv_blocks_used") == 4
    wait_until(lambda: bool(served.engine.cancelled))
    assert metric(served, "headrace_requests_running") == 0
    assert metric(served, "headrace_kv_blocks_used") == 0


def test_b155_aborted_streams_are_counted(served: Served):
    before = metric(served, "headrace_requests_aborted_total")
    tokens = metric(served, "headrace_generation_tokens_total")
    served.script(one_then_stall)
    for _ in range(5):
        with served.http.stream(
            "POST", "/v1/chat/completions", json={"messages": served.ask, "stream": True}
        ) as response:
            lines = response.iter_lines()
            while '"a"' not in next(lines):
                pass
    wait_until(lambda: len(served.engine.cancelled) == 5)
    assert metric(served, "headrace_requests_aborted_total") == before + 5
    assert metric(served, "headrace_generation_tokens_total") == tokens + 5
