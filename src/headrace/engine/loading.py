"""Puts an engine together: checkpoint, choices, weights, KV cache, tokenizer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from headrace.checkpoint.open import open_checkpoint
from headrace.core.config import EngineConfig
from headrace.core.status import EngineInfo
from headrace.engine.parts import EngineParts
from headrace.engine.resolve import Resolved, resolve
from headrace.engine.scheduler import SchedulerConfig
from headrace.kv.storage import allocate_kv
from headrace.machine.device import HostDevice
from headrace.machine.probe import probe_machine
from headrace.models.loader import load_model
from headrace.ops import registry
from headrace.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

# PyTorch's own kernels run only where we have none; a second pool of threads beside ours would take
# the cores from it.
_TORCH_THREADS_BESIDE_KERNELS = 1


def load_parts(
    config: EngineConfig, progress: Callable[[str, float], None] | None = None
) -> EngineParts:
    """Open, check, decide, map.

    Raises:
        HeadraceError: see ``Engine.load``.
    """
    start = time.perf_counter()
    checkpoint = open_checkpoint(
        config.model, progress=progress, repair_nan_scales=config.repair_nan_scales
    )
    resolved = resolve(
        config,
        checkpoint.spec,
        probe_machine(),
        checkpoint.nbytes,
        missing_kernels=registry.unavailable_reason("cpu"),
    )
    for warning in resolved.warnings:
        log.warning("%s", warning)
    device = HostDevice()
    set_threads(resolved)
    ops = registry.resolve(_backends(resolved))
    decoder = load_model(checkpoint, ops, device, max_positions=resolved.context, progress=progress)
    kv = allocate_kv(
        checkpoint.spec,
        resolved.num_blocks,
        resolved.block_tokens,
        resolved.kv_format,
        device.torch_device,
    )
    tokenizer = load_tokenizer(checkpoint.text)
    if progress is not None:
        progress("ready", 1.0)
    info = EngineInfo(
        model=config.model,
        family=checkpoint.family.name,
        context=resolved.context,
        vocab=decoder.spec.vocab,
        weights_nbytes=checkpoint.nbytes,
        kv_nbytes=resolved.plan.kv_nbytes,
        kv_format=resolved.kv_format,
        block_tokens=resolved.block_tokens,
        threads=resolved.threads,
        backends=ops.describe(),
        choices=resolved.choices,
        load_s=time.perf_counter() - start,
    )
    return EngineParts(
        decoder, kv, tokenizer, scheduler_config(config, resolved), info, device.torch_device
    )


def scheduler_config(config: EngineConfig, resolved: Resolved) -> SchedulerConfig:
    """The scheduler's limits out of the resolved choices."""
    return SchedulerConfig(
        num_blocks=resolved.num_blocks,
        block_tokens=resolved.block_tokens,
        context=resolved.context,
        max_batch_tokens=resolved.max_batch_tokens,
        max_num_seqs=resolved.max_num_seqs,
        prefix_cache=config.prefix_cache,
    )


def set_threads(resolved: Resolved) -> None:
    """Give the back-end that computes all threads, and the other one none to compete with."""
    registry.set_num_threads(resolved.threads)
    own = resolved.backend == "reference"
    torch.set_num_threads(resolved.threads if own else _TORCH_THREADS_BESIDE_KERNELS)


def _backends(resolved: Resolved) -> tuple[str, ...]:
    """The chosen back-end first; the reference serves whatever it does not have."""
    return ("reference",) if resolved.backend == "reference" else (resolved.backend, "reference")
