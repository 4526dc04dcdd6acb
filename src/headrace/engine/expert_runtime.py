"""Where the experts of a mixture are computed, as resolved: the seam between engine and expert cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from headrace.core.errors import MachineError
from headrace.core.model_spec import ModelSpec
from headrace.engine.expert_host import load_host_store
from headrace.engine.parts import ExpertRuntime
from headrace.engine.resolved import Resolved
from headrace.experts.building import CPU_LATENCY_S, FETCH_LATENCY_S, make_executor
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.placement import Placement
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore
from headrace.layers.moe import MixtureExecutor
from headrace.machine.device import Device
from headrace.machine.probe import Machine
from headrace.machine.profile import Rate
from headrace.machine.profile_store import profile_of
from headrace.machine.quick_probe import dram_read_gbps, pcie_h2d_gbps
from headrace.models.loader import ExecutorFactory
from headrace.ops import registry
from headrace.ops.records import Activation, ExpertWeights

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

# Tokens of the largest captured step.
STEP_TOKENS = 16
# Well within the 50 ms after which the CPU's threads sleep (ops.expert_records.ServiceOptions).
_WAKE_S = 0.01


def supported_formats() -> frozenset[str]:
    """Formats of experts that the expert cache serves on this installation."""
    if registry.unavailable_reason("triton") is not None:
        return frozenset()
    return frozenset((*registry.gpu_experts().FORMATS, "mxfp4_gguf"))


class ExpertPlace:
    """Makes what computes experts, if they lie in slots.

    Attributes:
        factory: for ``models.loader.load_model``; None if experts are loaded with the rest.
        runtime: what the engine tells of its steps; set once the factory was called.
    """

    def __init__(
        self,
        resolved: Resolved,
        device: Device,
        machine: Machine,
        progress: Progress | None,
    ) -> None:
        self.runtime: ExpertRuntime | None = None
        self._executor: HybridExecutor | None = None
        self.factory: ExecutorFactory | None = self._make if resolved.slots else None
        self._resolved = resolved
        self._device = device
        self._machine = machine
        self._progress = progress

    @contextmanager
    def awake(self) -> Generator[None, None, None]:
        """Keep the CPU's threads from sleeping, while kernels are compiled in the middle of a step."""
        executor = self._executor
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
        assert spec.moe is not None
        assert self._resolved.vram is not None
        store = load_host_store(self._resolved, experts, self._progress)
        for note in store.notes:
            log.warning("%s", note)
        shape = ExecutorShape(
            cast(Placement, self._resolved.experts),
            min(self._resolved.max_num_seqs, STEP_TOKENS),
            spec.moe.num_experts_per_token,
            self._resolved.vram.experts_nbytes // store.layout.slice_nbytes,
        )
        try:
            executor = make_executor(
                self._device,
                store,
                shape,
                Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit),
                threads=self._resolved.threads,
                rates=self._rates(store),
            )
        except BaseException:
            store.close()
            raise
        self.runtime = self._executor = executor
        return executor

    def _rates(self, store: HostStore) -> PathRates:
        """Overlapped rates: of the machine's profile, or quick probes of the two paths."""
        profile, where = profile_of(self._machine)
        found: Mapping[str, Rate] = {} if profile is None else profile.rates
        fmt = store.layout.format
        pcie = found.get("pcie_gather_overlapped") or found.get("pcie_gather")
        cpu = found.get(f"cpu_experts_{fmt}_overlapped") or found.get(f"cpu_experts_{fmt}")
        pcie_gbps = pcie.value if pcie is not None else pcie_h2d_gbps()
        # The kernels read at nearly the rate of a plain loop, which is what a probe can measure soon.
        cpu_gbps = cpu.value if cpu is not None else dram_read_gbps(self._resolved.threads)
        if pcie_gbps is None:
            raise MachineError("PCIe's rate cannot be measured: CUDA is not available")
        log.info("experts: PCIe %.1f GB/s, CPU %.1f GB/s (profile: %s)", pcie_gbps, cpu_gbps, where)
        return PathRates(
            pcie_gbps, cpu_gbps, store.layout.slice_nbytes, FETCH_LATENCY_S, CPU_LATENCY_S
        )
