"""Where the experts of a mixture are computed, as resolved: the seam between engine and expert cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from headrace.core.errors import InternalError
from headrace.core.model_spec import ModelSpec
from headrace.engine.decode_graphs import BATCH_SIZES
from headrace.engine.parts import ExpertRuntime
from headrace.engine.resolved import Resolved
from headrace.experts.cpu_share import ServiceShare
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.placement import PLACEMENTS
from headrace.experts.request_block import RequestBlock, request_block
from headrace.experts.slab import SlabLayout
from headrace.experts.slab_pack import layout_of
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore, build_store
from headrace.experts.stream import StreamPrefill
from headrace.layers.moe import MixtureExecutor
from headrace.machine.device import Device
from headrace.machine.probe import probe_machine
from headrace.machine.profile import Rate
from headrace.machine.quick_probe import starting_rates
from headrace.models.loader import ExecutorFactory
from headrace.ops import registry
from headrace.ops.expert_records import ExpertService, ServiceOptions
from headrace.ops.records import Activation, ExpertWeights
from headrace.ops.registry import OpSet

log = logging.getLogger(__name__)

# Prompt chunks of which the CPU computes a part: beyond it nearly every expert has several tokens, and
# the GPU is faster with one copy of each. Bounds the request block too.
MAX_CPU_TOKENS = 128
# What a fetch and a request cost beside their bytes (H200 machine, 2026-11-29: the fetched slices are
# computed after the last of them has arrived; a round trip through flags takes 4 us).
FETCH_LATENCY_S = 20e-6
CPU_LATENCY_S = 8e-6
# Without a measured rate: the CPU's share of what its memory reads beside PCIe.
CPU_SHARE_OF_DRAM = 0.75


def supported_formats() -> frozenset[str]:
    """Formats of experts that the expert cache serves on this installation."""
    if registry.unavailable_reason("triton") is not None:
        return frozenset()
    return frozenset((*registry.gpu_experts().FORMATS, "mxfp4_gguf"))


def path_rates(rates: Mapping[str, Rate], layout: SlabLayout, *, cpu: bool) -> PathRates:
    """What PCIe and the CPU deliver together, from a machine's rates by name; 0 for a path that is not
    there."""

    def first(*names: str) -> float:
        return next((rates[n].value for n in names if n in rates), 0.0)

    pcie = first("pcie_gather_overlapped", "pcie_h2d_overlapped", "pcie_gather", "pcie_h2d")
    experts = f"cpu_experts_{layout.format}"
    compute = first(experts + "_overlapped", experts)
    if not compute:
        dram = first("dram_read_overlapped", "dram_read")
        compute = CPU_SHARE_OF_DRAM * max(dram - pcie, dram / 3)
    return PathRates(
        pcie_gbps=pcie,
        cpu_gbps=compute if cpu else 0.0,
        slice_nbytes=layout.slice_nbytes,
        fetch_latency_s=FETCH_LATENCY_S,
        cpu_latency_s=CPU_LATENCY_S,
    )


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
        resolved, moe, vram = self._resolved, spec.moe, self._resolved.vram
        if moe is None or vram is None or resolved.experts not in PLACEMENTS:
            raise InternalError(f"--experts {resolved.experts} has no executor here")
        layout = layout_of(experts)
        store = build_store(
            experts, layout, threads=resolved.threads, pin=True, progress=self._progress
        )
        for note in store.notes:
            log.warning("%s", note)
        try:
            self.runtime = executor = make_executor(
                self._device,
                store,
                ExecutorShape(
                    PLACEMENTS[PLACEMENTS.index(resolved.experts)],
                    min(resolved.max_num_seqs, BATCH_SIZES[-1]),
                    moe.num_experts_per_token,
                    vram.experts_nbytes // layout.slice_nbytes,
                ),
                Activation(spec.activation, spec.swiglu_alpha, spec.swiglu_limit),
                threads=resolved.threads,
            )
        except BaseException:
            store.close()
            raise
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
) -> HybridExecutor:
    """The executor on a GPU, its slots filled and its CPU service running.

    Args:
        shape: ``num_slots`` includes the transit slots, which are taken from it.
        threads, cpus: of the CPU service.
        rates: of both paths; the machine's stored or probed ones if None.
    """
    layout = store.layout
    with_cpu = shape.placement in ("cpu", "hybrid")
    if shape.placement != "gpu":
        transit = shape.plan_shape(store).max_fetch
        shape = ExecutorShape(
            shape.placement, shape.max_tokens, shape.top_k, max(shape.num_slots - transit, 0)
        )
    fields = request_block(
        max_tokens=max(MAX_CPU_TOKENS, shape.max_tokens),
        top_k=shape.top_k,
        num_experts=store.num_experts,
        num_slices=layout.num_slices,
        hidden=layout.hidden,
    )
    block = device.pinned(fields.nbytes, dtype=torch.uint8) if with_cpu else None
    plan = shape.plan_shape(store)
    paths = GpuPaths(
        device, store, plan, act, fields, block, shape.top_k, max_tokens=shape.max_tokens
    )
    if rates is None:
        found, _ = starting_rates(probe_machine(gpus=True), threads)
        rates = path_rates(found, layout, cpu=with_cpu)
    new_service = None
    cpu = None
    executors: list[HybridExecutor] = []
    if block is not None:
        new_service = _service_factory(store, fields, act, block, ServiceOptions(threads, cpus))

        def fault() -> int:
            service = executors[0].service
            return 0 if service is None else int(service.fault())

        cpu = ServiceShare(block, fields, layout.num_slices, fault)
    together = rates.pcie_gbps + rates.cpu_gbps
    prefill = StreamPrefill(
        device,
        store,
        plan,
        paths,
        paths.product(act),
        cpu=cpu,
        cpu_share=rates.cpu_gbps / together if together else 0.0,
    )
    executor = HybridExecutor(
        device, store, shape, paths, prefill=prefill, block=block, new_service=new_service
    )
    executors.append(executor)
    executor.set_rates(rates)
    executor.fill()
    return executor


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
