"""What the mixtures of an engine chose, recorded from a command and kept as a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.outputs import writing
from headrace.core.errors import ConfigError


@dataclass
class RoutingLog:
    """What an engine's mixtures chose so far: layer -> token -> experts."""

    layers: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])

    def __call__(self, layer: int, ids: Any) -> None:
        """ids: an integer tensor [tokens, k]."""
        self.layers.setdefault(layer, []).extend(ids.tolist())

    @property
    def num_tokens(self) -> int:
        """Tokens recorded so far."""
        return len(next(iter(self.layers.values()), ()))

    def ids(self) -> list[list[list[int]]]:
        """[layers][tokens][k], layers in the model's order."""
        return [self.layers[layer] for layer in sorted(self.layers)]


def experts_of(model: str) -> int:
    """Experts of one layer, from the model's own description.

    Raises:
        ConfigError: it is no mixture.
    """
    from headrace.checkpoint.open import open_checkpoint

    moe = open_checkpoint(model).spec.moe
    if moe is None:
        raise ConfigError(
            f"--routing: {model} has no experts to choose from",
            hint="leave --routing out",
            param="--routing",
        )
    return moe.num_experts


def save_routing(log: RoutingLog, file: Path, model: str, text: str, num_experts: int) -> None:
    """Write what was recorded as a routing trace (core/trace.py)."""
    import numpy as np

    from headrace.core.trace import RoutingTrace, RoutingTraceMeta

    meta = RoutingTraceMeta(
        model=model,
        text=f"headrace run: {text[:60]}",
        licence="the user's own text",
        num_experts=num_experts,
        layers=tuple(sorted(log.layers)),
    )
    with writing(file, "--routing"):
        RoutingTrace(np.asarray(log.ids(), dtype=np.int32), meta).save(file)
