"""How far apart PCIe and the CPU end in the layers of decoding steps, and what decides it.

    PYTHONPATH=src python -m benchmarks.residency.balance --layers 9 --vram-gib 4

Each layer's slices by path stand beside the GPU's times (``timeline``) and those of the CPU's request
(``cpu_log``), so that the record can be replayed with other splits. ``--each`` writes all layers to a file.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.residency import decode, model
from benchmarks.residency import geometry as geo
from benchmarks.residency.cpu_log import rounds_of
from benchmarks.residency.decoding import (
    Later,
    check,
    measured,
    run_tokens,
    settled_rates,
    wrong_slots,
)
from benchmarks.residency.timeline import MARKS, Stamped, intervals
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.experts.executor import HybridExecutor
from headrace.experts.random_store import random_store
from headrace.kv.storage import allocate_kv
from headrace.machine.device import CudaDevice
from headrace.ops.registry import resolve

ROUNDS = 4096
TOKENS = 64
SKIPPED = 4
COUNTS = 8  # of the plan


class Counted(Stamped):
    """Stamped paths that keep each layer's counts, too."""

    def __init__(self, paths: Any, num_layers: int, device: torch.device) -> None:
        super().__init__(paths, num_layers, device)
        self.counted = torch.zeros(num_layers, COUNTS, dtype=torch.int32, device=device)

    def combine(self, num_tokens: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = super().combine(num_tokens, residual)
        self.counted[self._layer].copy_(self._paths.state.counts)
        return out


def layers_of(
    graphs: DecodeGraphs, tokens: list[int], executor: HybridExecutor, log: torch.Tensor
) -> dict[str, Any]:
    """Columns by layer: slices hit, fetched and computed, and times in microseconds."""
    paths: Any = executor.paths
    times: list[torch.Tensor] = []
    counts: list[torch.Tensor] = []
    for at, token in enumerate(tokens):
        run_tokens(graphs, [token], executor, at)
        times.append(paths.times.cpu())
        counts.append(paths.counted.cpu())
    t = torch.stack(times).double().numpy() / 1e3
    n = torch.stack(counts).numpy()
    asked = n[..., 2].ravel() > 0
    rows = log.numpy()
    rows = rows[rows[:, 1] > 0]
    rows = rows[np.argsort(rows[:, 1])][-int(asked.sum()) :]
    cpu = np.zeros(asked.size)
    cpu[asked] = (rows[:, 2] - rows[:, 1]) / 1e3
    at = {mark: t[..., i] for i, mark in enumerate(MARKS)}
    found = {
        "hits": n[..., 0], "fetched": n[..., 1], "computed": n[..., 2],
        "missing": n[..., 4],
        "plan": at["planned"] - at["prepare"], "gather": at["gathered"] - at["gather"],
        "gathered": at["gathered"] - at["prepare"], "compute": at["fetched"] - at["joined"],
        "await": at["answered"] - at["fetched"], "answered": at["answered"] - at["prepare"],
        "cpu": cpu.reshape(n.shape[:2]),
    }  # fmt: skip
    return {
        "layers": {name: v[SKIPPED:].ravel().round(1).tolist() for name, v in found.items()},
        "timeline": intervals(torch.stack(times[SKIPPED:])),
    }


def summary(layers: dict[str, Any]) -> dict[str, Any]:
    """Microseconds by which the CPU ended after the fetched slices were computed: the GPU looks at the
    answer as soon as it has computed them, so below zero is what the times of the request say."""
    a = {name: np.array(v) for name, v in layers.items()}
    both = (a["computed"] > 0) & (a["fetched"] > 0)
    ready = a["gathered"] + a["compute"] + 1.0
    wait = np.where(a["await"] > 7.0, a["await"] - 4.0, 0.0)
    # Where it waited: the request began so long before its answer was seen.
    begun = np.median((a["answered"] - a["cpu"])[both & (wait > 3.0)])
    late = (begun + a["cpu"] - ready)[both]
    per_slice = np.polyfit(a["computed"][both], a["cpu"][both], 1)
    fetch = np.polyfit(a["fetched"][both], a["gather"][both], 1)

    def rounded(values: Any) -> list[float]:
        return [round(float(v), 2) for v in values]

    def off(line: Any, count: str, took: str) -> float:
        return round(float((a[took][both] - np.polyval(line, a[count][both])).std()), 1)

    return {
        "layers": int(both.sum()),
        "late": rounded((late.mean(), late.std(), *np.percentile(late, [10, 50, 90]))),
        "cpu_us_slice_and_fixed": rounded(per_slice),
        "cpu_off_line_std": off(per_slice, "computed", "cpu"),
        "gather_us_slice_and_fixed": rounded(fetch),
        "gather_off_line_std": off(fetch, "fetched", "gather"),
        "from_plan_to_request": round(float(begun), 1),
        "mean": {name: round(float(v[both].mean()), 2) for name, v in a.items()},
    }  # fmt: skip


def main() -> None:
    parser = geo.parser(__doc__)
    decode.add_options(parser)
    parser.add_argument(
        "--ways", nargs="*", default=["5:0", "5:4", "10:0"],
        help="slices of an expert, slices prefetched, what is switched off",
    )  # fmt: skip
    parser.add_argument("--each", help="write every layer's figures here")
    options = parser.parse_args()
    figures = geo.Figures(options=vars(options))
    say = figures.say
    ways = [Way.of(text) for text in options.ways]
    options.slices = ways[0].slices
    device, free_before, store = decode.begun(options)
    later, of = Later(), model.spec(options.layers)
    decoder = model.build(of, resolve(device.backends), device, later)
    blocks = decode.CONTEXT_TOKENS // decode.BLOCK_TOKENS + 1
    kv = allocate_kv(of, blocks, decode.BLOCK_TOKENS, "bf16", device.torch_device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(geo.VOCAB, (options.tokens,), generator=generator).tolist()
    nbytes = decode.slots_within(options, device, store.layout, free_before)
    nbytes *= store.layout.slice_nbytes
    each: dict[str, Any] = {}
    stores = {options.slices: store}

    def capture() -> DecodeGraphs:
        graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=decode.CONTEXT_TOKENS)
        graphs.capture()
        return graphs

    made: list[Variant] = []
    for way in ways:
        if way.slices not in stores:
            other = geo.layout(num_slices=way.slices)
            stores[way.slices] = random_store(
                other, options.layers, geo.EXPERTS, seed=1, threads=16, pin=True
            )
        with seen_by_itself(say, str(way)):
            made.append(
                Variant(
                    options, device, stores[way.slices], nbytes, way, tokens, later, capture, say
                )
            )
    for variant in made:
        variant.settle(tokens[:TOKENS], say)
    in_turn(made, tokens, say)
    for variant in made:
        with seen_by_itself(say, variant.name):
            each[variant.name] = variant.look(tokens[:TOKENS], later, capture, say)
    if options.each:
        Path(options.each).write_text(json.dumps(each))
    geo.report("residency/balance", figures.found, options.out)


@contextmanager
def seen_by_itself(say: Any, name: str) -> Iterator[None]:
    """One way that fails does not keep the others from being measured."""
    try:
        yield
    except Exception:
        say(f"{name}: failed", traceback.format_exc()[-2500:])


@dataclass(frozen=True)
class Way:
    """slices: of an expert; prefetch: slices sent before a plan; off: what is not used of the rest."""

    slices: int
    prefetch: int
    off: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Way:
        slices, prefetch, *off = text.split(":")
        return cls(int(slices), int(prefetch), tuple(off))


class Variant:
    """One executor and its graphs; rates settled as the engine settles them, then fixed. Its CPU service
    runs only while it is looked at: services share the CPUs."""

    def __init__(
        self, options: Any, device: CudaDevice, store: Any, nbytes: int, way: Way,
        tokens: list[int], later: Later, capture: Any, say: Any,
    ) -> None:  # fmt: skip
        self.name = f"{way.slices} slices, prefetch {way.prefetch} {'-'.join(way.off)}"
        self.options, self.adds = options, "residual" not in way.off
        slots = nbytes // store.layout.slice_nbytes
        self.executor = decode.executor_of(device, store, "hybrid", slots, options, way.prefetch)
        switch_off(self.executor, way.off)
        later.target, later.adds = self.executor, "residual" not in way.off
        self.executor.step_begins(1)
        self.graphs = capture()
        run_tokens(self.graphs, tokens[:16], self.executor)
        self.rest()

    def settle(self, tokens: list[int], say: Any) -> None:
        self.wake()
        rates = decode.rates_of(self.options, self.executor.store.layout.slice_nbytes)
        found = settled_rates(self.graphs, tokens, self.executor, rates, None)
        say(f"{self.name}: settled", found)
        self.rest()

    def wake(self) -> None:
        assert self.executor._kept is not None
        self.executor._kept.exchange()

    def rest(self) -> None:
        torch.cuda.synchronize()
        assert self.executor._kept is not None
        self.executor._kept.stop()

    def look(self, tokens: list[int], later: Later, capture: Any, say: Any) -> Any:
        """Where this one's time goes."""
        self.wake()
        executor = self.executor
        store = executor.store
        run_tokens(self.graphs, tokens[:4], executor)
        found = measured(self.graphs, tokens, executor, store.layout.slice_nbytes)
        say(f"{self.name}: decode", found)
        service: Any = executor.service
        log = service.log_rounds(ROUNDS)
        later.target, paths = executor, executor.paths
        later.adds = self.adds
        stamped: Any = Counted(paths, store.num_layers, torch.device("cuda"))
        executor.paths = stamped
        found = layers_of(capture(), tokens, executor, log)
        executor.paths = paths
        say(f"{self.name}: timeline", found["timeline"])
        say(f"{self.name}: balance", summary(found["layers"]))
        say(f"{self.name}: rounds", rounds_of(log, tuple(range(self.options.threads))))
        errors = [check(executor, store, layer) for layer in (0, 5)]
        say(f"{self.name}: wrong_slots, errors", [wrong_slots(executor, store), *errors])
        self.rest()
        return found["layers"]


def switch_off(executor: HybridExecutor, off: tuple[str, ...]) -> None:
    """Before graphs are captured."""
    launcher = executor.paths.launcher  # type: ignore[attr-defined]
    if "await" in off:
        launcher.tuning = replace(launcher.tuning, await_early=False)
    executor.publishes = "publish" not in off


def in_turn(variants: list[Variant], tokens: list[int], say: Any, rounds: int = 5) -> None:
    """Tokens a second of each, one after the other: the machine's rates drift."""
    found: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            variant.wake()
            run_tokens(variant.graphs, tokens[:4], variant.executor)
            speed = run_tokens(variant.graphs, tokens[:48], variant.executor)["tok_s"]
            found[variant.name].append(round(speed, 2))
            variant.rest()
        say("in_turn", found)


if __name__ == "__main__":
    main()
