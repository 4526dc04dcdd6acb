"""Time to the first token of prompts, experts in host memory (bar 02.5).

    python -m benchmarks.residency.prefill --layers 18 --vram-gib 8

A prompt of random tokens goes through the decoder in one chunk, its last row through the output matrix;
the turn of 10 tokens follows a prompt of 2,048 on the cache that this one left. Kernels are compiled
before. The floor is the bytes that missed over what brought them: PCIe at ``--pcie-peak``, and the CPU at
the rate that it had while it was busy.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.residency import decode, decoding, model
from benchmarks.residency import geometry as geo
from headrace.core.step import PIECE_ROWS, ScheduledChunk
from headrace.engine.batch import build_batch
from headrace.experts.executor import HybridExecutor
from headrace.kv.storage import allocate_kv
from headrace.machine.device import CudaDevice
from headrace.ops.registry import resolve

BLOCK_TOKENS = 16
LONGEST = 8192
# What the longest chunk needs beside weights and slots, in rows of float32 for each of its tokens: PyTorch
# reserved 3.2 (benchmarks.residency.chunks), the rest is for what shorter chunks leave in its cache. All of a
# chunk's rows at once took 17.
ROWS = 8
RUNS = 3


class Prompts:
    """Random prompts, timed.

    ``last``: of the latest one, slices by path, the CPU's bytes and busy seconds, seconds until the
    host had queued everything. ``piece_rows``: see ``build_batch``.
    """

    piece_rows = PIECE_ROWS
    logits = torch.zeros(1, 1)  # of the latest row

    def __init__(
        self, options: Any, device: CudaDevice, executor: HybridExecutor, parts: Any
    ) -> None:
        self.executor, self.last = executor, dict[str, float]()
        self._device, self._options = device, options
        self._decoder, self._kv, self._blocks = parts
        self._generator = torch.Generator().manual_seed(6)

    def begin_again(self) -> None:
        """Draw the same tokens as at first."""
        self._generator.manual_seed(6)

    def __call__(self, tokens: int, start: int = 0) -> float:
        drawn = torch.randint(geo.VOCAB, (tokens,), generator=self._generator)
        ids = tuple(drawn.tolist())
        executor = self.executor
        executor.step_begins(tokens)
        before = self._counted()
        torch.cuda.synchronize()
        at = time.perf_counter()
        given, batch = build_batch(
            [ScheduledChunk(0, ids, start, tuple(range(self._blocks)), True)],
            BLOCK_TOKENS,
            self._device.torch_device,
            piece_rows=self.piece_rows,
        )
        hidden = self._decoder.forward(given, batch, self._kv)
        self.logits = self._decoder.logits(hidden[-1:])
        best = self.logits.argmax()
        queued = time.perf_counter() - at
        int(best)
        took = time.perf_counter() - at
        executor.step_ended()
        if not hidden[-1].isfinite().all():
            raise ArithmeticError(f"{tokens} tokens: the hidden row is not finite")
        self.last = {k: v - before[k] for k, v in self._counted().items()} | {"queued_s": queued}
        return took

    def _counted(self) -> dict[str, float]:
        found = self.executor.prompt_slices()
        counts: dict[str, float] = {
            "hits": found.hits, "fetched": found.fetched, "computed": found.computed
        }  # fmt: skip
        service = self.executor.service
        if service is not None:
            stats = service.stats()
            counts |= {"cpu_nbytes": stats.nbytes, "busy_s": stats.busy_s}
        return counts

    def report(self, took: float) -> dict[str, float]:
        """The latest prompt in figures."""
        last, nbytes = self.last, self.executor.store.layout.slice_nbytes
        missed = (last["fetched"] + last["computed"]) * nbytes
        cpu = last.get("cpu_nbytes", 0) / last["busy_s"] if last.get("busy_s") else 0.0
        floor_s = missed / (self._options.pcie_peak * 1e9 + cpu)
        layers = self._options.layers
        return {
            "ms": took * 1e3,
            "ms_a_layer": took * 1e3 / layers,
            "queued_ms": last["queued_s"] * 1e3,
            "cpu_busy_ms": last.get("busy_s", 0.0) * 1e3,
            "hits": last["hits"],
            "pcie_gb": last["fetched"] * nbytes / 1e9,
            "pcie_gbps": last["fetched"] * nbytes / took / 1e9,
            "cpu_gb": last["computed"] * nbytes / 1e9,
            "cpu_gbps_while_busy": cpu / 1e9,
            "floor_ms": floor_s * 1e3,
            "percent_of_floor": 100 * floor_s / took,
        }


def profile(work: Callable[[], float], layers: int) -> dict[str, Any]:
    """Where a prompt's time goes, ms a layer: kernels by name, how long PCIe and the GPU were busy."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        took = work()
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            spans.setdefault(event.name[:48], []).append(span)
    copies = [s for name, own in spans.items() if "Memcpy HtoD" in name for s in own]
    kernels = [s for name, own in spans.items() if "Mem" not in name for s in own]
    rows = [
        (name, round(sum(b - a for a, b in own) / 1e3 / layers, 3), len(own))
        for name, own in spans.items()
    ]
    return {
        "ms_a_layer": took * 1e3 / layers,
        "pcie_busy": _union_us(copies) / 1e3 / layers,
        "gpu_busy": _union_us(kernels) / 1e3 / layers,
        "kernels": sorted(rows, key=lambda row: -row[1])[:18],
    }


def host_profile(work: Callable[[], float]) -> str:
    """Python's own functions by time; the profiler slows them, so compare, do not add up."""
    seen, text = cProfile.Profile(), io.StringIO()
    seen.runcall(work)
    pstats.Stats(seen, stream=text).sort_stats("tottime").print_stats(22)
    return text.getvalue()


def _union_us(spans: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, 0.0
    for a, b in sorted(spans):
        total += max(b - max(a, end), 0.0)
        end = max(end, b)
    return total


def main() -> None:
    parser = geo.parser(__doc__)
    decode.add_options(parser)
    parser.add_argument("--pcie-peak", type=float, default=54.7, help="GB/s, for the floor")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too")
    options = parser.parse_args()
    figures = geo.Figures(options=vars(options))
    say = figures.say
    device, free_before, store = decode.begun(options)
    layout = store.layout
    later = decoding.Later()
    of = model.spec(options.layers)
    decoder = model.build(of, resolve(device.backends), device, later)
    blocks = 2 * LONGEST // BLOCK_TOKENS
    kv = allocate_kv(of, blocks + 1, BLOCK_TOKENS, "bf16", device.torch_device)
    slots = decode.slots_within(
        options, device, layout, free_before, ROWS * 4 * LONGEST * geo.HIDDEN
    )
    executor = decode.executor_of(device, store, options.placement, slots, options)
    later.target = executor
    chunk = Prompts(options, device, executor, (decoder, kv, blocks))
    say("slots", slots)
    try:
        with torch.inference_mode():
            for tokens in (64, 10, 2048, LONGEST):  # kernels are compiled, and the split settles
                print("warm-up", tokens, chunk(tokens), flush=True)
            # The crossover to streaming is among the short ones.
            for tokens in (64, 128, 192, 256, 2048, LONGEST):
                took = [chunk(tokens) for _ in range(RUNS)]
                say(f"ttft_s_{tokens}", took)
                say(f"last_{tokens}", chunk.report(took[-1]))
                if tokens == LONGEST:
                    say("tok_s_8192", tokens / min(took))
            chunk(2048)
            took = [chunk(10, 2048 + 10 * turn) for turn in range(2 * RUNS)]
            say("turn_of_10_s", took)
            say("last_10", chunk.report(took[-1]))
            say("driver_used_gib", (free_before - device.memory().free_nbytes) / decode.GIB)
            if options.profile:
                for tokens in (10, 64):
                    print(host_profile(lambda n=tokens: chunk(n)), flush=True)
                for tokens in (64, 10, 2048, LONGEST):
                    say(f"profile_{tokens}", profile(lambda n=tokens: chunk(n), options.layers))
        figures.found["total_s"] = figures.seconds()
    finally:
        if executor.service is not None:
            executor.service.stop()
    geo.report("residency/prefill", figures.found, options.out)


if __name__ == "__main__":
    main()
