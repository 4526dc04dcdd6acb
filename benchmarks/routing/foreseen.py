"""What prefetching under attention gains for guesses of different quality: docs/adr/0006's table.

    python -m benchmarks.routing.foreseen [--tokens 600]

The demo mixture's routes through the value policy on the virtual clock of a machine that measured so: an
H200, PCIe 5, 14 CPU threads, five slices an expert. Each guessed expert is right with the given
probability, else another one; the routers' own recall: ``benchmarks.residency.recall``.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.routing.statistics import load
from headrace.experts.cache_policy import CacheShape, ValuePolicy
from headrace.experts.replay import slots_for, visits_of
from headrace.experts.simulate import SimulatedMachine, simulate
from headrace.experts.split import CPU_LATENCY_S, FETCH_LATENCY_S, PathRates

SLICE_NBYTES, SLICES = 2_662_400, 5
PATHS = PathRates(50.0, 77.0, SLICE_NBYTES, FETCH_LATENCY_S, CPU_LATENCY_S, pcie_alone_gbps=50.7)
MACHINE = SimulatedMachine(
    PATHS, 3500.0, dense_s=53e-6, plan_s=8e-6, step_s=4.5e-4, guess_s=10e-6, max_prefetch=4
)
RESIDENCIES = (0.15, 0.25)
RECALLS = (0.0, 0.25, 0.5, 0.8, 1.0)
WARM_STEPS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--kind", default="prose")
    args = parser.parse_args()
    trace = load(args.kind, "test")
    ids = trace.ids[:, : args.tokens]
    layers, experts = len(trace.meta.layers), trace.meta.num_experts
    visits = visits_of(ids.tolist(), experts)
    rng = np.random.default_rng(3)
    draws, other = rng.random(ids.shape), rng.integers(1, experts, ids.shape)
    print("| resident | recall | hits | tok/s | gain | prefetched | needed |")
    for residency in RESIDENCIES:
        slots = SLICES * slots_for(residency, layers, experts)
        plain = 0.0
        for recall in (None, *RECALLS):
            guesses = None
            if recall is not None:
                guessed = np.where(draws < recall, ids, (ids + other) % experts)
                guesses = visits_of(guessed.tolist(), experts)
            policy = ValuePolicy(CacheShape(layers, experts, slots, SLICES))
            found = simulate(
                visits, policy, MACHINE, skip_steps=WARM_STEPS, promote=False, guesses=guesses
            )
            plain = plain or found.steps_per_s
            print(
                f"| {residency:.0%} | {'none' if recall is None else f'{recall:.0%}'} | "
                f"{100 * found.hit_rate:.1f} | {found.steps_per_s:.0f} | "
                f"{100 * (found.steps_per_s / plain - 1):+.1f}% | "
                f"{found.prefetched_nbytes / found.num_steps / 1e6:.1f} MB | "
                f"{found.ahead_nbytes / found.num_steps / 1e6:.1f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
