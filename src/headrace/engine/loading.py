"""Puts an engine together: checkpoint, choices, weights, KV cache, tokenizer."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from headrace.checkpoint.fingerprint import weights_hash
from headrace.checkpoint.open import open_checkpoint
from headrace.checkpoint.records import Checkpoint, RawTensor
from headrace.core.block_planes import PACKED_FORMATS
from headrace.core.config import EngineConfig
from headrace.core.errors import DoesNotFitError, HeadraceError
from headrace.core.kv_formats import FORMATS
from headrace.core.model_sizes import ModelSizes
from headrace.core.model_spec import ModelSpec
from headrace.core.status import EngineInfo
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.engine.expert_rates import StartingRates
from headrace.engine.expert_runtime import ExpertPlace, supported_formats
from headrace.engine.kv_choice import KVSupport
from headrace.engine.parts import EngineParts
from headrace.engine.resolve import GpuSupport, Resolved, resolve
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.kv.directions import Directions, load_directions
from headrace.kv.storage import allocate_cache, is_out_of_memory
from headrace.machine.cuda_device import shared_memory_nbytes, visible_gpus
from headrace.machine.device import CudaDevice, Device, HostDevice
from headrace.machine.probe import Machine, probe_machine
from headrace.machine.profile_store import with_profile
from headrace.machine.quick_probe import starting_rates
from headrace.machine.threads import choose_threads
from headrace.models.decoder import Decoder
from headrace.models.loader import load_model
from headrace.ops import registry
from headrace.ops.records import LayerCache
from headrace.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

# PyTorch's own kernels run only where we have none; a second pool of threads beside ours would take
# the cores from it.
_TORCH_THREADS_BESIDE_KERNELS = 1


Progress = Callable[[str, float], None]


def load_parts(config: EngineConfig, progress: Progress | None = None) -> EngineParts:
    """Open, check, decide, map.

    Raises:
        HeadraceError: see ``Engine.load``.
    """
    start = time.perf_counter()
    with _lack_of_memory_told():
        checkpoint = open_checkpoint(
            config.model, progress=progress, repair_nan_scales=config.repair_nan_scales
        )
        machine = with_profile(find_machine(config))
        support = gpu_support(machine, checkpoint.spec, config.threads)
        found = find_directions(config, checkpoint)
        resolved = resolve(
            config,
            checkpoint.spec,
            machine,
            checkpoint.nbytes,
            missing_kernels=registry.unavailable_reason("cpu"),
            sizes=model_sizes(checkpoint),
            gpu=support,
            kv=kv_support(found, machine),
        )
    for warning in resolved.warnings:
        log.warning("%s", warning)
    set_threads(resolved)
    device = open_device(resolved, machine)
    ops = registry.resolve(_backends(resolved))
    experts = ExpertPlace(resolved, device, support.known, progress)
    with _lack_of_memory_told(resolved):
        decoder = load_model(
            checkpoint,
            ops,
            device,
            max_positions=resolved.context,
            dense_format=resolved.dense_format,
            executor_factory=experts.factory,
            progress=progress,
        )
        kv = allocate_cache(
            checkpoint.spec,
            resolved.kv_pool,
            resolved.kv_format,
            device.torch_device,
            found.directions if found is not None and resolved.kv_rank else None,
        )
        with experts.awake():
            graphs = capture_graphs(resolved, device, decoder, kv, progress)
        tokenizer = load_tokenizer(checkpoint.text)
    if progress is not None:
        progress("ready", 1.0)
    info = EngineInfo(
        model=config.model,
        family=checkpoint.family.name,
        context=resolved.context,
        vocab=decoder.spec.vocab,
        weights_nbytes=checkpoint.nbytes,
        kv_nbytes=resolved.kv_nbytes,
        kv_format=resolved.kv_format,
        block_tokens=resolved.block_tokens,
        threads=resolved.threads,
        backends=ops.describe(),
        choices=resolved.choices,
        load_s=time.perf_counter() - start,
        memory=resolved.memory,
    )
    return EngineParts(
        decoder,
        kv,
        tokenizer,
        scheduler_config(config, resolved),
        info,
        device,
        graphs,
        experts.runtime,
    )


@contextmanager
def _lack_of_memory_told(resolved: Resolved | None = None) -> Generator[None]:
    """Say in our terms that memory was not granted, whichever it was: a GPU's runs out beside a host's.

    resolved: whose plan did not hold; None before there is one.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        plan = None if resolved is None else resolved.vram if on_gpu else resolved.plan
        against = "" if plan is None else f", against the plan: {plan.describe()}"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where, hint = "host memory", "give a smaller --context or --ram-budget, or free memory"
        if on_gpu:
            where, hint = "GPU memory", "give a larger --vram-budget, or a smaller --context"
        elif "CUDA error" in first:  # also of a GPU that has no room for the driver's own
            where = "host memory that a GPU reads, or the GPU's own,"
            hint += "; nvidia-smi says what else is on the GPU"
        raise DoesNotFitError(
            f"{where} ran out while the model was loaded{against}: {first}", hint=hint
        ) from error


# Set, it renumbers the GPUs that torch sees, and nvidia-smi lists them by their own numbers.
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def find_machine(config: EngineConfig) -> Machine:
    """This machine with the GPUs that torch would use, in torch's order.

    nvidia-smi says what is free before CUDA has taken its own share; torch is asked where nvidia-smi
    cannot say it.
    """
    if config.device == "cpu":
        return probe_machine()
    machine = probe_machine(gpus=_VISIBLE_DEVICES not in os.environ)
    return machine if machine.gpus else replace(machine, gpus=visible_gpus())


def model_sizes(checkpoint: Checkpoint) -> ModelSizes:
    """How a checkpoint's matrices are stored."""
    experts = [t for name, t in checkpoint.tensors.items() if ".experts." in name]
    others = [t for name, t in checkpoint.tensors.items() if ".experts." not in name]

    def formats(of: list[RawTensor], rank: int) -> frozenset[str]:
        return frozenset(t.format for t in of if len(t.shape) >= rank and "bias" not in t.name)

    return ModelSizes(
        total_nbytes=checkpoint.nbytes,
        expert_nbytes=sum(t.nbytes for t in experts),
        expert_formats=formats(experts, 2),
        dense_formats=formats([t for t in others if "router" not in t.name], 2),
        packed_nbytes=sum(map(_packed_nbytes, others)),
        expert_kinds=_expert_kinds(checkpoint),
    )


def _packed_nbytes(tensor: RawTensor) -> int:
    """See ``ModelSizes.packed_nbytes``."""
    elements = math.prod(tensor.shape)
    if len(tensor.shape) < 2 or "router" in tensor.name:
        return 4 * elements
    return tensor.nbytes if tensor.format in PACKED_FORMATS else 2 * elements


def _expert_kinds(checkpoint: Checkpoint) -> tuple[tuple[str, str, bool], ...]:
    """See ``ModelSizes.expert_kinds``. Names are ``layers.3.experts.gate`` or ``...experts.7.gate``."""
    sides: dict[int, dict[str, set[str]]] = {}
    blocked: set[int] = set()
    for name, tensor in checkpoint.tensors.items():
        pieces = name.split(".")
        if ".experts." not in name or "bias" in pieces[-1]:
            continue
        layer, side = int(pieces[1]), "down" if pieces[-1] == "down" else "gate_up"
        sides.setdefault(layer, {}).setdefault(side, set()).add(tensor.format)
        scale, stacked = tensor.parts.get("scale"), not pieces[3].isdigit()
        if scale is not None and scale.ndim == 2 + stacked:
            blocked.add(layer)
    found: list[tuple[str, str, bool]] = []
    for layer in sorted(sides):
        formats = [sides[layer].get(side, set[str]()) for side in ("gate_up", "down")]
        if any(len(one) != 1 for one in formats):
            return ()
        gate_up, down = (one.pop() for one in formats)
        found.append((gate_up, down, layer in blocked))
    return tuple(found)


def gpu_support(machine: Machine, spec: ModelSpec, threads: int | None = None) -> GpuSupport:
    """What of this installation could run on the machine's GPU; looked up only if there is one.

    A mixture's placement depends on the machine's rates: the stored profile's, or quick probes.

    Args:
        threads: that the user gave.
    """
    if not machine.gpus:
        return GpuSupport("no GPU was found")
    missing = registry.unavailable_reason("triton")
    if missing is not None or spec.moe is None:
        return GpuSupport(missing, supported_formats())
    chosen = choose_threads(machine.cpu, threads, reserve=1, measured=machine.measured_threads)
    rates, probed = starting_rates(machine, chosen.threads)
    return GpuSupport(None, supported_formats(), StartingRates(rates, probed))


def open_device(resolved: Resolved, machine: Machine) -> Device:
    """The device that was chosen, kept within its budget.

    Raises:
        MachineError: it is not there after all.
        DoesNotFitError: the driver's own memory leaves less than planned.
    """
    if resolved.vram is None:
        return HostDevice()
    device = CudaDevice(resolved.gpu_index)
    before = next((g for g in machine.gpus if g.index == resolved.gpu_index and g.driver), None)
    free = None if before is None else before.memory_free_nbytes
    left = device.limit_memory(resolved.vram.budget_nbytes, free)
    log.info("CUDA leaves %d of %d bytes for tensors", left, resolved.vram.budget_nbytes)
    return device


def capture_graphs(
    resolved: Resolved,
    device: Device,
    decoder: Decoder,
    kv: Sequence[LayerCache],
    progress: Progress | None,
) -> DecodeGraphs | None:
    """Capture decoding, where the device has something to gain from it."""
    if resolved.device != "cuda" or resolved.backend != "triton":
        return None
    graphs = DecodeGraphs(
        decoder, kv, device, max_batch=resolved.max_num_seqs, context=resolved.context
    )
    graphs.capture(progress)
    return graphs


def scheduler_config(config: EngineConfig, resolved: Resolved) -> SchedulerConfig:
    """The scheduler's limits out of the resolved choices."""
    chunks = resolved.chunks
    return SchedulerConfig(
        num_blocks=resolved.num_blocks,
        block_tokens=resolved.block_tokens,
        context=resolved.context,
        max_batch_tokens=resolved.max_batch_tokens,
        max_num_seqs=resolved.max_num_seqs,
        prefix_cache=config.prefix_cache,
        sealed=FORMATS[resolved.kv_format].sealed,
        # The pool has a block more for padding, which the scheduler does not know of.
        num_first=min(resolved.kv_pool.num_first, resolved.num_blocks) or None,
        kv_key=resolved.kv_key,
        beside_tokens=None if chunks is None else max(chunks.beside, resolved.max_num_seqs),
        tail_tokens=None if chunks is None else chunks.tail,
    )


def find_directions(config: EngineConfig, checkpoint: Checkpoint) -> Directions | None:
    """The residual directions of these weights, looked up only where a format could use them."""
    named = FORMATS.get(config.kv_format or "")
    if config.kv_format != "auto" and (named is None or not named.max_rank):
        return None
    return load_directions(weights_hash(checkpoint), checkpoint.spec)


def kv_support(found: Directions | None, machine: Machine) -> KVSupport:
    """Which back-ends have kernels for sealed pages, and which directions they could use."""
    able = {b for b in registry.BACKENDS if registry.serves(b, registry.SEALED)}
    shared = shared_memory_nbytes(machine.gpus[0].index) if machine.gpus else None
    return KVSupport(frozenset(able), None if found is None else found.key, shared)


def set_threads(resolved: Resolved) -> None:
    """Give the back-end that computes all threads, and the other one none to compete with."""
    registry.set_num_threads(resolved.threads)
    own = resolved.backend == "reference"
    torch.set_num_threads(resolved.threads if own else _TORCH_THREADS_BESIDE_KERNELS)


def _backends(resolved: Resolved) -> tuple[str, ...]:
    """The chosen back-end first; the reference serves whatever it does not have."""
    return ("reference",) if resolved.backend == "reference" else (resolved.backend, "reference")
