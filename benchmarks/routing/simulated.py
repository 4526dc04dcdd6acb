"""Promotion and the split on machines that are not here: docs/residency.md's table.

    python -m benchmarks.routing.simulated [--tokens 1000]

The demo mixture's routes with experts of gpt-oss-120b's size (13.2 MB) on three links beside one CPU.
A few minutes of one core.
"""

from __future__ import annotations

import argparse

from benchmarks.routing.statistics import load
from headrace.experts.cache_policy import CacheShape, LruPolicy, ValuePolicy
from headrace.experts.promotion import GAIN
from headrace.experts.replay import slots_for, visits_of
from headrace.experts.simulate import SimulatedMachine, simulate
from headrace.experts.split import PathRates

EXPERT_NBYTES = 13_219_200
CPU_GBPS = 73.0  # H200 machine, 15 threads beside a full PCIe stream (2026-11-29)
LINKS_GBPS = (51.0, 12.0, 2.0)  # PCIe 5.0 x16 as measured; PCIe 3.0 x16; an external enclosure
RESIDENCIES = (0.15, 0.25)
GPU_GBPS = 3500.0
DENSE_S, PLAN_S, STEP_S = 45e-6, 5e-6, 2e-4  # attention and dense work of a small layer
WARM_STEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--kind", default="prose")
    args = parser.parse_args()
    trace = load(args.kind, "test")
    visits = visits_of(trace.ids[:, : args.tokens].tolist(), trace.meta.num_experts)
    shape = (len(trace.meta.layers), trace.meta.num_experts)
    print(f"{args.kind}, {args.tokens} tokens, promotion gain {GAIN}")
    for link in LINKS_GBPS:
        paths = PathRates(link, CPU_GBPS, EXPERT_NBYTES, cpu_latency_s=3.7e-6)
        machine = SimulatedMachine(paths, GPU_GBPS, DENSE_S, PLAN_S, STEP_S)
        for residency in RESIDENCIES:
            slots = slots_for(residency, *shape)
            for make in (LruPolicy, ValuePolicy):
                for promote in (False, True):
                    found = simulate(
                        visits,
                        make(CacheShape(*shape, slots)),
                        machine,
                        skip_steps=WARM_STEPS,
                        promote=promote,
                    )
                    print(
                        f"| {link:g} GB/s | {residency:.0%} | {make.__name__} | "
                        f"{'yes' if promote else 'no'} | {100 * found.hit_rate:.1f} | "
                        f"{found.steps_per_s:.0f} | "
                        f"{found.promoted_nbytes / found.num_steps / 1e6:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
