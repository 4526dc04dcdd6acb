"""Decoding token by token with an executor in place, and what it did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.residency import geometry as geo
from benchmarks.residency import overlapped
from benchmarks.residency.kernels import expert_float64
from benchmarks.residency.timeline import Stamped, intervals
from headrace.core.step import ScheduledChunk
from headrace.engine.decode_graphs import DecodeGraphs
from headrace.experts.executor import HybridExecutor
from headrace.experts.live import LiveExperts
from headrace.experts.rates import RateTracker
from headrace.experts.split import PathRates
from headrace.experts.store import HostStore
from headrace.layers.moe import AddsResidual

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 1024


class Nothing:
    """No experts at all: what the rest of the step costs."""

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros_like(x)


class Later:
    """Stands in the decoder's place for an executor that is made once memory is known.

    foresees: whether layers are guessed; graphs keep what it was when they were captured.
    """

    target: Any = Nothing()
    foresees = True
    adds = True  # whether the executor adds the residual itself

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self.target(layer, x, ids, weights)

    def with_residual(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(self.target, AddsResidual) and self.adds:
            return self.target.with_residual(layer, x, ids, weights, residual)
        return self.target(layer, x, ids, weights).add_(residual)

    def add_to(
        self, layer: int, x: Any, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.target.add_to(layer, x, ids, weights, out)

    def foresee(self, layer: int, x: torch.Tensor, router: Any, valid: torch.Tensor | None) -> None:
        if self.foresees and not isinstance(self.target, Nothing):
            self.target.foresee(layer, x, router, valid)

    def normed(self, layer: int, x: torch.Tensor) -> None:
        if not isinstance(self.target, Nothing):
            self.target.normed(layer, x)

    def attended(self, layer: int, x: torch.Tensor, valid: torch.Tensor | None) -> None:
        if self.foresees and not isinstance(self.target, Nothing):
            self.target.attended(layer, x, valid)


def run_tokens(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor | None, start: int = 0,
    given: Any = None, ahead: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Feed the tokens one by one, waiting for each result as an engine does.

    ahead: each step is launched before the one before it is waited for, but with its given token; a step
    takes from one result to the next then.
    """
    blocks = tuple(range(CONTEXT_TOKENS // BLOCK_TOKENS))
    times, launches, ends = [], [], []

    def launch(at: int) -> None:
        begin = time.perf_counter()
        if given is not None:
            given.advance()
        if executor is not None and ahead and at:
            executor.wake()
        elif executor is not None:
            executor.step_begins(1)
        graphs.launch([ScheduledChunk(0, (tokens[at],), start + at, blocks, True)])
        if executor is not None:
            executor.post_counts()
        launches.append(time.perf_counter() - begin)

    last = time.perf_counter()
    for at in range(len(tokens)):
        if at == 0 or not ahead:
            launch(at)
        if ahead and at + 1 < len(tokens):
            launch(at + 1)
        graphs.picked()
        answered = time.perf_counter()
        if executor is not None:
            executor.step_ended()
            executor.posted_counts()
        now = time.perf_counter()
        times.append(now - last)
        ends.append(now - answered)
        last = now
    warm = sorted(times[8:] or times)
    return {
        "launch_us": sorted(launches)[len(launches) // 2]
        * 1e6,  # the host's, until a step is queued
        "end_us": sorted(ends)[len(ends) // 2] * 1e6,  # and after its answer
        "tok_s": 1.0 / (sum(warm) / len(warm)),
        "median_tok_s": 1.0 / warm[len(warm) // 2],
        "best_tok_s": 1.0 / warm[0],
    }


def ahead_and_not(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor, rounds: int = 6
) -> dict[str, Any]:
    """Milliseconds a step with the next one launched ahead, and one after the other, in turn on the same
    cache: the machine's rates drift."""
    found: dict[str, list[float]] = {"ahead": [], "one_by_one": []}
    missed: dict[str, list[float]] = {"ahead": [], "one_by_one": []}
    for _ in range(rounds):
        for name, values in found.items():
            before = executor.counts()
            seen = run_tokens(graphs, tokens[:48], executor, ahead=name == "ahead")
            after = executor.counts()
            values.append(1e3 / seen["median_tok_s"])
            lost = after.fetched + after.computed - before.fetched - before.computed
            missed[name].append(lost / 48)
    return {
        **{f"{name}_ms": [round(v, 4) for v in values] for name, values in found.items()},
        **{f"{name}_missed_slices": sum(v) / rounds for name, v in missed.items()},
    }


def logits_after(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor
) -> torch.Tensor:
    """Logits after these tokens at the context's beginning, float32 [vocab]."""
    blocks = tuple(range(CONTEXT_TOKENS // BLOCK_TOKENS))
    logits = torch.zeros(0)
    for at, token in enumerate(tokens):
        executor.step_begins(1)
        result = graphs.run([ScheduledChunk(0, (token,), at, blocks, True)])
        logits = result.logits[0].clone()
        torch.cuda.synchronize()
        executor.step_ended()
    return logits


def measured(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor, nbytes: int,
    given: Any = None, ahead: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Decode, and count what went which way."""
    before = executor.counts()
    stats = executor.service.stats() if executor.service else None
    figures: dict[str, Any] = run_tokens(graphs, tokens, executor, given=given, ahead=ahead)
    after = executor.counts()
    hits, fetched, computed = (
        getattr(after, n) - getattr(before, n) for n in ("hits", "fetched", "computed")
    )
    steps = len(tokens)
    sent, ahead = (
        (getattr(after, n) - getattr(before, n)) / steps / 1e6
        for n in ("prefetched_nbytes", "ahead_nbytes")
    )
    fetch_s = after.fetch_s - before.fetch_s
    figures |= {
        "missed_mb_a_token": (fetched + computed) * nbytes / steps / 1e6,
        "prefetched_mb_a_token": sent,
        "prefetched_and_used_mb_a_token": ahead,
        "pcie_gbps_while_busy": (fetched * nbytes / 1e6 - ahead * steps) / max(fetch_s, 1e-9) / 1e3,
        "gather_ms_a_token": fetch_s / steps * 1e3,
        "stall_ms_a_token": (after.stall_s - before.stall_s) / steps * 1e3,
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


def settled_rates(
    graphs: DecodeGraphs,
    tokens: Sequence[int],
    executor: HybridExecutor,
    rates: PathRates,
    given: Any,
) -> dict[str, Any]:
    """Decode as the engine does, with rates corrected on live steps; the split stays as it is then."""
    live = LiveExperts(executor, RateTracker(rates))
    blocks = tuple(range(CONTEXT_TOKENS // BLOCK_TOKENS))
    for at, token in enumerate(tokens):
        if given is not None:
            given.advance()
        live.step_begins(1)
        graphs.run([ScheduledChunk(0, (token,), at, blocks, True)]).picked.cpu()
        live.step_ended()
    assert live.tracker is not None
    found = live.tracker.rates
    executor.set_rates(found)
    return {
        "pcie": found.pcie_gbps,
        "cpu": found.cpu_gbps,
        "cpu_latency_us": found.cpu_latency_s * 1e6,
        "split": executor.table,
    }


def alternating(
    capture: Any, tokens: Sequence[int], executor: HybridExecutor, later: Later, rounds: int = 6
) -> dict[str, list[float]]:
    """Tokens a second with early guesses, with later ones and with none, in turn on the same cache: the
    machine's rates drift."""
    modes = {"early": (True, True), "own": (True, False), "none": (False, False)}
    found: dict[str, list[float]] = {name: [] for name in modes}
    graphs = {}
    for name, (later.foresees, executor.early) in modes.items():
        graphs[name] = capture()
    later.foresees = executor.early = True
    for _ in range(rounds):
        for name, graph in graphs.items():
            found[name].append(run_tokens(graph, tokens[:48], executor)["tok_s"])
    return found


def wrong_slots(executor: HybridExecutor, store: HostStore) -> int:
    """Slots whose bytes are not those of the slice that they say they hold."""
    paths, shape = executor.paths, executor.plan_shape
    wrong = 0
    for slot, key in enumerate(paths.view().owner_of.tolist()):
        if key < 0:
            continue
        row, piece = divmod(key, shape.num_slices)
        source = store.slab(*divmod(row, shape.num_experts))[piece]
        wrong += not torch.equal(source.to("cuda", non_blocking=True), paths.slot(slot))
    return wrong


def timeline(
    graphs: DecodeGraphs, tokens: Sequence[int], executor: HybridExecutor
) -> dict[str, Any]:
    """Where a step's time goes; the graphs were captured with stamped paths."""
    stamped: Any = executor.paths
    steps: list[torch.Tensor] = []
    for at, token in enumerate(tokens):
        run_tokens(graphs, [token], executor, at)
        steps.append(stamped.times.cpu())
    return intervals(torch.stack(steps[4:]))


def percent_of_floor(result: dict[str, Any], pcie: float, cpu: float) -> float:
    """Bytes missed over both rates, as a percentage of the step's time."""
    floor_s = result["missed_mb_a_token"] / (pcie + cpu) / 1e3
    return 100 * floor_s * result["tok_s"]


def figures_of(
    graphs: DecodeGraphs, capture: Any, tokens: Sequence[int], executor: HybridExecutor,
    nbytes: int, given: Any, rates: PathRates, later: Later, profile: bool = True, ahead: bool = True,
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """All that one executor is measured by, as (name, figures). capture: makes graphs anew."""
    run_tokens(graphs, tokens[:16], executor, given=given)
    if executor.shape.placement == "hybrid":
        yield "settled", settled_rates(graphs, tokens[:64], executor, rates, given)
    result = measured(graphs, tokens, executor, nbytes, given, ahead)
    found: dict[str, float] = {}
    if executor.service is not None and executor.plan_shape.max_fetch:
        found = overlapped.measure(executor)
        result["percent_of_floor_measured_rates"] = percent_of_floor(
            result, found["pcie"], found["cpu"]
        )
    result["percent_of_floor_given_rates"] = percent_of_floor(
        result, rates.pcie_gbps, rates.cpu_gbps
    )
    yield "decode", result
    if given is None:
        yield "in_turn", ahead_and_not(graphs, tokens, executor)
    if executor.plan_shape.max_prefetch and given is None:
        yield "alternating", alternating(capture, tokens, executor, later)
    yield "wrong_slots", wrong_slots(executor, executor.store)
    yield "rates", found
    paths = executor.paths
    executor.paths = Stamped(paths, executor.store.num_layers, torch.device("cuda"))
    try:
        yield "timeline", timeline(capture(), tokens[:40], executor)
    finally:
        executor.paths = paths
    if profile:
        yield "kernels", kernel_times(graphs, tokens[:20], executor)
