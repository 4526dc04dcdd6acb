"""Decoding over given random tokens with experts in host memory (bars 02.1, 02.2, 02.4).

    python -m benchmarks.residency.decode --layers 18 --vram-gib 8            # 02.1
    python -m benchmarks.residency.decode --layers 36 --vram-gib 16           # 02.2
    python -m benchmarks.residency.decode --layers 18 --placement gpu         # 02.4, all resident

The budget is what the driver counts, CUDA's own memory included. Tokens are given, never the model's
own: greedy output of random weights loops, and loops hit.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.residency import geometry as geo
from benchmarks.residency import model
from benchmarks.residency.kernels import expert_float64
from headrace.core.step import ScheduledChunk
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.experts.building import make_executor
from headrace.experts.executor import ExecutorShape, HybridExecutor
from headrace.experts.random_store import random_store
from headrace.experts.slab import SlabLayout
from headrace.experts.split import CPU_LATENCY_S, FETCH_LATENCY_S, PathRates
from headrace.experts.store import HostStore
from headrace.kv.storage import allocate_kv
from headrace.machine.device import CudaDevice
from headrace.ops.records import Activation
from headrace.ops.registry import resolve

GIB = 1 << 30
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 1024
CONTEXT_NBYTES = 600 << 20  # what CUDA took before we could look
RESERVE_NBYTES = 256 << 20  # graphs, activations of prefill, the allocator's rounding


class Nothing:
    """No experts at all: what the rest of the step costs."""

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros_like(x)


class Later:
    """Stands in the decoder's place for an executor that is made once memory is known."""

    target: Any = Nothing()

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self.target(layer, x, ids, weights)


def executor_of(
    device: CudaDevice, store: HostStore, placement: Any, slots: int, options: argparse.Namespace
) -> HybridExecutor:
    shape = ExecutorShape(placement, options.batch, geo.TOP_K, slots)
    return make_executor(
        device, store, shape, Activation("swiglu_clamped"), threads=options.threads,
        cpus=tuple(sorted(os.sched_getaffinity(0))[1 : options.threads + 1]),
        rates=rates_of(options, store.layout.slice_nbytes),
    )  # fmt: skip


def rates_of(options: argparse.Namespace, slice_nbytes: int, **changes: float) -> PathRates:
    return PathRates(
        pcie_gbps=changes.get("pcie", options.pcie), cpu_gbps=changes.get("cpu", options.cpu),
        slice_nbytes=slice_nbytes, fetch_latency_s=FETCH_LATENCY_S, cpu_latency_s=CPU_LATENCY_S,
    )  # fmt: skip


def run_tokens(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor | None, start: int = 0
) -> dict[str, float]:
    """Feed the tokens one by one, waiting for each result as an engine does."""
    blocks = tuple(range(CONTEXT_TOKENS // BLOCK_TOKENS))
    times = []
    for at, token in enumerate(tokens):
        begin = time.perf_counter()
        if executor is not None:
            executor.step_begins(1)
        result = graphs.run([ScheduledChunk(0, (token,), start + at, blocks, True)])
        result.best.cpu()
        if executor is not None:
            executor.step_ended()
        times.append(time.perf_counter() - begin)
    warm = sorted(times[8:])
    return {
        "tok_s": 1.0 / (sum(warm) / len(warm)),
        "median_tok_s": 1.0 / warm[len(warm) // 2],
        "best_tok_s": 1.0 / warm[0],
    }


def measured(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor, nbytes: int
) -> dict[str, Any]:
    """Decode, and count what went which way."""
    before = executor.counts()
    stats = executor.service.stats() if executor.service else None
    figures: dict[str, Any] = run_tokens(graphs, tokens, executor)
    after = executor.counts()
    hits, fetched, computed = (
        getattr(after, n) - getattr(before, n) for n in ("hits", "fetched", "computed")
    )
    steps = len(tokens)
    figures |= {
        "hit_rate": hits / max(hits + fetched + computed, 1),
        "fetched_mb_a_token": fetched * nbytes / steps / 1e6,
        "computed_mb_a_token": computed * nbytes / steps / 1e6,
        "admitted": after.admitted - before.admitted,
    }
    if stats is not None and executor.service is not None:
        now = executor.service.stats()
        busy = now.busy_s - stats.busy_s
        figures["cpu_gbps_while_busy"] = (now.nbytes - stats.nbytes) / max(busy, 1e-9) / 1e9
        figures["cpu_busy_ms_a_token"] = busy / steps * 1e3
    return figures


def kernel_times(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor | None
) -> dict[str, Any]:
    """Microseconds a token by kernel, by torch's profiler; what takes longest first."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run_tokens(graphs, tokens, executor)
        rows = [
            (e.key[:60], e.device_time_total / len(tokens), e.count / len(tokens))
            for e in seen.key_averages()
        ]
    except Exception as error:
        return {"error": repr(error)[:300]}
    rows.sort(key=lambda row: -row[1])
    return {name: [round(us, 1), round(count, 1)] for name, us, count in rows[:24]}


def check(executor: HybridExecutor, store: HostStore, layer: int) -> float:
    """The largest error of one eager call of the executor, relative to float64's largest value."""
    device = torch.device("cuda")
    x = torch.randn(1, geo.HIDDEN, device=device)
    ids = torch.randperm(geo.EXPERTS, device=device)[: geo.TOP_K].int().view(1, -1)
    weights = torch.rand(1, geo.TOP_K, device=device)
    executor.step_begins(1)
    if layer:
        executor.paths.begin_step()
    found = executor(layer, x, ids, weights)
    executor.step_ended()
    want = torch.zeros(geo.HIDDEN, dtype=torch.float64, device=device)
    for expert, weight in zip(ids[0].tolist(), weights[0].tolist()):
        slab = store.slab(layer, expert).to(device)
        want += weight * expert_float64(store.layout, slab, x[0].double())
    return float((found[0].double() - want).abs().max() / want.abs().max())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that all benchmarks of this folder share."""
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--vram-gib", type=float, default=0.0, help="0: no budget")
    parser.add_argument("--placement", default="hybrid", choices=("gpu", "cpu", "stream", "hybrid"))
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--slices", type=int, help="of an expert; the layout's choice if left out")
    parser.add_argument("--pcie", type=float, default=45.0)
    parser.add_argument("--cpu", type=float, default=65.0)
    parser.add_argument(
        "--then-resident", action="store_true", help="afterwards, all experts on the GPU"
    )
    parser.add_argument("--sweep", action="store_true", help="try other splits too")


def slots_within(
    options: argparse.Namespace, device: CudaDevice, layout: SlabLayout, free_before: int,
    reserve: int = RESERVE_NBYTES,
) -> int:  # fmt: skip
    """Slots that the budget leaves, what the driver took and ``reserve`` counted in."""
    everything = options.layers * geo.EXPERTS * layout.num_slices
    if not options.vram_gib:
        return everything
    memory = device.memory()
    used = free_before - memory.free_nbytes
    spare = memory.reserved_nbytes - memory.allocated_nbytes
    left = int(options.vram_gib * GIB) - used + spare - reserve
    return min(everything, left // layout.slice_nbytes)


def main() -> None:
    parser = geo.parser(__doc__)
    add_options(parser)
    options = parser.parse_args()
    begin = time.perf_counter()
    figures: dict[str, Any] = {"options": vars(options)}

    def say(name: str, value: Any) -> None:
        figures[name] = value
        print(f"{time.perf_counter() - begin:6.1f} s  {name}: {value}", flush=True)

    device = CudaDevice()
    torch.ones(1, device=device.torch_device)
    free_before = device.memory().free_nbytes + CONTEXT_NBYTES
    layout = geo.layout(num_slices=options.slices)
    store = random_store(layout, options.layers, geo.EXPERTS, seed=1, threads=16, pin=True)
    say("load_s", repr(store.times))
    say("pinned", all(store.pinned(i) for i in range(store.num_layers)))
    ops = resolve(device.backends)
    later = Later()
    of = model.spec(options.layers)
    decoder = model.build(of, ops, device, later)
    kv = allocate_kv(
        of, CONTEXT_TOKENS // BLOCK_TOKENS + 1, BLOCK_TOKENS, "bf16", device.torch_device
    )
    tokens = torch.randint(
        geo.VOCAB, (options.tokens,), generator=torch.Generator().manual_seed(5)
    ).tolist()
    graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=CONTEXT_TOKENS)
    graphs.capture()
    say("dense_only", run_tokens(graphs, tokens[:64], None))
    everything = options.layers * geo.EXPERTS * layout.num_slices
    slots = slots_within(options, device, layout, free_before)
    say("slots", {"slices": slots, "share": slots / everything})
    executor = executor_of(device, store, options.placement, slots, options)
    later.target = executor
    say("filled", True)
    graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=CONTEXT_TOKENS)
    try:
        executor.step_begins(1)
        graphs.capture()
        run_tokens(graphs, tokens[:16], executor)
        nbytes = layout.slice_nbytes
        say("errors", [check(executor, store, layer) for layer in (0, 5, 11)])
        result = measured(graphs, tokens, executor, nbytes)
        missed = (result["fetched_mb_a_token"] + result["computed_mb_a_token"]) * 1e6
        floor_s = missed / (options.pcie + options.cpu) / 1e9
        result["floor_ms"] = floor_s * 1e3
        result["percent_of_floor"] = 100 * floor_s * result["tok_s"]
        say("decode", result)
        say("driver_used_gib", (free_before - device.memory().free_nbytes) / GIB)
        say("kernels", kernel_times(graphs, tokens[:20], executor))
        if options.sweep and options.placement == "hybrid":
            sweep = {}
            for pcie, cpu in (
                (1e-6, 80.0),
                (30.0, 80.0),
                (40.0, 80.0),
                (50.0, 60.0),
                (50.0, 45.0),
                (50.0, 1e-6),
            ):
                executor.set_rates(rates_of(options, nbytes, pcie=pcie, cpu=cpu))
                sweep[f"{pcie:g}:{cpu:g}"] = measured(graphs, tokens[:100], executor, nbytes)
                print(pcie, cpu, sweep[f"{pcie:g}:{cpu:g}"], flush=True)
            figures["sweep"] = sweep
    except Exception:
        say("failed", traceback.format_exc()[-2500:])
    finally:
        if executor.service is not None:
            executor.service.stop()
    nbytes = layout.slice_nbytes
    if options.then_resident:
        del graphs
        executor.paths.arena = None
        later.target = executor = executor_of(device, store, "gpu", everything, options)
        graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=CONTEXT_TOKENS)
        graphs.capture()
        run_tokens(graphs, tokens[:16], executor)
        say("resident", measured(graphs, tokens, executor, nbytes))
        say("resident_errors", [check(executor, store, layer) for layer in (0, 7)])
        say("resident_kernels", kernel_times(graphs, tokens[:20], executor))
    geo.report("residency/decode", figures, options.out)


if __name__ == "__main__":
    main()
