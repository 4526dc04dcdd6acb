"""Where the experts of a mixture are computed, as resolved: the seam between engine and expert cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import cast

from headrace.core.errors import InternalError, MachineError
from headrace.core.model_spec import ModelSpec
from headrace.engine.expert_host import load_host_store
from headrace.engine.expert_rates import STEP_TOKENS, StartingRates, path_rates
from headrace.engine.parts import ExpertRuntime
from headrace.engine.resolved import Resolved
from headrace.experts.building import PathsFactory, make_executor
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.live import LiveExperts
from headrace.experts.placement import Placement
from headrace.experts.rates import RateTracker
from headrace.layers.moe import MixtureExecutor
from headrace.machine.device import Device
from headrace.machine.pinned import Pinner
from headrace.models.loader import ExecutorFactory
from headrace.ops import registry
from headrace.ops.records import Activation, ExpertWeights

Progress = Callable[[str, float], None]

# Well within the 50 ms after which the CPU's threads sleep (ops.expert_records.ServiceOptions).
_WAKE_S = 0.01
# Slices prefetched for a layer (docs/adr/0006), and the slots from which on their eight are few.
PREFETCHES = 4
SLOTS_TO_PREFETCH = 256


def supported_formats() -> frozenset[str]:
    """Formats of experts that the expert cache serves on this installation."""
    if registry.unavailable_reason("triton") is not None:
        return frozenset()
    return frozenset((*registry.gpu_experts().FORMATS, "mxfp4_gguf"))


class ExpertPlace:
    """Makes what computes experts, if they lie in slots.

    Args:
        known: the machine's rates, for the first split.
        new_paths, pinner: what runs on the device and pins host memory; CUDA's by default.

    Attributes:
        factory: for ``models.loader.load_model``; None if experts are loaded with the rest.
        runtime: what the engine tells of its steps; set once the factory was called.
    """

    def __init__(
        self,
        resolved: Resolved,
        device: Device,
        known: StartingRates,
        progress: Progress | None,
        *,
        new_paths: PathsFactory = GpuPaths,
        pinner: Pinner | None = None,
    ) -> None:
        self.runtime: ExpertRuntime | None = None
        self.executor: HybridExecutor | None = None
        self.factory: ExecutorFactory | None = self._make if resolved.slots else None
        self._resolved = resolved
        self._device = device
        self._known = known
        self._progress = progress
        self._new_paths: PathsFactory = new_paths
        self._pinner = pinner

    @contextmanager
    def awake(self) -> Generator[None, None, None]:
        """Keep the CPU's threads from sleeping, while kernels are compiled in the middle of a step."""
        executor = self.executor
        if executor is None or executor.service is None:
            yield
            return
        service, done = executor.service, threading.Event()

        def wake() -> None:
            while not done.wait(_WAKE_S):
                service.wake()

        thread = threading.Thread(target=wake, name="wake-experts", daemon=True)
        executor.step_begins(0)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        executor.step_ended()

    def _make(self, spec: ModelSpec, experts: Sequence[ExpertWeights]) -> MixtureExecutor:
        resolved, moe, vram = self._resolved, spec.moe, self._resolved.vram
        if moe is None or vram is None:
            raise InternalError(f"--experts {resolved.experts} has no executor here")
        store = load_host_store(resolved, experts, self._progress, self._pinner)
        layout, mode = store.layout, cast(Placement, resolved.experts)
        try:
            rates = path_rates(self._known, layout.format, layout.slice_nbytes)
            if rates is None and mode == "hybrid":
                raise MachineError(
                    "the rates of PCIe and of the CPU are not known: CUDA is not available",
                    hint="run `headrace doctor` to see what is missing",
                )
            slots = vram.experts_nbytes // layout.slice_nbytes
            executor = make_executor(
                self._device,
                store,
                ExecutorShape(
                    mode,
                    min(resolved.max_num_seqs, STEP_TOKENS),
                    moe.num_experts_per_token,
                    slots,
                    PREFETCHES if mode == "hybrid" and slots >= SLOTS_TO_PREFETCH else 0,
                ),
                Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit),
                threads=resolved.threads,
                cpus=resolved.expert_cpus,
                rates=rates,
                new_paths=self._new_paths,
            )
        except BaseException:
            store.close()
            raise
        tracker = None if rates is None else RateTracker(rates, probed=self._known.probed)
        self.executor, self.runtime = executor, LiveExperts(executor, tracker)
        return executor
