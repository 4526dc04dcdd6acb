"""What running ahead saves: the engine's steps with it and without it, in turn on one cache.

    python -m benchmarks.residency.running_ahead --layers 6 --vram-gib 3.5 --out ahead.json

SmolLM2's geometry, then gpt-oss-120b's layers: offloaded within the budget, and with every expert in a
slot. Tokens are drawn at random. A step takes from one result to the next, as a user sees it.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks.explain import random_models as models
from benchmarks.residency import geometry as geo
from benchmarks.residency import model as residency
from benchmarks.residency.decode import GIB, rates_of
from benchmarks.residency.decoding import ahead_and_not
from headrace.core.request import GenerationRequest, OutputDelta, SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.explaining import Watch
from headrace.experts.random_store import random_store
from headrace.explain import leaf
from headrace.machine.device import CudaDevice

CONTEXT, WARM_UP = 2048, 8
CONTEXT_NBYTES, RESERVE_NBYTES = 600 << 20, 900 << 20


def run_request(engine: Engine, name: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds from delta to delta, and those within ``Engine.step``."""
    sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    prompt = tuple((7 * j) % 200 for j in range(40))
    engine.submit(GenerationRequest(name, prompt, sampling, cache_salt=name))
    ends, inside = list[float](), list[float]()
    while engine.has_work():
        begin = time.perf_counter()
        found = engine.step()
        end = time.perf_counter()
        if any(isinstance(item, OutputDelta) and item.token_ids for item in found):
            ends.append(end)
            inside.append(end - begin)
    return [b - a for a, b in pairwise(ends)][WARM_UP:], inside[WARM_UP:]


def in_turn(engine: Engine, steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a step by mode, each round's median, and the host's ranges of the last."""
    found: dict[str, Any] = {"ahead": [], "one_by_one": []}
    ranges: dict[str, Any] = {}
    for index in range(rounds):
        for name in ("ahead", "one_by_one"):
            engine.run_ahead(name == "ahead")
            seen: list[Any] = []
            engine.observe = seen.append
            times, _ = run_request(engine, f"{name}-{index}", steps)
            engine.observe = None
            found[name].append(round(1e3 * median(times), 4))
            steady = seen[WARM_UP:]
            names = {c.id for s in steady for c in s.classes}
            ranges[name] = {
                n: round(
                    1e6 * median([sum(c.seconds for c in s.classes if c.id == n) for s in steady]),
                    1,
                )
                for n in sorted(names)
            } | {"stats_us": round(1e6 * median([s.seconds for s in steady]), 1)}
    engine.run_ahead(True)
    return {**found, "ranges_us": ranges, "watched": watched(engine, steps)}


def watched(engine: Engine, steps: int) -> dict[str, float]:
    """Of a step that runs ahead: what it takes, and how long the GPU waits within it."""
    watch = Watch(engine)
    watch.start()
    run_request(engine, "watched", steps)
    watch.stop()
    host = (leaf.LAUNCHES, leaf.SCHEDULE, leaf.DETOKENIZE)
    plain = [o.stats for o in watch.steps if o.stats.phase == "decode" and not o.slowed][WARM_UP:]
    exposed = [sum(c.seconds for c in one.classes if c.id in host) for one in plain]
    return {
        "step_us": 1e6 * median(one.seconds for one in plain),
        "gpu_waits_us": 1e6 * median(exposed),
    }


def smollm2(device: CudaDevice, steps: int, rounds: int) -> dict[str, Any]:
    of = models.smollm2_spec()
    decoder = residency.build(of, models.decoder_ops(device), device, None, CONTEXT)
    engine = models.engine_of("SmolLM2-135M, random weights", of, decoder, device, CONTEXT)
    return in_turn(engine, steps, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vram-gib", type=float, default=3.5)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--pcie", type=float, default=45.0, help="GB/s that the split begins with")
    parser.add_argument("--cpu", type=float, default=65.0, help="likewise")
    parser.add_argument("--cases", nargs="+", default=["smollm2", "offloaded", "resident"])
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = CudaDevice()
    figures = geo.Figures(options=vars(args))
    if "smollm2" in args.cases:
        figures.say("smollm2", smollm2(device, args.steps, args.rounds))
    placements = [name for name in args.cases if name != "smollm2"]
    if placements:
        _gpt_oss(device, args, figures, placements)
    geo.report("residency/running_ahead", figures.found, args.out)


def _gpt_oss(
    device: CudaDevice, args: argparse.Namespace, figures: geo.Figures, placements: list[str]
) -> None:
    of = residency.spec(args.layers)
    store = random_store(geo.layout(), args.layers, geo.EXPERTS, seed=1, threads=16, pin=True)
    later = models.Later()
    decoder = residency.build(of, models.decoder_ops(device), device, later, CONTEXT)
    kv = models.new_kv(of, CONTEXT, device)
    everything = args.layers * geo.EXPERTS * store.layout.num_slices
    left = int(args.vram_gib * GIB) - device.memory().allocated_nbytes
    left -= CONTEXT_NBYTES + RESERVE_NBYTES
    for name in placements:
        hybrid = name == "offloaded"
        slots = left // store.layout.slice_nbytes if hybrid else everything
        try:
            executor, live = models.expert_runtime(
                device, store, "hybrid" if hybrid else "gpu", slots,
                rates_of(args, store.layout.slice_nbytes), args.threads,
            )  # fmt: skip
            later.target = executor
            engine = models.engine_of(
                f"gpt-oss-120b, {args.layers} layers", of, decoder, device, CONTEXT, live,
                args.threads, kv,
            )  # fmt: skip
            models.draw_tokens(engine, of.vocab)
            figures.say(f"{name}_slots", {"slots": slots, "share": slots / everything})
            figures.say(name, in_turn(engine, args.steps, args.rounds))
            generator = torch.Generator().manual_seed(5)
            tokens = torch.randint(of.vocab, (256,), generator=generator).tolist()
            assert engine.parts.graphs is not None
            found = ahead_and_not(engine.parts.graphs, tokens, executor)
            figures.say(f"{name}_graphs_alone", found)
            if executor.service is not None:
                executor.service.stop()
            paths: Any = executor.paths
            del engine
            paths.arena = paths.launcher = None
            gc.collect()
        except Exception:
            figures.say(f"{name}_failed", traceback.format_exc()[-2500:])


if __name__ == "__main__":
    main()
