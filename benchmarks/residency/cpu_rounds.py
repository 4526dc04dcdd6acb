"""Where the time of the CPU's requests goes, by thread and phase, asked alone and within steps.

    PYTHONPATH=src python -m benchmarks.residency.cpu_rounds --layers 9 --vram-gib 4 --slices 5 --prefetch 4

Each line is one way to run the service, with what its log of rounds and the system say (``cpu_log``): with
and without threads that help each other, pinned and not, beside copies and not, on fewer CPUs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.residency import decode, model, overlapped
from benchmarks.residency import geometry as geo
from benchmarks.residency.cpu_log import Watch, rounds_of
from benchmarks.residency.decoding import Later, measured, run_tokens, settled_rates
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.experts import building
from headrace.experts.executor import HybridExecutor
from headrace.experts.request_block import request_block
from headrace.experts.store import HostStore
from headrace.kv.storage import allocate_kv
from headrace.machine.device import CudaDevice
from headrace.ops.expert_records import ServiceOptions
from headrace.ops.records import Activation
from headrace.ops.registry import cpu_experts, resolve

ACT = Activation("swiglu_clamped")
ROUNDS = 8192  # kept of a log
PERIOD_S = 450e-6  # from request to request: a layer's time
COPIES_AT_ONCE = 40  # 13 MB each: 10 ms of PCIe
SHOWN = frozenset(
    (
        "tok_s",
        "best_tok_s",
        "pcie_gbps_while_busy",
        "cpu_gbps_while_busy",
        "hit_rate",
        "stall_ms_a_token",
    )
)
Say = Callable[[str, Any], None]


@dataclass(frozen=True)
class Way:
    """One way to run the service. cpus: None where the system places the threads."""

    name: str
    threads: int
    cpus: tuple[int, ...] | None
    helping: bool = True
    yielding: bool = True
    copies: bool = False
    slices: tuple[int, int] = (4, 10)  # of a request, at random

    @property
    def options(self) -> ServiceOptions:
        return ServiceOptions(self.threads, self.cpus)

    def prepare(self, service: Any) -> torch.Tensor:
        """Set up a service that is not started, or idle; returns its log."""
        service.share_work(help_others=self.helping, yield_waiting=self.yielding)
        return service.log_rounds(ROUNDS)

    def figures(self, log: torch.Tensor) -> dict[str, Any]:
        return rounds_of(log, self.cpus or tuple(range(self.threads)))


def ways(cpus: tuple[int, ...]) -> tuple[Way, ...]:
    """What is compared; ``cpus`` are all that there are, and the first is left to the host."""
    most = len(cpus) - 1
    pinned, fewer = cpus[1:], cpus[1:most]
    return (
        Way("fixed parts", most, pinned, helping=False),
        Way("helping", most, pinned),
        Way("helping, one CPU less", most - 1, fewer),
        Way("helping, not yielding", most, pinned, yielding=False),
        Way("fixed parts, not pinned", most, None, helping=False),
        Way("helping, not pinned", most, None),
    )


class Asker:
    """Requests from this thread, for slices at random out of the store."""

    def __init__(self, store: HostStore, device: CudaDevice) -> None:
        self.store, layout = store, store.layout
        self.fields = request_block(
            max_tokens=1, top_k=4, num_experts=store.num_experts, num_slices=layout.num_slices,
            hidden=layout.hidden,
        )  # fmt: skip
        raw = device.pinned(self.fields.nbytes + 64, dtype=torch.uint8)
        raw.zero_()
        self.block = raw[-raw.data_ptr() % 64 :][: self.fields.nbytes]
        self.rng = np.random.default_rng(1)
        self._host = self.block.numpy()
        x = self.rng.standard_normal(layout.hidden)
        self._part(self.fields.x, layout.hidden, np.float32)[:] = x

    def _part(self, at: int, count: int, dtype: Any = np.int32) -> Any:
        return self._host[at : at + 4 * count].view(dtype)

    def service(self, options: ServiceOptions) -> Any:
        self.block[: self.fields.items].zero_()
        s = self.store
        bases = [s.base(layer) for layer in range(s.num_layers)]
        return cpu_experts().expert_service(
            s.layouts, bases, s.num_experts, ACT, self.block, self.fields, options
        )

    def fill(self, slices: int) -> None:
        """The next request, for one token."""
        f, s = self.fields, self.store
        pieces = s.layout.num_slices
        keys = np.sort(self.rng.choice(s.num_experts * pieces, slices, replace=False))
        rows = np.zeros((slices, 4), np.int32)
        rows[:, 0], rows[:, 1], rows[:, 3] = keys // pieces, keys % pieces, 1
        self._part(f.header, 4)[:] = (int(self.rng.integers(s.num_layers)), 1, slices, 1)
        self._part(f.items, 4 * slices)[:] = rows.ravel()
        self._part(f.pair_token, 1)[:] = 0
        self._part(f.pair_weight, 1, np.float32)[:] = 0.25


class Copier:
    """Keeps PCIe busy with copies of the store, which the asking thread sends ahead."""

    def __init__(self, store: HostStore) -> None:
        self._source = [store.slab(layer, 0).flatten() for layer in range(store.num_layers)]
        self._target = torch.empty_like(self._source[0], device="cuda")
        self._stream, self._event = torch.cuda.Stream(), torch.cuda.Event()
        self._turn = 0

    def feed(self) -> None:
        """Send more once half of what was sent has arrived."""
        if self._turn and not self._event.query():
            return
        with torch.cuda.stream(self._stream):
            for i in range(COPIES_AT_ONCE):
                self._turn += 1
                source = self._source[self._turn % len(self._source)]
                self._target.copy_(source, non_blocking=True)
                if 2 * i == COPIES_AT_ONCE:
                    self._event.record()


def alone(asker: Asker, way: Way, copier: Copier, say: Say, seconds: float = 0.25) -> None:
    """Ask as decoding does, from here."""
    service = asker.service(way.options)
    log = way.prepare(service)
    service.start()
    try:
        with Watch() as watch:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                begin = time.perf_counter()
                if way.copies:
                    copier.feed()
                asker.fill(int(asker.rng.integers(*way.slices)))
                service.request(5.0)
                while time.perf_counter() - begin < PERIOD_S:
                    pass
    finally:
        service.stop()
        torch.cuda.synchronize()
    say(f"alone: {way.name}", way.figures(log) | watch.found)


class Decoding:
    """Steps of one executor and its graphs, with one service after the other."""

    def __init__(
        self, executor: HybridExecutor, graphs: DecodeGraphs, tokens: list[int], rates: Any
    ) -> None:
        self._executor, self._graphs, self._tokens, self._rates = executor, graphs, tokens, rates

    def __call__(self, way: Way, say: Say, *, live: bool) -> None:
        """live: with rates corrected on live steps first, as the engine does."""
        x: Any = self._executor
        share, kept = x._prefill._cpu, x._kept
        kept.exchange(
            building._service_factory(x.store, share._fields, ACT, kept._block, way.options)
        )
        log = way.prepare(x.service)
        x.set_rates(self._rates)
        found: dict[str, Any] = {}
        run_tokens(self._graphs, self._tokens[:6], x)
        if live:
            found["settled"] = settled_rates(self._graphs, self._tokens, x, self._rates, None)
        with Watch() as watch:
            seen = measured(self._graphs, self._tokens, x, x.store.layout.slice_nbytes)
        found |= {k: round(v, 2) for k, v in seen.items() if k in SHOWN}
        kind = "steps, live rates" if live else "steps, given rates"
        say(f"{kind}: {way.name}", found | way.figures(log) | watch.found)


def main() -> None:
    parser = geo.parser(__doc__)
    decode.add_options(parser)
    parser.add_argument("--only-steps", action="store_true", help="leave out requests from here")
    options = parser.parse_args()
    figures = geo.Figures(options=vars(options))
    say = figures.say
    device, free_before, store = decode.begun(options)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    if not options.only_steps:
        asker, copier = Asker(store, device), Copier(store)
        for way in ways(cpus):
            for copies in (False, True):
                name = f"{way.name}{', copies' if copies else ''}"
                alone(asker, Way(**{**vars(way), "name": name, "copies": copies}), copier, say)
        for slices in (1, 19):
            name = f"helping, {slices} slices"
            alone(
                asker, Way(name, len(cpus) - 1, cpus[1:], slices=(slices, slices + 1)), copier, say
            )
    steps(options, device, store, free_before, cpus, say)
    geo.report("residency/cpu_rounds", figures.found, options.out)


def steps(
    options: argparse.Namespace, device: CudaDevice, store: HostStore, free_before: int,
    cpus: tuple[int, ...], say: Say,
) -> None:  # fmt: skip
    """The same services within decoding steps."""
    later, of = Later(), model.spec(options.layers)
    decoder = model.build(of, resolve(device.backends), device, later)
    blocks = decode.CONTEXT_TOKENS // decode.BLOCK_TOKENS + 1
    kv = allocate_kv(of, blocks, decode.BLOCK_TOKENS, "bf16", device.torch_device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(geo.VOCAB, (96,), generator=generator).tolist()
    slots = decode.slots_within(options, device, store.layout, free_before)
    executor = decode.executor_of(device, store, "hybrid", slots, options, options.prefetch[-1])
    later.target = executor
    try:
        executor.step_begins(1)
        graphs = DecodeGraphs(decoder, kv, device, max_batch=1, context=decode.CONTEXT_TOKENS)
        graphs.capture()
        rates = decode.rates_of(options, store.layout.slice_nbytes)
        run = Decoding(executor, graphs, tokens, rates)
        for live in (False, True):
            for way in ways(cpus):
                run(way, say, live=live)
        say("overlapped", overlapped.measure(executor))
    finally:
        if executor.service is not None:
            executor.service.stop()


if __name__ == "__main__":
    main()
