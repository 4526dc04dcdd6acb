"""The baseline of the demo mixture: an interpolated modified Kneser-Ney 5-gram model.

    python -m training.ngram IDS

Chen and Goodman (1998), section 3: three discounts per order, from the counts of counts; raw counts
at the highest order and continuation counts (distinct left neighbours) below it. With at most 4,096
tokens in the vocabulary a 5-gram fits 60 bits of a uint64, so a model is five sorted arrays.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.train import read_ids

BITS = 12  # per token
ORDER = 5


@dataclass(frozen=True)
class Level:
    """One order: n-grams with discounted counts over their context's total, and back-off weights."""

    grams: np.ndarray  # uint64, sorted
    share: np.ndarray  # (count - discount) / total of the context
    contexts: np.ndarray  # uint64, sorted
    gamma: np.ndarray  # probability mass that the context leaves to the shorter history


def keys(ids: np.ndarray, order: int) -> np.ndarray:
    """Every n-gram of ``ids`` as one integer, oldest token in the highest bits."""
    out = np.zeros(len(ids) - order + 1, np.uint64)
    for j in range(order):
        out = (out << np.uint64(BITS)) | ids[j : len(ids) - order + 1 + j].astype(np.uint64)
    return out


def level(grams: np.ndarray, counts: np.ndarray) -> Level:
    """Discounts from counts of counts, then shares and back-off weights."""
    n = [float((counts == c).sum()) for c in (1, 2, 3, 4)]
    y = n[0] / (n[0] + 2 * n[1])
    discount = np.array(
        [0.0, 1 - 2 * y * n[1] / n[0], 2 - 3 * y * n[2] / n[1], 3 - 4 * y * n[3] / n[2]]
    )
    taken = discount[np.minimum(counts, 3)]
    contexts, at = np.unique(grams >> np.uint64(BITS), return_inverse=True)
    total = np.bincount(at, counts)
    left = np.bincount(at, taken)
    return Level(grams, (counts - taken) / total[at], contexts, left / total)


def fit(ids: np.ndarray) -> list[Level]:
    """Levels of order 1 to 5."""
    grams, counts = np.unique(keys(ids, ORDER), return_counts=True)
    levels = [level(grams, counts)]
    for order in range(ORDER - 1, 0, -1):
        mask = np.uint64((1 << (BITS * order)) - 1)
        grams, counts = np.unique(grams & mask, return_counts=True)  # distinct left neighbours
        levels.append(level(grams, counts))
    return levels[::-1]


def find(sorted_keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return at, sorted_keys[at] == wanted


def log_probs(levels: list[Level], ids: np.ndarray, vocab: int) -> np.ndarray:
    """Natural-log probability of each token from the fifth on."""
    p = np.full(len(ids) - ORDER + 1, 1.0 / vocab)
    for order, lv in enumerate(levels, start=1):
        k = keys(ids, order)[ORDER - order :]
        at, seen = find(lv.contexts, k >> np.uint64(BITS))
        gamma = np.where(seen, lv.gamma[at], 1.0)
        at, seen = find(lv.grams, k)
        p = np.where(seen, lv.share[at], 0.0) + gamma * p
    return np.log(p)


def main() -> None:
    folder = Path(sys.argv[1])
    levels = fit(read_ids(folder / "train.bin.xz"))
    result = {}
    for path in sorted(folder.glob("held.*.bin.xz")):
        ids = read_ids(path)[:200_001]
        result[path.name.split(".")[1]] = math.exp(-log_probs(levels, ids, 1 << BITS).mean())
    print(json.dumps({"kneser_ney_5gram_perplexity": result}, indent=1))


if __name__ == "__main__":
    main()
