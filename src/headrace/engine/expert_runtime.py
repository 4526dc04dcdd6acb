"""Where the experts of a mixture are computed, as resolved: the seam between engine and expert cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.core.errors import InternalError
from headrace.core.model_spec import ModelSpec
from headrace.engine.parts import ExpertRuntime
from headrace.engine.resolved import Resolved
from headrace.layers.moe import MixtureExecutor
from headrace.machine.device import Device
from headrace.models.loader import ExecutorFactory
from headrace.ops.records import ExpertWeights
from headrace.ops.registry import OpSet


def supported_formats() -> frozenset[str]:
    """Formats of experts that the expert cache serves on this installation."""
    return frozenset()


class ExpertPlace:
    """Makes what computes experts, if it is not the model's own device.

    Attributes:
        factory: for ``models.loader.load_model``; None if experts are loaded with the rest.
        runtime: what the engine tells of its steps; set once the factory was called.
    """

    def __init__(
        self,
        resolved: Resolved,
        device: Device,
        ops: OpSet,
        progress: Callable[[str, float], None] | None,
    ) -> None:
        self.runtime: ExpertRuntime | None = None
        self.factory: ExecutorFactory | None = self._make if resolved.slots else None
        self._resolved = resolved
        self._device = device
        self._ops = ops
        self._progress = progress

    def _make(self, spec: ModelSpec, experts: Sequence[ExpertWeights]) -> MixtureExecutor:
        raise InternalError(f"--experts {self._resolved.experts} has no executor here")
