"""Decoding over given random tokens with experts in host memory (bars 02.1, 02.2, 02.4).

    python -m benchmarks.residency.decode --layers 18 --vram-gib 8            # 02.1
    python -m benchmarks.residency.decode --layers 36 --vram-gib 16           # 02.2
    python -m benchmarks.residency.decode --layers 18 --placement gpu         # 02.4, all resident

The budget is what the driver counts, CUDA's own memory included. Tokens are given, never the model's
own: greedy output of random weights loops, and loops hit.
"""

from __future__ import annotations

import argparse
import gc
import os
import traceback
from typing import Any

import torch

from benchmarks.residency import geometry as geo
from benchmarks.residency import model
from benchmarks.residency.decoding import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    Later,
    ahead_and_not,
    check,
    figures_of,
    kernel_times,
    logits_after,
    measured,
    run_tokens,
)
from benchmarks.residency.given_routing import GivenExecutor, GivenRouting
from benchmarks.residency.recall import recall
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
RECALL_TOKENS = 128
# Few: a sum in another order decides a near tie of some random router otherwise, sooner or later.
SAME_TOKENS = 3
CONTEXT_NBYTES = 600 << 20  # what CUDA took before we could look
RESERVE_NBYTES = 256 << 20  # graphs, activations of prefill, the allocator's rounding


def executor_of(
    device: CudaDevice, store: HostStore, placement: Any, slots: int, options: argparse.Namespace,
    prefetch: int = 0,
) -> HybridExecutor:  # fmt: skip
    shape = ExecutorShape(placement, options.batch, geo.TOP_K, slots, prefetch)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that all benchmarks of this folder share."""
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--vram-gib", type=float, default=0.0, help="0: no budget")
    parser.add_argument("--placement", default="hybrid", choices=("gpu", "cpu", "stream", "hybrid"))
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--slices", type=int, help="of an expert; the layout's choice if left out")
    parser.add_argument("--pcie", type=float, default=45.0, help="GB/s that the split begins with")
    parser.add_argument("--cpu", type=float, default=65.0, help="likewise")
    parser.add_argument(
        "--prefetch", type=int, nargs="*", default=[0, 4],
        help="slices prefetched for a layer at most; several: one after the other, the last reported",
    )  # fmt: skip
    parser.add_argument(
        "--one-by-one", action="store_true", help="launch each step after the one before it"
    )
    parser.add_argument("--no-profile", action="store_true", help="leave out times by kernel")
    parser.add_argument(
        "--guesses", action="store_true", help="compare all guesses with the routing"
    )
    parser.add_argument(
        "--recall", type=float, help="forced: given routing, guesses right with this probability"
    )
    parser.add_argument(
        "--then-resident", action="store_true", help="afterwards, all experts on the GPU"
    )


def begun(options: argparse.Namespace) -> tuple[CudaDevice, int, HostStore]:
    """The device, its free bytes before CUDA took any, and a pinned store of random experts."""
    torch.set_num_threads(1)  # as the engine: torch's idle threads would spin on the experts' CPUs
    device = CudaDevice()
    torch.ones(1, device=device.torch_device)
    free_before = device.memory().free_nbytes + CONTEXT_NBYTES
    layout = geo.layout(num_slices=options.slices)
    store = random_store(layout, options.layers, geo.EXPERTS, seed=1, threads=16, pin=True)
    return device, free_before, store


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
    figures = geo.Figures(options=vars(options))
    say = figures.say
    device, free_before, store = begun(options)
    layout = store.layout
    say("load_s", repr(store.times))
    say("pinned", all(store.pinned(i) for i in range(store.num_layers)))
    ops = resolve(device.backends)
    later = Later()
    of = model.spec(options.layers)
    decoder = model.build(of, ops, device, later)
    blocks = CONTEXT_TOKENS // BLOCK_TOKENS + 1
    kv = allocate_kv(of, blocks, BLOCK_TOKENS, "bf16", device.torch_device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(geo.VOCAB, (options.tokens,), generator=generator).tolist()

    def capture() -> DecodeGraphs:
        graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=CONTEXT_TOKENS)
        graphs.capture()
        return graphs

    graphs = capture()
    say("dense_only", run_tokens(graphs, tokens[:64], None))
    everything = options.layers * geo.EXPERTS * layout.num_slices
    slots = slots_within(options, device, layout, free_before)
    say("slots", {"slices": slots, "share": slots / everything})
    first = None  # logits without a prefetch
    for prefetch in options.prefetch:
        executor = executor_of(device, store, options.placement, slots, options, prefetch)
        later.target, given = executor, None
        if options.recall is not None:
            given = GivenRouting(executor, options.layers, options.recall)
            later.target = GivenExecutor(executor, given)
        name = f"prefetch_{prefetch}" if options.recall is None else f"forced_recall_{prefetch}"
        try:
            executor.step_begins(1)
            graphs = capture()
            for part, found in figures_of(
                graphs, capture, tokens, executor, layout.slice_nbytes, given,
                rates_of(options, layout.slice_nbytes), later, not options.no_profile, not options.one_by_one,
            ):  # fmt: skip
                say(f"{name}_{part}", found)
            logits = logits_after(graphs, tokens[:SAME_TOKENS], executor)
            if first is None:
                first = logits
            say(f"{name}_logits_differ", float((logits - first).abs().max() / first.abs().max()))
            say("driver_used_gib", (free_before - device.memory().free_nbytes) / GIB)
            if given is None:
                say("errors", [check(executor, store, layer) for layer in (0, 5, 11)])
            if given is None and options.guesses and prefetch == options.prefetch[-1]:
                say("recall", recall(decoder, kv, tokens[:RECALL_TOKENS], device.torch_device))
        except Exception:
            say("failed", traceback.format_exc()[-2500:])
        finally:
            if executor.service is not None:
                executor.service.stop()
        later.target = executor = graphs = given = None
        gc.collect()
        device.release_cached()
    if options.then_resident:
        later.target = executor = executor_of(device, store, "gpu", everything, options)
        graphs = capture()
        run_tokens(graphs, tokens[:16], executor)
        ahead = not options.one_by_one
        say("resident", measured(graphs, tokens, executor, layout.slice_nbytes, ahead=ahead))
        say("resident_in_turn", ahead_and_not(graphs, tokens, executor))
        say("resident_errors", [check(executor, store, layer) for layer in (0, 7)])
        say("resident_kernels", kernel_times(graphs, tokens[:20], executor))
    geo.report("residency/decode", figures.found, options.out)


if __name__ == "__main__":
    main()
