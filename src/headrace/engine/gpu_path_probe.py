"""Seconds that the layers of a step wait for missing experts, by the executor's own paths.

Rates of PCIe and of the CPU beside each other are means over long reads. A layer's misses are some megabytes:
a request to the CPU's threads has a begin and an end, paths end together on average only, and the longer one
counts each time. So routes are drawn at random and run as in a decoding step, with nothing between the
layers, and what that takes is compared with what the rates say (``expert_prediction``).
"""

from __future__ import annotations

import time
from statistics import median

import torch

from headrace.engine.this_machine import measured_rate
from headrace.experts.live import LiveExperts
from headrace.machine.device import Device
from headrace.machine.profile import Rate
from headrace.ops.measure import Marks

WARM_UP = 6  # steps until the split follows live rates (``live.TABLE_STEPS``)
LEAST, MOST, ENOUGH_S = 8, 40, 1.0  # steps that count
SEED = 11


def probe_paths(experts: LiveExperts, device: Device, marks: Marks) -> dict[str, Rate]:
    """``experts_layers`` (s of a step's mixtures) and ``experts_missed`` (GB/s of what they missed, over
    these seconds); {} where nothing can miss. The cache holds other experts afterwards.

    Args:
        marks: of the device.
    """
    executor = experts.executor
    shape, layout, store = executor.plan_shape, executor.store.layout, executor.store
    if executor.shape.placement == "gpu":
        return {}
    target, top_k = device.torch_device, executor.shape.top_k
    x = torch.ones(1, layout.hidden, device=target)
    shares = torch.full((1, top_k), 1 / top_k, device=target)
    ids = torch.zeros(store.num_layers, 1, top_k, dtype=torch.int32, device=target)
    generator = torch.Generator().manual_seed(SEED)

    def drawn() -> torch.Tensor:
        rows = [
            torch.randperm(shape.num_experts, generator=generator)[:top_k]
            for _ in range(store.num_layers)
        ]
        return torch.stack(rows).int().view(ids.shape)

    def work() -> tuple[torch.Tensor, ...]:
        marks.begin()
        for layer in range(store.num_layers):
            executor.normed(layer, x)
            executor(layer, x, ids[layer], shares)
        marks.point()
        return ()

    def step() -> float:
        ids.copy_(drawn())
        experts.step_begins(1)
        graph.replay()
        seconds = marks.seconds(1)[0]
        experts.step_ended()
        return seconds

    with torch.inference_mode():
        ids.copy_(drawn())
        experts.step_begins(1)  # what captures may run the work
        graph = device.graph()
        graph.capture(work)
        experts.step_ended()
        for _ in range(WARM_UP):
            step()
        times, before, start = list[float](), executor.counts(), time.perf_counter()
        while len(times) < LEAST or (len(times) < MOST and time.perf_counter() - start < ENOUGH_S):
            times.append(step())
        after = executor.counts()
    missed = after.looked_up - before.looked_up - (after.hits - before.hits)
    seconds = median(times)
    gbps = missed * store.mean_slice_nbytes / len(times) / seconds / 1e9
    how = f"{store.num_layers} layers of {top_k} random experts, in a graph"
    found = {"experts_layers": measured_rate(seconds, "s", how)}
    if gbps > 0:
        found["experts_missed"] = measured_rate(gbps, "GB/s", how)
    return found
