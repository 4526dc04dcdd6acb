"""``headrace run`` over a scripted engine."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli import run as run_module
from headrace.cli.main import main
from headrace.core.config import EngineConfig
from headrace.core.request import FinishReason
from headrace.core.trace import RoutingTrace
from headrace.machine.known import known_machine
from tests.fixtures.fake_engine import FakeEngine, FakeText, fake_session
from tests.fixtures.gguf_bytes import tiny_llama

Start = Callable[..., tuple[FakeEngine, FakeText, list[EngineConfig]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def build(engine: FakeEngine) -> tuple[FakeEngine, FakeText, list[EngineConfig]]:
        text, configs = FakeText(), []

        def open_session(config: EngineConfig, progress: object) -> object:
            configs.append(config)
            return fake_session(engine, text)

        monkeypatch.setattr(run_module, "open_session", open_session)
        return engine, text, configs

    return build


def test_answer_goes_to_stdout_and_nothing_else(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, text, configs = start(FakeEngine(["Par", "is", "."]))
    assert main(["run", "toy", "-p", "Capital of France?", "--context", "64"]) == 0
    assert capsys.readouterr() == ("Paris.\n", "")
    assert text.seen == [[{"role": "user", "content": "Capital of France?"}]]
    assert configs[0].context == 64
    (request,) = engine.requests
    assert request.prompt_token_ids == (1, 7, 2, 7)
    assert request.sampling.temperature == 0.0
    assert engine.closed


def test_json_object(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(FakeEngine(["Zürich", "!"], finish=FinishReason.LENGTH))
    assert main(["run", "toy", "-p", "a bb", "--json", "--max-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert list(answer) == ["text", "token_ids", "finish_reason", "prompt_tokens", "timings"]
    assert answer["text"] == "Zürich!"
    assert answer["token_ids"] == [1000, 1001]
    assert (answer["finish_reason"], answer["prompt_tokens"]) == ("length", 3)
    assert set(answer["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert answer["timings"]["load_s"] == 0.5


def test_sampling_flags_reach_the_engine(start: Start) -> None:
    engine, _, _ = start(FakeEngine(["x"]))
    flags = ["--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1"]
    flags += ["--seed", "7", "--stop", "a", "--stop", "b", "--max-tokens", "5"]
    assert main(["run", "toy", "-p", "q", *flags]) == 0
    s = engine.requests[0].sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p) == (0.5, 4, 0.9, 0.1)
    assert (s.seed, s.stop, s.max_tokens) == (7, ("a", "b"), 5)


def test_machine_flags_reach_the_configuration(start: Start) -> None:
    _, _, configs = start(FakeEngine(["x"]))
    flags = ["--ram-budget", "2GiB", "--vram-budget", "500MB", "--threads", "3"]
    flags += ["--kv-format", "bf16", "--experts", "cpu", "--block-tokens", "32"]
    flags += ["--backend", "reference", "--no-prefix-cache", "--repair-nan-scales"]
    assert main(["run", "toy", "-p", "q", *flags]) == 0
    assert configs == [
        EngineConfig(
            model="toy",
            threads=3,
            ram_budget_nbytes=2 * 2**30,
            vram_budget_nbytes=500_000_000,
            kv_format="bf16",
            experts="cpu",
            block_tokens=32,
            prefix_cache=False,
            backend="reference",
            repair_nan_scales=True,
        )
    ]


def test_raw_and_system(start: Start) -> None:
    engine, text, _ = start(FakeEngine(["x"]))
    assert main(["run", "toy", "--raw", "-p", "one three"]) == 0
    assert engine.requests[0].prompt_token_ids == (3, 5)
    assert main(["run", "toy", "--system", "Be brief.", "-p", "hi"]) == 0
    assert text.seen[-1][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("flags", [["-p", "-"], []])
def test_prompt_from_stdin(start: Start, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    _, text, _ = start(FakeEngine(["x"]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("hé\n".encode())))
    assert main(["run", "toy", *flags]) == 0
    assert text.seen == [[{"role": "user", "content": "hé\n"}]]


def test_stdin_that_is_not_text(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(FakeEngine(["x"]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert main(["run", "toy", "-p", "-"]) == 2
    assert "byte 2 is 0xff" in capsys.readouterr().err


def test_ctrl_c_cancels_between_steps(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    def press(step: int) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    engine, _, _ = start(FakeEngine(["a", "b", "c", "d"], before_step=press))
    before = signal.getsignal(signal.SIGINT)
    assert main(["run", "toy", "-p", "q"]) == 130
    assert capsys.readouterr().out == "ab\n"  # the step that was running finished
    assert engine.cancelled == ["cli-0"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failed_request_keeps_its_class(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    engine, _, _ = start(FakeEngine(["a", "b"], fail_at=1))
    assert main(["run", "toy", "-p", "q"]) == 3
    assert "headrace: error: the pool is gone\nhint: restart" in capsys.readouterr().err
    assert engine.closed


def test_too_long_a_prompt(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(FakeEngine(["a"], context=3))
    assert main(["run", "toy", "-p", "one two three four"]) == 2
    assert "the prompt has 5 tokens" in capsys.readouterr().err


def test_a_full_context_is_said(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(FakeEngine(["a"], finish=FinishReason.LENGTH))
    assert main(["run", "toy", "-p", "q"]) == 0
    assert "the context is full" in capsys.readouterr().err


def test_verbose_prints_choices(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(FakeEngine(["a"]))
    assert main(["run", "toy", "-p", "q", "-v"]) == 0
    assert "threads = 2 (2 cores)" in capsys.readouterr().err


def test_the_routing_of_a_run_can_be_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, box = tmp_path / "routing.npz", tmp_path / "box.json"
    words = ["--raw", "--max-tokens", "12", "--threads", "1", "--routing", str(file)]
    assert main(["run", "tiny", "-p", "The American people", *words]) == 0
    trace = RoutingTrace.load(file)
    assert trace.meta.num_experts == 32
    assert trace.ids.shape[0] == 8
    assert trace.ids.shape[1] >= 12 + 2  # prompt, and all tokens but the last
    small = known_machine("rtx-4090")
    assert small.gpu is not None
    room = 768 * 2**20 + 8 * 10**6  # the reserve, and less than the model's 12 MB
    replace(small, gpu=replace(small.gpu, memory_nbytes=room)).save(box)
    tokens = trace.ids.shape[1]
    told = capsys.readouterr().err
    assert f"the routing of {tokens} tokens is in {file}" in told
    assert f"{tokens} tokens of routing say little" in told
    plan = ["plan", "tiny", "--machine", str(box), "--context", "64", "--routing", str(file)]
    assert main(plan) == 0
    text = capsys.readouterr().out
    assert f"tok/s over {tokens - tokens // 4} tokens of the {tokens} recorded" in text
    assert f"caution: {tokens} tokens of routing say little" in text
    assert main([*plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["replayed"]
    assert found["num_steps"] == tokens - tokens // 4
    assert found["recorded_tokens"] == tokens
    assert "say little" in found["caution"]
    assert 0 <= found["hit_rate"] <= 1
    assert found["tokens_s"] > 0


def test_a_routing_needs_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "dense.gguf"
    file.write_bytes(tiny_llama().to_bytes())
    assert main(["run", str(file), "-p", "x", "--routing", str(tmp_path / "r.npz")]) == 2
    assert "has no experts to choose from" in capsys.readouterr().err
