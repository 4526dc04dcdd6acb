"""Perplexity of KV formats over thousands of positions of one long window (bar 03.6).

    python -m benchmarks.attention.perplexity MODEL [--tokens N] [--step 4] [--variants NAME ...]

``benchmarks.attention.accuracy`` keeps whole distributions, and therefore looks at 1,024 positions; what a
format changes of the loss then has a standard error of half a percent. Here only the loss of every
``step``-th position is kept. Standard errors are over blocks of 16 positions, since neighbours are not
independent. Results are added to benchmarks/results/attention/perplexity.json as they come. MODEL: as
there.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.attention.accuracy import OUT as ACCURACY
from benchmarks.attention.accuracy import ROWS, Model, open_model
from benchmarks.attention.fake import VARIANTS, FakeAttention, Variant
from benchmarks.attention.texts import Window, windows
from headrace.ops.registry import set_num_threads

OUT = ACCURACY.with_name("perplexity.json")
BASE = "bf16"
BLOCK = 16  # positions whose mean is one observation


@torch.inference_mode()
def losses(model: Model, window: Window, variant: Variant, step: int) -> torch.Tensor:
    """Negative log-likelihood of the token after every ``step``-th position of the text, float32."""
    fake = FakeAttention(variant, model.along)
    decoder = model.load(fake.ops(model.ops))
    ids = torch.tensor(window.ids)
    hidden = decoder.forward(ids, fake.batch(len(ids)), fake.caches(decoder.spec.num_layers))
    found = []
    for rows in torch.arange(1, window.text - 1, step).split(ROWS):
        logits = decoder.logits(hidden[rows])
        found.append(logits.logsumexp(-1) - logits.gather(1, ids[rows + 1][:, None])[:, 0])
    return torch.cat(found)


def compared(found: torch.Tensor, base: torch.Tensor) -> dict[str, Any]:
    """Perplexity, its change relative to ``base`` and the change's standard error."""
    change = found - base
    blocks = torch.stack([part.mean() for part in change.split(BLOCK)])
    return {
        "positions": len(found),
        "perplexity": float(found.mean().exp()),
        "change": float(change.mean().exp() - 1),
        "change_se": float(blocks.std() / len(blocks) ** 0.5),
    }


def record(entry: dict[str, Any]) -> None:
    """Put one entry into the results, in place of what was there for the same run."""
    entries = json.loads(OUT.read_text())["entries"] if OUT.exists() else []
    key = ("model", "tokens", "variant")
    entries = [e for e in entries if any(e[k] != entry[k] for k in key)] + [entry]
    OUT.write_text(json.dumps({"entries": entries}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--variants", nargs="+", default=["nvfp4k-fp8v, R = 4", "fp8"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    variants = {v.name: v for v in VARIANTS}
    model = open_model(args.model)
    (window,) = windows(model.encode, model.tokenizer.bos_token_id, args.tokens, 1)
    base: torch.Tensor | None = None
    for name in (BASE, *args.variants):
        start = time.perf_counter()
        found = losses(model, window, variants[name], args.step)
        base = found if base is None else base
        entry = {"model": args.model, "tokens": args.tokens, "step": args.step, "variant": name}
        entry |= compared(found, base) | {"seconds": round(time.perf_counter() - start, 1)}
        record(entry)
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
