"""``headrace serve``: its flags reach the server."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from headrace.cli.main import main


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def serve(config: Any, settings: Any, *, host: str, port: int) -> int:
        calls.append({"config": config, "settings": settings, "host": host, "port": port})
        return 0

    module = ModuleType("headrace.server.run")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace.server.run", module)
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    return calls


def test_defaults_are_loopback_and_open(served: list[dict[str, Any]]) -> None:
    assert main(["serve", "toy"]) == 0
    (call,) = served
    assert (call["host"], call["port"]) == ("127.0.0.1", 8000)
    assert call["settings"].api_key is None
    assert call["settings"].stuck_s == 600
    assert call["config"].model == "toy"


def test_flags(served: list[dict[str, Any]]) -> None:
    flags = ["--host", "::1", "--port", "0", "--api-key", "k", "--model-name", "a"]
    flags += ["--model-name", "b", "--cors-origin", "*", "--max-num-seqs", "4"]
    flags += [
        "--stuck-after",
        "90.5",
        "--max-batch-tokens",
        "256",
        "--kv-tokens",
        "4096",
        "--context",
        "512",
    ]
    assert main(["serve", "toy", *flags]) == 0
    (call,) = served
    settings, config = call["settings"], call["config"]
    assert (call["host"], call["port"]) == ("::1", 0)
    assert (settings.api_key, settings.model_ids) == ("k", ("a", "b"))
    assert settings.cors_origins == ("*",)
    assert settings.stuck_s == 90.5
    assert (config.max_num_seqs, config.max_batch_tokens) == (4, 256)
    assert (config.kv_tokens, config.context) == (4096, 512)


def test_the_key_may_come_from_the_environment(
    served: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    assert main(["serve", "toy"]) == 0
    assert served[0]["settings"].api_key == "secret"


def test_an_open_door_is_said(
    served: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "toy", "--host", "0.0.0.0"]) == 0
    assert "no --api-key is set" in capsys.readouterr().err
    assert main(["serve", "toy", "--host", "0.0.0.0", "--api-key", "k"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_an_empty_key_is_refused(
    served: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "toy", "--api-key", ""]) == 2
    assert served == []
    assert "--api-key is empty" in capsys.readouterr().err


@pytest.mark.parametrize("blank", ["", " "])
def test_a_variable_that_was_not_filled_in_opens_no_door(
    served: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    blank: str,
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", blank)
    assert main(["serve", "toy"]) == 2
    assert served == []
    assert "HEADRACE_API_KEY is empty" in capsys.readouterr().err
    assert main(["serve", "toy", "--api-key", "k"]) == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model-name", ""),
        ("--model-name", "  "),
        ("--cors-origin", ""),
        ("--cors-origin", "chat.example.com"),
        ("--cors-origin", "https://chat.example.com/"),
    ],
)
def test_names_that_no_request_carries_are_refused(flag, value, capsys):
    assert main(["serve", "tiny", flag, value]) == 2
    assert flag in capsys.readouterr().err
