"""Chooses and tokenizes the texts whose routing is recorded.

    python -m training.texts CORPUS TOKENIZER OUT.json.xz [--tokens 12288]

Five kinds, each in a part for choosing parameters (``tune``) and one held out (``test``). Prose and
code are documents that were never trained on; dialogue, tables and agent transcripts come from
``training.synthetic``, filled with words of those documents. The parts share no document and no
document's words. A document gives at most one context of tokens.
"""

from __future__ import annotations

import argparse
import json
import lzma
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from training import synthetic
from training.prepare import documents

CONTEXT = 1024
PARTS = ("tune", "test")


@dataclass(frozen=True)
class Text:
    """One document as token ids."""

    source: str
    licence: str
    ids: list[int]


def split_parts(found: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Every second document of each package goes to each part."""
    parts: dict[str, list[dict[str, str]]] = {part: [] for part in PARTS}
    turn: dict[str, int] = {}
    for doc in sorted(found, key=lambda d: d["source"]):
        package = doc["source"].split("/")[0]
        turn[package] = turn.get(package, 0) + 1
        parts[PARTS[turn[package] % 2]].append(doc)
    return parts


def real(docs: list[dict[str, str]], tokenizer: Tokenizer, tokens: int) -> list[Text]:
    """Packages in turn, one context of each document, until there are ``tokens``."""
    by_package: dict[str, list[dict[str, str]]] = {}
    for doc in docs:
        by_package.setdefault(doc["source"].split("/")[0], []).append(doc)
    queues = [list(q) for _, q in sorted(by_package.items())]
    out: list[Text] = []
    left = tokens
    while left > 0 and any(queues):
        for queue in filter(None, queues):
            doc = queue.pop(0)
            ids = tokenizer.encode(doc["text"][: CONTEXT * 8], add_special_tokens=False).ids
            ids = ids[: min(CONTEXT, left)]
            if len(ids) >= min(64, left) and left > 0:
                out.append(Text(doc["source"], doc["licence"], ids))
                left -= len(ids)
    return out


def scripted(
    kind: str, part: str, words: synthetic.Words, tokenizer: Tokenizer, tokens: int
) -> list[Text]:
    """Synthetic documents until there are ``tokens``."""
    out: list[Text] = []
    left = tokens
    while left > 0:
        text = synthetic.document(kind, f"{part} {len(out)}", words)
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: min(CONTEXT, left)]
        out.append(Text(f"synthetic/{kind}/{part}/{len(out)}", "Apache-2.0 (synthetic)", ids))
        left -= len(ids)
    return out


def choose(corpus: Path, tokenizer: Tokenizer, tokens: int) -> dict[str, dict[str, list[Text]]]:
    """kind -> part -> texts."""
    held = list(documents(corpus / "held.jsonl"))
    parts = {
        domain: split_parts([d for d in held if d["domain"] == domain])
        for domain in ("prose", "reference", "code")
    }
    out: dict[str, dict[str, list[Text]]] = {}
    for kind in ("prose", "code"):
        out[kind] = {p: real(parts[kind][p], tokenizer, tokens) for p in PARTS}
    for part in PARTS:
        prose = [d["text"] for d in parts["prose"][part] + parts["reference"][part]]
        words = synthetic.words_of(prose, [d["text"] for d in parts["code"][part]])
        for kind in synthetic.KINDS:
            out.setdefault(kind, {})[part] = scripted(kind, part, words, tokenizer, tokens)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=12_288, help="of each kind and part")
    args = parser.parse_args()
    chosen = choose(args.corpus, Tokenizer.from_file(str(args.tokenizer)), args.tokens)
    plain = {k: {p: [asdict(t) for t in ts] for p, ts in v.items()} for k, v in chosen.items()}
    args.out.write_bytes(lzma.compress(json.dumps(plain).encode()))
    for kind, by_part in chosen.items():
        for part, texts in by_part.items():
            print(f"{kind} {part}: {len(texts)} documents, {sum(len(t.ids) for t in texts)} tokens")


if __name__ == "__main__":
    main()
