"""What PCIe and the CPU deliver alone and together, through the executor's own gather and service."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

from benchmarks.residency import geometry as geo
from headrace.experts.executor import HybridExecutor

FEW_EXPERTS = 2  # 26 MB: what a layer leaves to the CPU
TOKENS = geo.EXPERTS // geo.TOP_K  # so many name every expert once


def measure(executor: HybridExecutor, repeats: int = 4) -> dict[str, float]:
    """GB/s: ``pcie`` and ``cpu`` together, ``*_alone``. Between steps; takes some 0.3 s.

    A layer's worth of experts (1.7 GB) goes each way at once: the gather kernel writes it into the transit
    slots, the CPU's service computes it for one token an expert. Together, both go on until each has
    been measured while the other was busy: PCIe's share is as long as the CPU takes. ``cpu_of_cached`` is the
    CPU on two experts that it has just read, ``cpu_of_few`` on two that it has not.
    """
    store, paths = executor.store, executor.paths
    layout, state = store.layout, paths.state
    share = executor._prefill._cpu
    assert share is not None
    assert executor.service is not None
    device = state.counts.device
    x, out = torch.randn(TOKENS, geo.HIDDEN), torch.zeros(TOKENS, geo.HIDDEN, device=device)
    ids = torch.arange(geo.EXPERTS, dtype=torch.int32).view(TOKENS, geo.TOP_K)
    weights = torch.full((TOKENS, geo.TOP_K), 0.25)
    keys = list(range(geo.EXPERTS * layout.num_slices))
    s = executor.plan_shape
    slots = torch.arange(len(keys), dtype=torch.int32) % s.max_fetch + s.num_slots
    fetches = torch.zeros(len(keys), 4, dtype=torch.int32)
    fetches[:, 0], fetches[:, 1] = slots, torch.tensor(keys, dtype=torch.int32)
    fetches = fetches.to(device)
    executor.step_begins(1)

    def gather(layer: int, count: int) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        state.counts[1] = count
        begin.record()
        paths.launcher.gather(layer, fetches)
        end.record()
        return begin, end

    def ask(layer: int, keys: list[int] = keys) -> None:
        share.rows(TOKENS).copy_(x)
        share.begin(layer, ids, weights, keys)

    def answered() -> None:
        share.add_to(out)
        torch.cuda.synchronize()

    def compute(layer: int, keys: list[int] = keys) -> float:
        assert executor.service is not None
        before = executor.service.stats()
        ask(layer, keys)
        answered()
        now = executor.service.stats()
        return (now.nbytes - before.nbytes) / (now.busy_s - before.busy_s) / 1e9

    def rate(events: Any, count: int) -> float:
        begin, end = events
        torch.cuda.synchronize()
        return count * layout.slice_nbytes / begin.elapsed_time(end) / 1e6

    found: dict[str, list[float]] = defaultdict(list)
    short = len(keys) // 2  # so that PCIe ends before the CPU does
    for turn in range(repeats + 1):
        layer, other = turn % store.num_layers, (turn + 1) % store.num_layers
        rates = {
            "pcie_alone": rate(gather(layer, len(keys)), len(keys)),
            "cpu_alone": compute(layer),
        }
        gather(layer, len(keys))
        time.sleep(0.002)
        rates["cpu"] = compute(other)
        torch.cuda.synchronize()
        few = keys[: FEW_EXPERTS * layout.num_slices]
        compute(other, few)
        rates["cpu_of_cached"] = compute(other, few)  # the same bytes again
        rates["cpu_of_few"] = compute(layer, few)
        ask(other)
        time.sleep(0.002)
        rates["pcie"] = rate(gather(layer, short), short)
        answered()
        if turn:
            for name, value in rates.items():
                found[name].append(value)
    return {name: sorted(values)[len(values) // 2] for name, values in found.items()}
