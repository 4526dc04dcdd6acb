"""Record the demo mixtures' bars from what training and evaluation left in benchmarks/results.

python -m benchmarks.routing.bars --wheel dist/headrace-....whl [--write]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.foundation.common import record

TRAINING = Path(__file__).parents[1] / "results" / "training"
COMMAND = "python -m benchmarks.routing.bars"


def read(name: str) -> Any:
    return json.loads((TRAINING / name).read_text())


def perplexity(write: bool) -> None:
    """07.1: the domain where `tiny` is least below the 5-gram."""
    ours = read("tiny.perplexity.json")["mxfp4"]
    theirs = read("ngram.json")["kneser_ney_5gram_perplexity"]
    below = {d: 100 * (1 - ours[d] / theirs[d]) for d in ours}
    worst = min(below, key=lambda d: below[d])
    record(
        "07.1", write=write, command=COMMAND, value=round(below[worst], 1),
        unit="% below, held-out perplexity of tiny (MXFP4)", peer="modified Kneser-Ney 5-gram",
        peer_value=round(theirs[worst], 2),
        note="; ".join(f"{d} {ours[d]:.2f} against {theirs[d]:.2f}: {below[d]:.1f}% below" for d in ours)
        + "; 199,680 tokens each; trained on an H200, 5.5 minutes",
    )  # fmt: skip


def load(write: bool) -> None:
    """07.2: the least used expert of both models; the most used is in the note."""
    found = {name: read(f"{name}.held_out.json") for name in ("tiny", "small")}
    notes = [
        f"{name}: {100 * f['min_share']:.2f}% to {100 * f['max_share']:.1f}% of a layer's choices "
        f"over {sum(f['tokens'].values()):,} held-out tokens"
        for name, f in found.items()
    ]
    record(
        "07.2", write=write, command=COMMAND, unit="% of its layer's load, least used expert",
        value=round(100 * min(f["min_share"] for f in found.values()), 3), note="; ".join(notes),
    )  # fmt: skip


def wheel(path: Path, write: bool) -> None:
    """07.3: the wheel's size."""
    record(
        "07.3", write=write, command=f"{COMMAND} --wheel WHEEL", unit="MB, the wheel",
        value=round(path.stat().st_size / 1e6, 2), note=path.name,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    perplexity(args.write)
    load(args.write)
    wheel(args.wheel, args.write)


if __name__ == "__main__":
    main()
