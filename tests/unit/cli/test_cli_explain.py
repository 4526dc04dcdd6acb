"""`headrace explain`."""

import importlib.util
import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.explain import leaf, report_png
from headrace.explain.report_png import write_png
from tests.golden.test_explain_table import report

RUN = [
    "explain",
    "tiny",
    "--device",
    "cpu",
    "--context",
    "128",
    "--prompt-tokens",
    "32",
    "--steps",
    "6",
    "--threads",
    "2",
]


def test_decode_with_the_kernels_prediction(capsys: pytest.CaptureFixture[str]):
    assert main([*RUN, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["phase"], data["tokens"], data["sequences"]) == ("decode", 1, 1)
    assert data["predicted_s"] > 0
    total = sum(row["measured_s"] for row in data["rows"]) + data["gap_s"]
    assert total == pytest.approx(data["step_s"])
    assert {leaf.EXPERTS_GPU, leaf.ATTENTION_DECODE, leaf.QKV} <= {
        row["id"] for row in data["rows"]
    }


def test_prefill_as_text(capsys: pytest.CaptureFixture[str]):
    assert main([*RUN, "--step", "prefill", "--no-probe"]) == 0
    text = capsys.readouterr().out
    assert "prefill of 1 sequence, 32 tokens after 0" in text
    assert "ROOFLINE" in text
    assert "unexplained" in text


def test_several_sequences(capsys: pytest.CaptureFixture[str]):
    assert main([*RUN, "--sequences", "3", "--no-probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == 3


def test_as_many_sequences_as_asked_for_run_at_once(capsys: pytest.CaptureFixture[str]):
    argv = [*RUN[:6], "--prompt-tokens", "8", "--steps", "4", "--no-probe", "--json"]
    assert main([*argv, "--sequences", "24"]) == 0  # more than the engine's own choice of 16
    said = capsys.readouterr()
    assert json.loads(said.out)["sequences"] == 24
    assert "only" not in said.err


def test_sequences_that_have_to_wait_are_told(capsys: pytest.CaptureFixture[str]):
    argv = [*RUN[:6], "--prompt-tokens", "100", "--steps", "4", "--no-probe", "--json"]
    assert main([*argv, "--sequences", "30"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["sequences"]
    assert found < 30
    assert f"only {found} of the 30 sequences" in said.err
    # 30 x 4 blocks of 32 tokens lie in a pool that holds 30 whole contexts: it was not the cache.
    assert "more --steps or fewer --prompt-tokens" in said.err
    assert "KV cache" not in said.err


def test_sequences_that_the_cache_cannot_hold_are_told(capsys: pytest.CaptureFixture[str]):
    argv = [
        *RUN[:4],
        "--context",
        "64",
        "--prompt-tokens",
        "32",
        "--steps",
        "16",
        "--no-probe",
        "--json",
    ]
    assert main([*argv, "--ram-budget", "560MB", "--sequences", "20"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["sequences"] < 20
    assert "no more fit into the KV cache; fewer --prompt-tokens or --steps" in said.err


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]):
    assert main([*RUN[:6], "--prompt-tokens", "200"]) == 2
    said = capsys.readouterr().err
    assert "do not fit the context of 128" in said
    assert "measuring" not in said


def test_png_without_matplotlib_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(report_png, "find_spec", lambda name: None)
    assert main([*RUN, "--no-probe", "--png", str(tmp_path / "roof.png")]) == 2
    error = capsys.readouterr().err
    assert "needs matplotlib" in error
    assert "pip install matplotlib" in error


def test_png(tmp_path: Path):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    write_png(report(), 1e12, 1e9, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")


def test_a_prompt_of_one_token_has_no_prefill(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "tiny", "--step", "prefill", "--prompt-tokens", "1"]) == 2
    assert "--prompt-tokens is 1" in capsys.readouterr().err
