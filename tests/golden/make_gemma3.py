"""Writes data/gemma3_llama_cpp.json: llama.cpp's token ids and answers with the real Gemma 3 270M.

Run by hand where xllamacpp, gguf and the packages of ``tests.fixtures.gemma3_model`` are installed:
``PYTHONPATH=src:. python tests/golden/make_gemma3.py``.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

from tests.fixtures.gemma3_model import gemma3_path
from tests.fixtures.tokenizer_texts import FRAGMENTS, tokenizer_texts

DATA = Path(__file__).parent / "data" / "gemma3_llama_cpp.json"
PROMPTS = (
    "The capital of France is Paris. The capital of Germany is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, there was a little girl who",
)
GREEDY = 24


class LlamaCpp:
    """The model with a float32 cache, asked over HTTP."""

    def __init__(self) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(gemma3_path())
        params.n_ctx = 1024
        params.cpuparams.n_threads = 2
        params.warmup = False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type(0)  # GGML_TYPE_F32
        self._server = xllamacpp.Server(params)

    def ask(self, route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + route,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)


def main() -> None:
    model = LlamaCpp()
    texts = [*FRAGMENTS, *tokenizer_texts(150, specials=False)]
    body = {"add_special": False, "parse_special": False}
    ids = [model.ask("/tokenize", {"content": t, **body})["tokens"] for t in texts]
    answers: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        wanted = {"prompt": prompt, "n_predict": GREEDY, "temperature": 0.0, "n_probs": 2}
        found = model.ask("/completion", {**wanted, "cache_prompt": False})
        tokens = [p["id"] for p in found["completion_probabilities"]]
        logprobs = [
            [t["logprob"] for t in p["top_logprobs"]] for p in found["completion_probabilities"]
        ]
        answers.append({"prompt": prompt, "tokens": tokens, "top_two": logprobs})
    DATA.write_text(json.dumps({"texts": texts, "ids": ids, "answers": answers}, ensure_ascii=True))


if __name__ == "__main__":
    main()
