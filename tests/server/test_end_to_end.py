"""The whole path with a toy mixture: command line, HTTP, engine process, model, and back."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.fixtures.http_server import wait_until
from tests.fixtures.toy import write_qwen3_moe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("headrace.engine.worker") is None
    or importlib.util.find_spec("headrace.checkpoint.open") is None,
    reason="needs the engine",
)

ROOT = Path(__file__).parents[2]
CONTEXT = 256


@dataclass
class Live:
    """A running ``headrace serve`` and two clients of it."""

    process: subprocess.Popen[bytes]
    log: Path
    base: str
    http: httpx.Client
    openai: openai.OpenAI

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12}
        response = self.http.post("/v1/chat/completions", json={**body, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, prompt: str, **fields: Any) -> str:
        return self.chat(prompt, **fields)["choices"][0]["message"]["content"]

    def metric(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.rsplit(" ", 1)[0] == f"headrace_{name}":
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")


@contextmanager
def serving_toy(folder: Path) -> Iterator[Live]:
    write_qwen3_moe(folder / "toy-moe", "bf16")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "headrace.cli", "serve", str(folder / "toy-moe")]
    command += ["--port", str(port), "--context", str(CONTEXT), "--threads", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    log = folder / "log.txt"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=env)
    base = f"http://127.0.0.1:{port}"
    try:
        with (
            httpx.Client(base_url=base, timeout=60) as http,
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
        ):

            def healthy() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return http.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(healthy, 60)
            yield Live(process, log, base, http, client)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving_toy(tmp_path_factory.mktemp("served")) as running:
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=30) == 0, running.log.read_text()
        assert "Traceback" not in running.log.read_text()


def test_streamed_and_plain_replies_are_the_same(live: Live):
    ask: Any = [{"role": "user", "content": "hello world"}]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logprobs": True}
    plain = live.openai.chat.completions.create(model="toy-moe", messages=ask, **fields)
    chunks = list(
        live.openai.chat.completions.create(
            model="toy-moe",
            messages=ask,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
    )
    joined = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert joined == plain.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [plain.choices[0].finish_reason]
    assert plain.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    streamed = [
        e.logprob
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for e in c.choices[0].logprobs.content or []
    ]
    assert plain.choices[0].logprobs is not None
    assert streamed == [e.logprob for e in plain.choices[0].logprobs.content or []]
    assert len(streamed) == plain.usage.completion_tokens


def test_b034_token_count_is_the_prompts(live: Live):
    messages = [{"role": "user", "content": "the world and a hello"}]
    count = live.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert live.chat("the world and a hello")["usage"]["prompt_tokens"] == count


def test_limits_end_with_length(live: Live):
    reply = live.chat("hi", ignore_eos=True, max_tokens=8)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 8


def test_b127_context_ends_with_length(live: Live):
    reply = live.chat("hi", ignore_eos=True, max_tokens=None)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == CONTEXT


def test_b126_overflow_is_refused(live: Live):
    body = {"messages": [{"role": "user", "content": "z" * CONTEXT}]}
    error = live.http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_b131_parallel_prompts_get_their_own_answers(live: Live):
    prompts = [f"prompt number {i} says {chr(97 + i) * (i + 1)}" for i in range(16)]
    alone = [live.text(p) for p in prompts]
    assert len(set(alone)) > 1
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(live.text, prompts))
    assert together == alone


def test_cached_prompt_gives_the_same_answer(live: Live):
    prompt = "a long enough prompt that fills several blocks " * 3
    cold = live.chat(prompt)
    warm = live.chat(prompt)
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    salted = live.chat(prompt, cache_salt="other")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["choices"] == cold["choices"]


def test_b081_seed_does_not_depend_on_neighbours(live: Live):
    sampled = {"temperature": 1.0, "seed": 42, "max_tokens": 12, "ignore_eos": True}
    alone = live.text("seeded", **sampled)
    assert live.text("seeded", **{**sampled, "seed": 43}) != alone
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        mine = pool.submit(live.text, "seeded", **sampled)
        for _ in range(3):
            pool.submit(live.text, "neighbour", temperature=1.0)
    assert mine.result() == alone


def test_two_choices(live: Live):
    reply = live.chat("hi", n=2, temperature=1.0, seed=1, ignore_eos=True, max_tokens=6)
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["choices"][0]["message"] != reply["choices"][1]["message"]


def test_echo_scores_the_prompt(live: Live):
    """What lm-eval asks: the prompt's log-probabilities equal those of generating it."""
    body = {"prompt": [[104, 101, 121]], "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    made = live.http.post("/v1/completions", json={**body, "logprobs": 1}).json()
    again = {**body, "echo": True, "logprobs": 1, "max_tokens": 1}
    made_logprobs = made["choices"][0]["logprobs"]
    tokens = live.http.post("/v1/completions", json=again).json()["choices"][0]["logprobs"]
    assert tokens["token_logprobs"][0] is None
    assert all(math.isfinite(v) and v <= 0 for v in tokens["token_logprobs"][1:])
    # The token that greedy generation chose first is the same, with the same value.
    assert tokens["tokens"][3] == made_logprobs["tokens"][0]
    assert tokens["token_logprobs"][3] == made_logprobs["token_logprobs"][0]


def test_b130_after_an_abort_the_next_answer_is_untouched(live: Live):
    before = live.text("a quiet question")
    aborted = live.metric("requests_aborted_total")
    body = {
        "messages": [{"role": "user", "content": "an interrupted one"}],
        "stream": True,
        "ignore_eos": True,
    }
    for _ in range(5):
        with live.http.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
        assert live.text("a quiet question") == before
    wait_until(lambda: live.metric("requests_aborted_total") == aborted + 5)
    wait_until(lambda: live.metric("requests_running") == 0)
    assert live.metric("requests_waiting") == 0
    assert live.metric("kv_blocks_used") == 0


def test_b077_next_request_is_served(live: Live):
    body = {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999": 5}}
    assert live.http.post("/v1/chat/completions", json=body).status_code == 400
    assert live.chat("x")["choices"][0]["finish_reason"] in ("stop", "length")


def test_b120_killed_engine(tmp_path: Path):
    with serving_toy(tmp_path) as live:
        children = psutil.Process(live.process.pid).children(recursive=True)
        engines = [p for p in children if "spawn_main" in " ".join(p.cmdline())]
        assert len(engines) == 1
        engines[0].kill()
        wait_until(lambda: live.http.get("/health").status_code == 503)
        body = {"messages": [{"role": "user", "content": "x"}]}
        response = live.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
