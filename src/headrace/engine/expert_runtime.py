"""Where the experts of a mixture are computed, as resolved: the seam between engine and expert cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, cast

import torch

from headrace.core.errors import InternalError, MachineError
from headrace.core.model_spec import ModelSpec
from headrace.engine.expert_host import load_host_store
from headrace.engine.expert_rates import (
    CPU_LATENCY_S,
    FETCH_LATENCY_S,
    StartingRates,
    path_rates,
)
from headrace.engine.parts import ExpertRuntime
from headrace.engine.resolved import Resolved
from headrace.experts.cpu_share import ServiceShare
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.live import LiveExperts
from headrace.experts.paths import ExpertPaths
from headrace.experts.placement import Placement
from headrace.experts.plan_oracle import PlanShape
from headrace.experts.rates import RateTracker
from headrace.experts.request_block import RequestBlock, request_block
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore
from headrace.experts.stream import SliceProduct, StreamPrefill
from headrace.layers.moe import MixtureExecutor
from headrace.machine.device import Device
from headrace.machine.pinned import Pinner
from headrace.models.loader import ExecutorFactory
from headrace.ops import registry
from headrace.ops.expert_records import ExpertService, ServiceOptions
from headrace.ops.records import Activation, ExpertWeights

__all__ = ["CPU_LATENCY_S", "FETCH_LATENCY_S", "ExpertPlace", "make_executor", "supported_formats"]

Progress = Callable[[str, float], None]

# Tokens of the largest captured step; longer inputs are prompts.
STEP_TOKENS = 16
# Prompt chunks of which the CPU computes a part: beyond it nearly every expert has several tokens, and
# the GPU is faster with one copy of each. Bounds the request block too.
MAX_CPU_TOKENS = 128
# Well within the 50 ms after which the CPU's threads sleep (ops.expert_records.ServiceOptions).
_WAKE_S = 0.01
# A line of the CPU's cache: the request block's fields must not share one with anything else.
_LINE_NBYTES = 64


class Paths(ExpertPaths, Protocol):
    """Paths that prompts can use, too."""

    def product(self, act: Activation) -> SliceProduct: ...


class PathsFactory(Protocol):
    """Makes the paths of an executor: ``GpuPaths`` unless a test says otherwise."""

    def __call__(
        self,
        device: Device,
        store: HostStore,
        shape: PlanShape,
        act: Activation,
        fields: RequestBlock,
        block: torch.Tensor | None,
        top_k: int,
        /,
        *,
        max_tokens: int,
    ) -> Paths: ...


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
            executor = make_executor(
                self._device,
                store,
                ExecutorShape(
                    mode,
                    min(resolved.max_num_seqs, STEP_TOKENS),
                    moe.num_experts_per_token,
                    vram.experts_nbytes // layout.slice_nbytes,
                ),
                Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit),
                threads=resolved.threads,
                rates=rates,
                new_paths=self._new_paths,
            )
        except BaseException:
            store.close()
            raise
        tracker = None if rates is None else RateTracker(rates, probed=self._known.probed)
        self.executor, self.runtime = executor, LiveExperts(executor, tracker)
        return executor


def make_executor(
    device: Device,
    store: HostStore,
    shape: ExecutorShape,
    act: Activation,
    *,
    threads: int,
    cpus: tuple[int, ...] | None = None,
    rates: PathRates | None = None,
    new_paths: PathsFactory = GpuPaths,
) -> HybridExecutor:
    """The executor, its slots filled and its CPU service running.

    Args:
        shape: ``num_slots`` includes the transit slots, which are taken from it.
        threads, cpus: of the CPU service.
        rates: of both paths, for the first split; only ``hybrid`` needs them.
    """
    layout = store.layout
    if shape.placement != "gpu":
        # What a layer fetches lies in places of its own until the step has used it.
        transit = shape.plan_shape(store).max_fetch
        shape = replace(shape, num_slots=max(shape.num_slots - transit, 0))
    fields = request_block(
        max_tokens=max(MAX_CPU_TOKENS, shape.max_tokens),
        top_k=shape.top_k,
        num_experts=store.num_experts,
        num_slices=layout.num_slices,
        hidden=layout.hidden,
    )
    # A layer that is not pinned is the CPU's, whatever the placement of the others.
    unpinned = not device.reads_pageable and not all(map(store.pinned, range(store.num_layers)))
    with_cpu = shape.placement in ("cpu", "hybrid") or (shape.placement == "stream" and unpinned)
    block = _block(device, fields) if with_cpu else None
    plan = shape.plan_shape(store)
    paths = new_paths(
        device, store, plan, act, fields, block, shape.top_k, max_tokens=shape.max_tokens
    )
    executors: list[HybridExecutor] = []
    new_service, cpu = None, None
    if block is not None:
        options = ServiceOptions(threads, cpus)
        new_service = _service_factory(store, fields, act, block, options)

        def fault() -> int:
            service = executors[0].service
            return 0 if service is None else int(service.fault())

        cpu = ServiceShare(block, fields, layout.num_slices, fault)
    together = 0.0 if rates is None else rates.pcie_gbps + rates.cpu_gbps
    prefill = StreamPrefill(
        device,
        store,
        plan,
        paths,
        paths.product(act),
        cpu=cpu,
        cpu_share=rates.cpu_gbps / together if rates is not None and together else 0.0,
    )
    executor = HybridExecutor(
        device, store, shape, paths, prefill=prefill, block=block, new_service=new_service
    )
    executors.append(executor)
    executor.set_rates(rates)
    executor.fill()
    return executor


def _block(device: Device, fields: RequestBlock) -> torch.Tensor:
    """The request block's memory, at the start of a cache line."""
    memory = device.pinned(fields.nbytes + _LINE_NBYTES, dtype=torch.uint8)
    memory.zero_()
    return memory[-memory.data_ptr() % _LINE_NBYTES :][: fields.nbytes]


def _service_factory(
    store: HostStore,
    fields: RequestBlock,
    act: Activation,
    block: torch.Tensor,
    options: ServiceOptions,
) -> Callable[[], ExpertService]:
    bases = [store.base(layer) for layer in range(store.num_layers)]
    kernels = registry.cpu_experts()

    def new_service() -> ExpertService:
        return kernels.expert_service(
            store.layout, bases, store.num_experts, act, block, fields, options
        )

    return new_service
