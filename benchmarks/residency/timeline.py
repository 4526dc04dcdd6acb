"""When each part of a layer begins and ends on the GPU, by its own clock, inside the captured step.

``Stamped`` wraps an executor's paths; capture the graph after putting it in their place. A stamp is a
kernel of its own and takes about a microsecond of its stream, so a stamped step is slower by some 3 %.
"""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.ops.triton.shared_words import clock_ns

# In the order of a layer; those of the side stream in the second row.
MARKS = (
    "prepare", "planned", "hits", "joined", "fetched", "answered", "combined",
    "guess", "sent", "gather", "gathered",
)  # fmt: skip


@triton.jit
def stamp(times, at):
    tl.store(times + at, clock_ns())


class Stamped:
    """Paths that note the times; ``layer`` is that of the last ``foresee`` or ``plan``."""

    def __init__(self, paths: Any, num_layers: int, device: torch.device) -> None:
        self._paths = paths
        self._layer = 0
        self.times = torch.zeros(num_layers, len(MARKS), dtype=torch.int64, device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paths, name)

    def _stamp(self, mark: str, layer: int | None = None) -> None:
        row = self._layer if layer is None else layer
        stamp[(1,)](self.times, row * len(MARKS) + MARKS.index(mark), num_warps=1)

    def prefetch(self, layer: int, guessed: Any, top_k: int, valid: Any) -> None:
        self._stamp("guess", layer)
        self._paths.prefetch(layer, guessed, top_k, valid)
        self._stamp("sent", layer)

    def plan(self, layer: int, ids: Any, weights: Any) -> None:
        self._layer = layer
        self._stamp("prepare")
        self._paths.plan(layer, ids, weights)
        self._stamp("planned")

    def gather(self, layer: int) -> None:
        self._stamp("gather")
        self._paths.gather(layer)
        self._stamp("gathered")

    def hits(self, x: Any) -> None:
        self._paths.hits(x)
        self._stamp("hits")

    def fetched(self, x: Any) -> None:
        self._stamp("joined")
        self._paths.fetched(x)
        self._stamp("fetched")

    def await_cpu(self) -> None:
        self._paths.await_cpu()
        self._stamp("answered")

    def combine(self, num_tokens: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = self._paths.combine(num_tokens, residual)
        self._stamp("combined")
        return out


def intervals(steps: torch.Tensor) -> dict[str, list[float]]:
    """Microseconds [mean, 10th, 50th, 90th percentile] of what follows what.

    steps: int64 [steps, L, marks], nanoseconds.
    """
    t = {mark: steps[:, :, at].double() / 1e3 for at, mark in enumerate(MARKS)}
    between = {
        "router_known_since_last_sum": t["prepare"][:, 1:] - t["combined"][:, :-1],
        "plan": t["planned"] - t["prepare"],
        "plan_to_gather": t["gather"] - t["planned"],
        "gather": t["gathered"] - t["gather"],
        "plan_to_hits": t["hits"] - t["planned"],
        "gather_to_joined": t["joined"] - torch.maximum(t["gathered"], t["hits"]),
        "fetched": t["fetched"] - t["joined"],
        "await_cpu": t["answered"] - t["fetched"],
        "combine": t["combined"] - t["answered"],
        "layer": t["combined"][:, 1:] - t["combined"][:, :-1],
        "between_steps": (t["prepare"][1:, 0] - t["combined"][:-1, -1]).unsqueeze(1),
    }
    if int(steps[:, :, MARKS.index("sent")].min()) > 0:
        between |= {
            "sum_to_guess": t["guess"][:, 1:] - t["combined"][:, :-1],
            "gathered_to_guess": t["guess"][:, 1:] - t["gathered"][:, :-1],
            "guess_and_prefetch": t["sent"] - t["guess"],
            "prefetch_after_plan": t["sent"] - t["planned"],
        }
    return {name: _spread(value.flatten()) for name, value in between.items()}


def _spread(values: torch.Tensor) -> list[float]:
    at = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    return [round(float(v), 1) for v in (values.mean(), *values.quantile(at))]
