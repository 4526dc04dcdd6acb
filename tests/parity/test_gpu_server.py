"""``headrace serve`` on a GPU: experts on both paths, sealed pages in captured steps, two streams at once."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.toy import write_gpt_oss
from tests.fixtures.toy_gpt_oss import GptOssSize

pytestmark = [
    pytest.mark.gpu,
    needs_native,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("uvicorn") is None, reason="the server is not installed"
    ),
]
ROOT = Path(__file__).parents[2]
SERVE = (sys.executable, "-m", "headrace.cli.main", "serve")
FLAGS = (
    *("--device", "cuda", "--dense-format", "f32", "--experts", "hybrid", "--expert-slots", "60"),
    *("--kv-format", "nvfp4k-fp8v", "--block-tokens", "16", "--context", "512"),
    *("--vram-budget", "4GiB", "--threads", "2", "-v"),
)
START_S = 150.0  # kernels are compiled for the first time


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


@contextmanager
def serving(folder: Path) -> Iterator[httpx.Client]:
    """A server over a toy in ``folder``; its log is shown if it does not come up."""
    size = GptOssSize(layers=4, experts=16, hidden=128, intermediate=192)
    model = write_gpt_oss(folder / "toy", size=size).path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log.txt"
    python_path = os.pathsep.join(
        [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*SERVE, str(model), *FLAGS, "--port", str(port)],
            stderr=sink, stdout=sink, env={**os.environ, "PYTHONPATH": python_path},
        )  # fmt: skip
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(ready, START_S)
        yield http
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        http.close()
        if process.poll() is None:
            process.kill()
            process.wait(10)


def stream(http: httpx.Client, prompt: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """The text of a streamed completion and its usage."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, usage = "", dict[str, Any]()
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            text += "".join(choice["text"] for choice in event["choices"])
    return text, usage


def metrics(http: httpx.Client) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_two_streams_with_a_shared_beginning(tmp_path: Path):
    stem = [(11 * i) % 250 for i in range(64)]
    prompts = [[*stem, 3, 5], [*stem, 9]]
    with serving(tmp_path) as http:
        alone = [stream(http, prompt, 100) for prompt in prompts]
        # The second finds the pages of the first: 64 tokens are 4 sealed pages.
        assert alone[1][1]["prompt_tokens_details"]["cached_tokens"] == 64
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda p: stream(http, p, 100), prompts))
        for one, other in zip(alone, both, strict=True):
            assert one[1]["completion_tokens"] == other[1]["completion_tokens"] > 0
            assert other[1]["prompt_tokens_details"]["cached_tokens"] >= 64
            assert other[0][:20] == one[0][:20]

        def settled() -> bool:  # counters come with the engine's next report
            return metrics(http)["headrace_prefix_hit_tokens_total"] >= 3 * 64

        wait_until(settled, 10)
        seen = metrics(http)
        assert seen["headrace_expert_lookups_total"] > seen["headrace_expert_hits_total"] > 0
        assert seen["headrace_expert_restarts_total"] == 0
        assert seen["headrace_requests_running"] == 0
