"""Reports on a terminal of 80 columns: no line is longer, and nothing of what a file would get is lost."""

from __future__ import annotations

import pytest

from headrace.cli.main import main

COMMANDS = [
    "plan --models",
    "plan --machine list",
    "plan gpt-oss-120b --machine rtx-5070-ti",
    "plan qwen3-30b-a3b --machine rtx-4090+pcie4x16+ddr5-5600-dual+ram=192GiB",
    "plan deepseek-v3 --machine h200",
    "plan gpt-oss-120b --machine apple-m4-max --concurrency 8",
    "plan llama-3.1-70b --machine rtx-3090",
    "plan gpt-oss-20b --kv-format auto --machine h200",
    "flops list",
    "flops show decode-attention",
    "flops show fct-batch1-step-cost-formula",
    "models",
    "doctor",
    "kernels list",
]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize("words", COMMANDS)
def test_reports_fit_80_columns(words: str, monkeypatch: pytest.MonkeyPatch, capsys):
    assert main(words.split()) == 0
    whole = capsys.readouterr().out
    on_a_terminal(monkeypatch, 80)
    assert main(words.split()) == 0
    fitted = capsys.readouterr().out
    assert max(map(len, fitted.splitlines())) <= 80
    if words not in ("doctor", "models"):  # what they say changes meanwhile
        assert fitted.split() == whole.split()


def test_machines_that_do_not_fit_beside_the_others_come_below_them(
    monkeypatch: pytest.MonkeyPatch, capsys
):
    names = "rtx-4060-laptop,rtx-5090,h200,apple-m4-max,rtx-3090"
    command = ["plan", "gpt-oss-120b", "--compare", names]
    assert main(command) == 0
    (heads,) = [line.split() for line in capsys.readouterr().out.splitlines() if "h200" in line]
    assert heads == names.split(",")
    on_a_terminal(monkeypatch, 80)
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    first, second = (i for i, line in enumerate(lines) if line.startswith(" " * 12) and "-" in line)
    assert [*lines[first].split(), *lines[second].split()] == names.split(",")
    # both halves have the same rows, a blank line between them
    labels = [[line[:12].strip() for line in lines[at:]] for at in (first, second)]
    rows = second - first - 1
    assert lines[second - 1] == ""
    assert labels[0][:rows] == labels[1][:rows]
    assert {"fits", "tok/s", "binds", "VRAM used"} <= set(labels[0][:rows])


def test_a_row_that_no_plan_has_is_left_out(capsys):
    assert main(["plan", "gpt-oss-20b", "--compare", "h200,b200"]) == 0
    labels = {line[:12].strip() for line in capsys.readouterr().out.splitlines()}
    assert {"fits", "tok/s", "first token", "VRAM used"} <= labels
    assert not {"missing", "disk used", "hit rate", "at a time", "KV cache"} & labels
    # 141 GB of weights: in the GPU's memory on one, computed by the CPU with float32 keys on the other
    names = "b200,rtx-3090+ddr5-6000-dual+ram=192GiB"
    assert main(["plan", "llama-3.1-70b", "--compare", names]) == 0
    (cells,) = [line.split() for line in capsys.readouterr().out.splitlines() if "KV cache" in line]
    assert cells == ["KV", "cache", "bf16", "f32"]
