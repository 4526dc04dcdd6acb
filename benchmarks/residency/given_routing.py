"""Routing that is given instead of computed, and guessed right with a given probability.

Stands for a trained router where there are only random weights: experts by ``benchmarks.routing.generator``
(calibrated to the published hit rate of gpt-oss-120b). Figures that come from it say so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.residency import geometry as geo
from benchmarks.routing.generator import RoutingGeometry, generate
from headrace.experts.executor import HybridExecutor

NUM_STEPS = 512


class GivenRouting:
    """``MixtureExecutor`` and ``Foresight``: an executor with other ids and other guesses.

    Args:
        recall: probability with which each of the guessed k experts is among the chosen ones; guesses
            keep the order of the choice.
    """

    def __init__(
        self, executor: HybridExecutor, layers: int, recall: float, seed: int = 11
    ) -> None:
        self._executor, self._paths = executor, executor.paths
        geometry = RoutingGeometry(layers, geo.EXPERTS, geo.TOP_K)
        ids = generate(geometry, tokens=NUM_STEPS, seed=seed)
        rng = np.random.default_rng(seed + 1)
        wrong = rng.random(ids.shape) >= recall
        # Another expert: none of the chosen is hit by a shift of 1 to E - 1 except by chance, which is rare.
        shifted = (ids + rng.integers(1, geo.EXPERTS, ids.shape)) % geo.EXPERTS
        guesses = np.where(wrong, shifted, ids)
        logits = np.zeros((layers, NUM_STEPS, geo.EXPERTS), np.float32)
        falling = np.arange(geo.TOP_K, 0, -1, dtype=np.float32)
        np.put_along_axis(logits, guesses, np.broadcast_to(falling, guesses.shape), 2)
        self._all = [
            torch.from_numpy(np.ascontiguousarray(a.transpose(1, 0, 2))).cuda()
            for a in (ids, logits)
        ]
        self._ids, self._logits = (a[0].clone() for a in self._all)
        self._step = 0
        executor.paths = self

    def advance(self) -> None:
        """Before a step: the next routing."""
        self._step = (self._step + 1) % NUM_STEPS
        self._ids.copy_(self._all[0][self._step])
        self._logits.copy_(self._all[1][self._step])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paths, name)

    def prefetch(self, layer: int, guessed: Any, top_k: int, valid: Any) -> None:
        """As paths: what is guessed is given, too; the guess's own time counts."""
        self._paths.prefetch(layer, self._logits[layer].unsqueeze(0), top_k, valid)


class GivenExecutor:
    """What the decoder calls."""

    def __init__(self, executor: HybridExecutor, given: GivenRouting) -> None:
        self._executor, self._given = executor, given

    def __call__(self, layer: int, x: Any, ids: Any, weights: Any) -> torch.Tensor:
        return self._executor(layer, x, self._given._ids[layer].unsqueeze(0), weights)

    def foresee(self, layer: int, x: Any, router: Any, valid: Any) -> None:
        self._executor.foresee(layer, x, router, valid)

    def normed(self, layer: int, x: Any) -> None:
        self._executor.normed(layer, x)

    def attended(self, layer: int, x: Any, valid: Any) -> None:
        self._executor.attended(layer, x, valid)
