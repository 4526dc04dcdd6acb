"""Where the experts of a mixture are computed, as resolved: the seam between engine and expert cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from headrace.core.errors import MachineError
from headrace.core.model_spec import ModelSpec
from headrace.engine.parts import ExpertRuntime
from headrace.engine.resolved import Resolved
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.placement import Placement
from headrace.experts.request_block import RequestBlock, request_block
from headrace.experts.slab_pack import layout_of
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore, build_store
from headrace.layers.moe import MixtureExecutor
from headrace.machine.device import Device
from headrace.machine.probe import Machine
from headrace.machine.profile import Rate
from headrace.machine.profile_store import profile_of
from headrace.machine.quick_probe import dram_read_gbps, pcie_h2d_gbps
from headrace.models.loader import ExecutorFactory
from headrace.ops import registry
from headrace.ops.expert_records import ExpertService, ServiceOptions
from headrace.ops.records import Activation, ExpertWeights

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

# Tokens of the largest captured step; longer inputs go through the experts in pieces of as many.
STEP_TOKENS = 16
# Well within the 50 ms after which the CPU's threads sleep (ops.expert_records.ServiceOptions).
_WAKE_S = 0.01
# A line of the CPU's cache: the request block's fields must not share one with anything else.
_LINE_NBYTES = 64


def supported_formats() -> frozenset[str]:
    """Formats of experts that the expert cache serves on this installation."""
    if registry.unavailable_reason("triton") is not None:
        return frozenset()
    return frozenset(registry.gpu_experts().FORMATS)


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
        act = Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit)
        layout = layout_of(experts)
        store = build_store(
            experts, layout, threads=self._resolved.threads, pin=True, progress=self._progress
        )
        tokens = min(self._resolved.max_num_seqs, STEP_TOKENS)
        top_k = spec.moe.num_experts_per_token
        fields = request_block(
            max_tokens=tokens,
            top_k=top_k,
            num_experts=store.num_experts,
            num_slices=layout.num_slices,
            hidden=layout.hidden,
        )
        mode = self._resolved.experts
        slots = self._resolved.vram.experts_nbytes // layout.slice_nbytes
        if mode in ("hybrid", "stream"):
            # What a layer fetches lies in places of its own until the step has used it.
            uses = min(tokens * top_k, store.num_experts)
            slots = max(slots - uses * layout.num_slices, 0)
        shape = ExecutorShape(cast(Placement, mode), tokens, top_k, slots)
        block = self._block(fields) if mode in ("hybrid", "cpu") else None
        paths = GpuPaths(self._device, store, shape.plan_shape(store), act, fields, block, top_k)
        prefill = _InPieces(tokens)
        executor = HybridExecutor(
            self._device,
            store,
            shape,
            paths,
            prefill=prefill,
            block=block,
            new_service=None if block is None else self._service(store, act, block, fields),
        )
        prefill.executor = executor
        executor.set_rates(self._rates(store) if mode == "hybrid" else None)
        executor.fill()
        self.runtime = self._executor = executor
        return executor

    def _block(self, fields: RequestBlock) -> torch.Tensor:
        """The request block's memory, at the start of a cache line."""
        memory = self._device.pinned(fields.nbytes + _LINE_NBYTES, dtype=torch.uint8)
        memory.zero_()
        return memory[-memory.data_ptr() % _LINE_NBYTES :][: fields.nbytes]

    def _service(
        self, store: HostStore, act: Activation, block: torch.Tensor, fields: RequestBlock
    ) -> Callable[[], ExpertService]:
        bases = [store.base(layer) for layer in range(store.num_layers)]
        options = ServiceOptions(self._resolved.threads)

        def new() -> ExpertService:
            return registry.cpu_experts().expert_service(
                store.layout, bases, store.num_experts, act, block, fields, options
            )

        return new

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
        return PathRates(pcie_gbps, cpu_gbps, store.layout.slice_nbytes)


class _InPieces:
    """More tokens than a step has: piece by piece through the executor, in a step's way.

    The last piece is filled up with rows of no expert: kernels that a step has compiled serve it.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.executor: HybridExecutor | None = None

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``layers.moe.MixtureExecutor``."""
        assert self.executor is not None
        size, count = self._tokens, x.shape[0]
        missing = -count % size
        pad = torch.nn.functional.pad
        x, weights = pad(x, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
        ids = pad(ids, (0, 0, 0, missing), value=-1)
        out = torch.empty_like(x)
        for start in range(0, count, size):
            rows = slice(start, start + size)
            out[rows] = self.executor(layer, x[rows], ids[rows], weights[rows])
        return out[:count]
