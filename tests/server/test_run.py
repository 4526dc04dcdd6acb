"""``serve`` as a program: port, loading, signals, exit codes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headrace.core.errors import ConfigError
from headrace.server.run import bind, served_name
from tests.fixtures.http_server import wait_until

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from headrace.core.config import EngineConfig
from headrace.server.run import serve
from headrace.server.settings import ServerSettings
from tests.fixtures.fake_worker import toy_parts
if __name__ == "__main__":
    code = serve(EngineConfig(sys.argv[1]), port=int(sys.argv[2]), parts=toy_parts())
    assert "torch" not in sys.modules
    sys.exit(code)
"""
ASK = {"messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def program(model: str, tmp_path: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "serve_it.py"
    script.write_text(CODE)
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, str(script), model, str(port)], stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def get(url: str) -> httpx.Response | None:
    try:
        return httpx.get(url)
    except httpx.TransportError:
        return None


def test_serves_while_loading_then_ready_then_ends_on_sigterm(tmp_path: Path):
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with program("slow", tmp_path, port) as process:
        wait_until(lambda: get(f"{base}/health") is not None, 30)
        health = httpx.get(f"{base}/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert httpx.post(f"{base}/v1/chat/completions", json=ASK).status_code == 503
        wait_until(lambda: httpx.get(f"{base}/health").status_code == 200, 30)
        assert httpx.get(f"{base}/v1/models").json()["data"][0]["id"] == "slow"
        reply = httpx.post(f"{base}/v1/chat/completions", json=ASK).json()
        assert reply["choices"][0]["message"]["content"] == "one two three"

        lines: list[str] = []

        def read() -> None:
            body = {"prompt": "w", "stream": True}
            with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=20) as response:
                lines.extend(response.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        metrics = f"{base}/metrics"
        wait_until(lambda: "headrace_requests_running 1.0" in httpx.get(metrics).text)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        reader.join()
        assert process.returncode == 0, log
        assert time.monotonic() - start < 5
        assert "shutting down" in "".join(lines)  # the open stream was told
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert f"headrace: slow is ready: {base}/v1" in log
        assert "loading slow: weights" in log
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("model", "code", "text"), [("fatal", 2, "cut short"), ("dies", 4, "exit code 7")]
)
def test_loading_failure_ends_with_its_code(tmp_path: Path, model: str, code: int, text: str):
    with program(model, tmp_path, free_port()) as process:
        _, log = process.communicate(timeout=30)
        assert process.returncode == code, log
        assert text in log
        assert "hint: " in log
        assert "Traceback" not in log


def test_b120_health_turns_503_when_the_engine_is_killed(tmp_path: Path):
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with program("good", tmp_path, port) as process:
        wait_until(lambda: (r := get(f"{base}/health")) is not None and r.status_code == 200, 30)
        response = httpx.post(f"{base}/v1/completions", json={"prompt": "k"}, timeout=10)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
        health = httpx.get(f"{base}/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        response = httpx.post(f"{base}/v1/completions", json={"prompt": "x"}, timeout=10)
        assert response.status_code == 503
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 4, log


def test_port_in_use_is_said():
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}") as raised:
            bind("127.0.0.1", port)
        assert "--port" in str(raised.value.hint)


def test_unknown_host_is_said():
    with pytest.raises(ConfigError, match="no-such-host"):
        bind("no-such-host.invalid", 0)


def test_served_name(tmp_path: Path):
    (tmp_path / "Tiny-Q4.gguf").touch()
    assert served_name(str(tmp_path / "Tiny-Q4.gguf")) == "Tiny-Q4"
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("org/name") == "org/name"
