"""04.3 on a GPU: predicted against measured steps of SmolLM2's geometry and of 18 layers of gpt-oss-120b's.

The machine's profile is measured by `headrace bench machine` before (--profile), the kernels on data that is
nobody's after that; the model is run last, and nothing of its runs flows back into a prediction. The hit
rate is what warming up had.

    PYTHONPATH=src:. python -m benchmarks.explain.gpu_steps --profile machine.json --out gpu_steps.json
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.explain import random_models as models
from benchmarks.explain.measured_steps import (
    BAR,
    SUM_BAR,
    WATCH_BAR,
    Row,
    lines,
    measure,
    middle,
    middle_rates,
)
from benchmarks.residency import geometry as geo
from benchmarks.residency import model as residency
from headrace.engine.engine import Engine
from headrace.engine.expert_rates import StartingRates, path_rates
from headrace.engine.probes import probe_engine, probe_gpu_host
from headrace.experts.live import LiveExperts
from headrace.experts.random_store import random_store
from headrace.experts.store import HostStore
from headrace.machine.device import CudaDevice
from headrace.machine.profile import MachineProfile, Rate

GIB = 1 << 30
STEPS = 64
HOST_PROBES = 3  # before a row: what the host takes doubles and halves within seconds
CASES = ("smollm2", "offloaded", "resident")
SMALL_CONTEXTS, LARGE_CONTEXTS = (1000, 8000), (1000, 32000)
# Beside the slots: CUDA's own memory, the graphs, activations of a prompt's part.
CONTEXT_NBYTES, RESERVE_NBYTES = 600 << 20, 1200 << 20


@dataclass(frozen=True)
class Case:
    """One engine, its contexts, and the rounds that were measured.

    live: both paths' rates as the engine corrected them on its steps, for comparison with the profile's
    """

    name: str
    rows: dict[int, list[Row]]
    probe_s: float
    rates: dict[str, float]
    live: dict[str, float]


def slots_within(vram_nbytes: int, device: CudaDevice, store: HostStore) -> int:
    """Slices that the budget leaves beside what is allocated."""
    memory = device.memory()
    left = vram_nbytes - memory.allocated_nbytes - CONTEXT_NBYTES - RESERVE_NBYTES
    return left // store.layout.slice_nbytes


def run_case(
    name: str, engine: Engine, machine: MachineProfile, contexts: Sequence[int], rounds: int
) -> Case:
    """Probe, then measure every context in turns."""
    start = time.perf_counter()
    rates = probe_engine(engine)
    spent = time.perf_counter() - start
    print(f"{name}: kernels probed in {spent:.1f} s", flush=True)
    known = replace(machine, rates={**machine.rates, **rates})
    rows: dict[int, list[Row]] = {context: [] for context in contexts}

    def hosts() -> dict[str, Rate]:
        return middle_rates([probe_gpu_host(engine.parts) for _ in range(HOST_PROBES)])

    for _ in range(rounds):
        for context in contexts:
            row = measure(engine, known, context, STEPS, hosts)
            rows[context].append(row)
            print(
                f"[{time.perf_counter() - start:.0f} s] {name} " + "\n".join(lines(row, 14)),
                flush=True,
            )
    live = live_rates(engine)
    if live:
        print(f"{name}: on live steps " + ", ".join(f"{n} {v:.1f}" for n, v in live.items()))
    return Case(name, rows, spent, {n: r.value for n, r in rates.items()}, live)


def live_rates(engine: Engine) -> dict[str, float]:
    """GB/s and us of both paths by now; {} where they are not followed."""
    experts = engine.parts.experts
    tracker = experts.tracker if isinstance(experts, LiveExperts) else None
    if tracker is None:
        return {}
    found = tracker.rates
    return {
        "pcie_gbps": found.pcie_gbps, "cpu_gbps": found.cpu_gbps,
        "cpu_latency_us": found.cpu_latency_s * 1e6,
    }  # fmt: skip


def smollm2(device: CudaDevice, machine: MachineProfile, rounds: int) -> Case:
    of, context = models.smollm2_spec(), max(SMALL_CONTEXTS) + STEPS + 64
    of = replace(of, max_context=context)
    decoder = residency.build(of, models.decoder_ops(device), device, None, context)
    engine = models.engine_of("SmolLM2-135M, random weights", of, decoder, device, context)
    return run_case("smollm2", engine, machine, SMALL_CONTEXTS, rounds)


def gpt_oss(
    device: CudaDevice, machine: MachineProfile, args: argparse.Namespace
) -> Iterator[Case]:
    """Offloaded within ``vram_gib``, then with every expert in a slot."""
    layers: int = args.layers
    of, context = residency.spec(layers), max(LARGE_CONTEXTS) + STEPS + 64
    store = random_store(geo.layout(), layers, geo.EXPERTS, seed=1, threads=16, pin=True)
    later, threads = models.Later(), machine.best_threads or 14
    decoder = residency.build(of, models.decoder_ops(device), device, later, context)
    kv = models.new_kv(of, context, device)
    rates = path_rates(StartingRates(machine.rates), store.layout.format, store.layout.slice_nbytes)
    assert rates is not None
    slices = layers * geo.EXPERTS * store.layout.num_slices
    cap = slots_within(int(args.vram_gib * GIB), device, store)
    placements = {"offloaded": ("hybrid", cap), "resident": ("gpu", slices)}
    for name in (name for name in args.cases if name in placements):
        placement, slots = placements[name]
        try:
            executor, live = models.expert_runtime(
                device, store, placement, slots, rates, min(threads, 14)
            )
            later.target = executor
            engine = models.engine_of(
                f"gpt-oss-120b, {layers} layers, random weights", of, decoder, device, context,
                live, threads, kv,
            )  # fmt: skip
            models.draw_tokens(engine, of.vocab)
            yield run_case(f"gpt-oss {name}", engine, machine, LARGE_CONTEXTS, args.rounds)
            if executor.service is not None:
                executor.service.stop()
            paths: Any = executor.paths
            del engine
            paths.arena = paths.launcher = None
        except Exception:
            print(f"gpt-oss {name} failed: {traceback.format_exc()[-1500:]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--vram-gib", type=float, default=8.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = MachineProfile.load(args.profile)
    torch.set_num_threads(1)  # as the engine: torch's idle threads would spin on the experts' CPUs
    device = CudaDevice()
    torch.ones(1, device=device.torch_device)
    cases: list[Case] = []
    passed = 1
    if "smollm2" in args.cases:
        cases.append(smollm2(device, machine, args.rounds))
        passed = report(cases, machine, args.out)
    if {"offloaded", "resident"} & set(args.cases):
        for case in gpt_oss(device, machine, args):
            cases.append(case)
            passed = report(cases, machine, args.out)
    return passed if len(cases) == len(args.cases) else 1


def report(cases: Sequence[Case], machine: MachineProfile, out: Path | None) -> int:
    """Print and write what there is; 0 if all of it is within the bar."""
    passed = True
    for case in cases:
        for context, rows in case.rows.items():
            row, errors = middle(rows), sorted(r.error for r in rows)
            print(f"{case.name}: {lines(row, 0)[0]}")
            print(f"    error over {len(rows)} rounds: {errors[0]:+.1%} to {errors[-1]:+.1%}")
            inside = abs(row.error) <= BAR and abs(row.sum_error) <= SUM_BAR
            inside &= row.watch_cost <= WATCH_BAR
            passed &= inside
            if not inside:
                print(f"    {context}: not within the bar")
    print(f"04.3 on {machine.name}: {'passed' if passed else 'NOT passed'}", flush=True)
    if out is not None:
        record = {
            "bar": {"error": BAR, "sum": SUM_BAR, "watching": WATCH_BAR},
            "passed": passed,
            "torch": torch.__version__,
            "machine": json.loads(machine.to_json()),
            "cases": [
                {
                    "name": case.name,
                    "probe_s": case.probe_s,
                    "kernel_rates": case.rates,
                    "live_rates": case.live,
                    "rows": [asdict(middle(rows)) for rows in case.rows.values()],
                    "errors_of_rounds": {
                        c: [r.error for r in rows] for c, rows in case.rows.items()
                    },
                }
                for case in cases
            ],
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
