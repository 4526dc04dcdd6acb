"""Seconds that the expert cache's kernels take on a GPU for a layer, on slots that are nobody's.

A layer of a decoding step plans, computes what it finds in slots, and sums up. Timed with all of the
chosen experts found, and with one of them, in captured graphs over more slots than the GPU's cache holds;
the difference is the slices' own rate, the rest what a layer costs beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from headrace.engine.gpu_kernel_probe import COLD_NBYTES, GpuProbe
from headrace.engine.stand_in import FILLING
from headrace.engine.this_machine import measured_rate
from headrace.experts.gpu_paths import GpuPaths
from headrace.experts.plan_oracle import PlanShape
from headrace.experts.request_block import request_block
from headrace.experts.slab import SlabLayout
from headrace.experts.store import HostStore
from headrace.machine.device import Device
from headrace.machine.profile import Rate
from headrace.ops.records import Activation

LAYERS = 2  # that take turns; their slots are the same


@dataclass(frozen=True)
class _NoStore:
    """The part of a store that is asked for where nothing is fetched."""

    layout: SlabLayout
    num_layers: int

    @property
    def layouts(self) -> tuple[SlabLayout, ...]:
        return (self.layout,) * self.num_layers

    def base(self, layer: int) -> int:
        return 0


def probe_experts(
    device: Device,
    probe: GpuProbe,
    layout: SlabLayout,
    shape: PlanShape,
    top_k: int,
    act: Activation,
    *,
    cold_nbytes: int = COLD_NBYTES,
    new_paths: Callable[..., Any] = GpuPaths,
) -> dict[str, Rate]:
    """``experts_call`` (s of a layer) and ``kernel_one_slices`` (GB/s of slices in slots).

    Args:
        probe: what times calls on the device.
        shape: of the engine's plan; layers and slots are replaced.
        act: the model's activation.
    """
    least = -(-cold_nbytes // (layout.slice_nbytes * layout.num_slices))
    experts = min(shape.num_experts, max(least, 2 * top_k))
    slots = experts * layout.num_slices
    plan = replace(shape, num_layers=LAYERS, num_slots=slots)
    fields = request_block(
        max_tokens=1, top_k=top_k, num_experts=shape.num_experts,
        num_slices=layout.num_slices, hidden=layout.hidden,
    )  # fmt: skip
    store = cast(HostStore, _NoStore(layout, LAYERS))
    paths = new_paths(device, store, plan, act, fields, None, top_k, max_tokens=1)
    paths.arena.fill_(FILLING)
    keys = torch.arange(paths.state.slot_of.numel(), dtype=torch.int32)
    paths.state.slot_of.copy_(keys % slots)  # several experts share a slot: only its bytes matter
    x = torch.ones(1, layout.hidden, device=device.torch_device)
    shares = torch.full((1, top_k), 1 / top_k, device=device.torch_device)

    def layer(index: int, ids: torch.Tensor) -> None:
        paths.prepare(index % LAYERS, x)
        paths.plan(index % LAYERS, ids, shares)
        paths.hits(x)
        if plan.max_fetch:
            paths.fetched(x)
        paths.combine(1, x)

    def seconds(chosen: int) -> float:
        """Of a layer with so many experts."""
        turns = max(1, experts // chosen)
        ids = [
            _ids(turn * chosen, chosen, experts, top_k, device.torch_device)
            for turn in range(turns)
        ]
        calls = [lambda turn=turn: layer(turn, ids[turn]) for turn in range(turns)]
        return probe.seconds(calls)

    paths.begin_step()
    all_s, one_s = seconds(top_k), seconds(1)
    nbytes = layout.slice_nbytes * layout.num_slices
    slope = (all_s - one_s) / max(top_k - 1, 1)
    how = f"{layout.format} {layout.hidden:,} x {layout.width * layout.num_slices:,}, in a graph, cold"
    return {
        "experts_call": measured_rate(
            max(one_s - slope, 1e-7), "s", f"a layer of no experts; {how}"
        ),
        "kernel_one_slices": measured_rate(
            nbytes / slope / 1e9 if slope > 0 else 1e6, "GB/s", f"1 and {top_k} experts; {how}"
        ),
    }


def _ids(first: int, chosen: int, experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """int32 [1, top_k]: so many experts in slots one after another, and no more."""
    ids = [(first + i) % experts for i in range(chosen)] + [-1] * (top_k - chosen)
    return torch.tensor([ids], dtype=torch.int32, device=device)
