"""Draw the loss of one or more training logs after each other.

python -m training.plot_loss OUT.png LOG.json [LOG.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def points(logs: list[dict[str, Any]]) -> tuple[list[float], dict[str, list[float]], list[float]]:
    """Million tokens, the columns by name, and where each log ends."""
    tokens: list[float] = []
    columns: dict[str, list[float]] = {}
    ends: list[float] = []
    before = 0.0
    for log in logs:
        each = log["tokens"] / log["rows"][-1][0] / 1e6
        for row in log["rows"]:
            tokens.append(before + row[0] * each)
            for name, value in zip(log["columns"], row, strict=True):
                columns.setdefault(name, []).append(value)
        before += log["tokens"] / 1e6
        ends.append(before)
    return tokens, columns, ends


def draw(out: Path, logs: list[dict[str, Any]]) -> None:
    tokens, columns, ends = points(logs)
    figure, (loss, share) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    loss.plot(tokens, columns["loss"])
    loss.set(xlabel="million tokens", ylabel="training loss (nats a token)")
    even = 100 / logs[0]["shape"]["experts"]
    share.semilogy(tokens, [max(100 * v, 1e-3) for v in columns["min_share"]], label="least used")
    share.semilogy(tokens, [100 * v for v in columns["max_share"]], label="most used")
    share.axhline(even, color="grey", lw=0.8, label="even")
    share.axhline(0.2, color="grey", lw=0.8, ls=":", label="bar: 0.2%")
    share.set(xlabel="million tokens", ylabel="% of its layer's load, one batch")
    share.legend(fontsize=7)
    for axis in (loss, share):
        axis.grid(alpha=0.3)
        for end in ends[:-1]:
            axis.axvline(end, color="tab:red", lw=0.8, ls="--")
    figure.savefig(out, dpi=90)


def main() -> None:
    draw(Path(sys.argv[1]), [json.loads(Path(p).read_text()) for p in sys.argv[2:]])


if __name__ == "__main__":
    main()
