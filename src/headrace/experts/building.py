"""Puts an executor together: slots, request block, CPU service, prompt path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from headrace.experts.chunk import ChunkCompute
from headrace.experts.cpu_share import Answer, ServiceShare
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.paths import ExpertPaths
from headrace.experts.plan_oracle import PlanShape
from headrace.experts.prefill import MAX_CPU_TOKENS
from headrace.experts.request_block import RequestBlock, request_block
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore
from headrace.experts.stream import StreamPrefill
from headrace.machine.device import Device
from headrace.ops import registry
from headrace.ops.expert_records import ExpertFault, ExpertService, ServiceOptions
from headrace.ops.records import Activation

# A line of the CPU's cache: the request block's fields must not share one with anything else.
_LINE_NBYTES = 64


class Paths(ExpertPaths, Protocol):
    """Paths that prompts can use, too."""

    def chunk(self, act: Activation) -> ChunkCompute: ...
    def answer(self) -> Answer | None: ...


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
        shape: ``num_slots`` includes the slots of transit and prefetches, which are taken from it.
        threads, cpus: of the CPU service.
        rates: of both paths, for the first split; only ``hybrid`` needs them.
    """
    layout = store.layout
    # A layer that is not pinned is the CPU's, whatever the placement of the others.
    unpinned = not device.reads_pageable and not all(map(store.pinned, range(store.num_layers)))
    with_cpu = shape.placement in ("cpu", "hybrid") or (shape.placement == "stream" and unpinned)
    if shape.placement != "gpu":
        made = shape.plan_shape(store)
        passing = made.max_fetch + 2 * made.max_prefetch
        shape = replace(shape, num_slots=max(shape.num_slots - passing, 0))
    fields = request_block(
        max_tokens=max(MAX_CPU_TOKENS, shape.max_tokens),
        top_k=shape.top_k,
        num_experts=store.num_experts,
        num_slices=layout.num_slices,
        hidden=layout.hidden,
    )
    block = _block(device, fields) if with_cpu else None
    plan = shape.plan_shape(store)
    paths = new_paths(
        device, store, plan, act, fields, block, shape.top_k, max_tokens=shape.max_tokens
    )
    new_service = None
    cpu = None
    executors: list[HybridExecutor] = []
    if block is not None:
        new_service = _service_factory(store, fields, act, block, ServiceOptions(threads, cpus))

        def fault() -> int:
            service = executors[0].service
            if service is None:
                return ExpertFault.NONE
            lost = ExpertFault.NONE if service.running() else ExpertFault.WORKER
            return service.fault() or lost

        def busy_s() -> float:
            service = executors[0].service
            return 0.0 if service is None else service.stats().busy_s

        cpu = ServiceShare(block, fields, layout.num_slices, fault, paths.answer(), busy_s)
    together = 0.0 if rates is None else rates.pcie_gbps + rates.cpu_gbps
    prefill = StreamPrefill(
        device,
        store,
        plan,
        paths,
        paths.chunk(act),
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
            store.layouts, bases, store.num_experts, act, block, fields, options
        )

    return new_service
