"""Text to token ids: trains the tokenizer, mixes the domains, writes compressed uint16 ids.

    python -m training.prepare CORPUS OUT [--vocab 4096] [--megabytes prose=70,reference=30,code=60]

OUT gets ``tokenizer.json``, ``train.bin.xz`` and ``held.<domain>.bin.xz``: little-endian uint16, one
``<|endoftext|>`` after each document, documents in a fixed shuffled order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_SAMPLE = 8_000_000  # characters of each domain the merges are learnt from
# Words with their leading space, single digits, runs of punctuation, runs of blanks.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"


def documents(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def shuffled(path: Path, domain: str) -> list[str]:
    """The texts of one domain, ordered by a hash of their names."""
    found = [d for d in documents(path) if d["domain"] == domain]
    found.sort(key=lambda d: hashlib.blake2b(d["source"].encode()).digest())
    return [d["text"] for d in found]


def train_tokenizer(texts: dict[str, list[str]], vocab: int) -> Tokenizer:
    """A byte-level BPE over an equal share of each domain."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        for domain in texts.values():
            left = TOKENIZER_SAMPLE
            for text in domain:
                if left <= 0:
                    break
                yield text
                left -= len(text)

    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Ids of all texts, each closed by ``<|endoftext|>`` (id 0)."""
    parts: list[np.ndarray] = []
    for at in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[at : at + 256], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, 0], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--megabytes", default="prose=70,reference=30,code=60")
    args = parser.parse_args()
    budget = {k: float(v) * 1e6 for k, v in (p.split("=") for p in args.megabytes.split(","))}
    args.out.mkdir(parents=True, exist_ok=True)
    texts = {domain: shuffled(args.corpus / "train.jsonl", domain) for domain in budget}
    tokenizer = train_tokenizer(texts, args.vocab)
    tokenizer.save(str(args.out / "tokenizer.json"))
    chosen: list[str] = []
    for domain, limit in budget.items():
        size = 0
        for text in texts[domain]:
            if size > limit:
                break
            chosen.append(text)
            size += len(text)
        print(f"{domain}: {size / 1e6:.1f} MB of training text")
    chosen.sort(key=lambda t: hashlib.blake2b(t.encode()).digest())  # mix the domains
    ids = encode(tokenizer, chosen)
    (args.out / "train.bin.xz").write_bytes(lzma.compress(ids.tobytes(), preset=4))
    print(
        f"train: {ids.size / 1e6:.1f} M tokens, {sum(map(len, chosen)) / ids.size:.2f} characters each"
    )
    for domain in budget:
        held = encode(tokenizer, shuffled(args.corpus / "held.jsonl", domain))
        (args.out / f"held.{domain}.bin.xz").write_bytes(lzma.compress(held.tobytes()))
        print(f"held {domain}: {held.size / 1e6:.2f} M tokens")


if __name__ == "__main__":
    main()
