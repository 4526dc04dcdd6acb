"""Experts behind an engine, on the CPU: rates, split, promotion, counters, and threads that die."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.experts.host_paths import HostPaths
from headrace.experts.live import TABLE_STEPS
from headrace.experts.plan_oracle import FREE
from headrace.experts.rates import RateTracker
from headrace.experts.split import PathRates
from headrace.ops.expert_records import ServiceFault
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_engine import (
    SLICE_NBYTES,
    SLICES,
    ExpertEngine,
    ServicePaths,
    gbps,
)
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss
from tests.fixtures.toy_engine import Collected, answer, drain, make_request

NewEngine = Callable[..., ExpertEngine]
# Prompts that a decoding step takes are computed like one; this one passes through the ring.
PROMPT = (5, 9, 200, 17, 3, 44)
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_gpt_oss(tmp_path_factory.mktemp("toy")).path)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    engine = Engine.load(EngineConfig(str(model), context=128, device="cpu", backend="reference"))
    return answer(engine, PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids


@pytest.fixture
def engine_of(model: Path) -> Iterator[NewEngine]:
    made: list[ExpertEngine] = []

    def make(**options: Any) -> ExpertEngine:
        made.append(ExpertEngine(model, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def ids(made: ExpertEngine, tokens: int = TOKENS, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return answer(made.engine, prompt, max_tokens=tokens, ignore_eos=True).token_ids


@needs_native
@pytest.mark.parametrize("mode", ["hybrid", "stream", "cpu", "gpu"])
def test_b028_placements_give_the_same_tokens_and_say_what_they_did(
    mode: str, engine_of: NewEngine, expected: list[int]
):
    made = engine_of(mode=mode, slots=99 if mode == "gpu" else 12)
    before = made.engine.snapshot().experts
    assert before is not None
    assert ids(made) == expected
    seen = made.engine.snapshot().experts
    assert seen is not None
    # Two layers of two experts a token; the first token comes from the prompt's step.
    lookups = seen.lookups_total - before.lookups_total
    assert lookups == 2 * 2 * SLICES * (TOKENS - 1)
    counts = made.executor.counts()
    assert seen.lookups_total == counts.hits + counts.fetched + counts.computed
    assert seen.slot_nbytes == SLICE_NBYTES
    assert seen.slots_total == {"hybrid": 12, "stream": 12, "cpu": 0}.get(mode, seen.slots_used)
    assert seen.slots_used == seen.slots_total
    moved = seen.bytes_total
    assert moved["fetched"] == counts.fetched * SLICE_NBYTES
    assert (moved["fetched"] > 0) == (mode in ("hybrid", "stream"))
    assert (moved["computed"] > 0) == (mode in ("hybrid", "cpu"))
    assert (moved["streamed"] > 0) == (mode in ("hybrid", "stream"))
    assert seen.pinned_nbytes == 2 * made.executor.store.layer_nbytes(0)
    assert seen.hit_rate == pytest.approx(counts.hit_rate)
    assert seen.restarts_total == 0


@needs_native
@pytest.mark.parametrize("mode", ["hybrid", "stream"])
def test_layers_that_are_not_pinned_are_the_cpus(
    mode: str, engine_of: NewEngine, expected: list[int], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        made = engine_of(mode=mode, pinned=1)
    notes = [r.message for r in caplog.records if "not pinned" in r.message]
    assert len(notes) == 1
    assert "the host allows no more" in notes[0]
    assert made.executor.can_fetch == [True, False]
    fetched: list[int] = []
    gather = made.paths.gather

    def watch(layer: int) -> None:
        fetched.extend([layer] * len(made.paths._plan.fetches))
        gather(layer)

    made.paths.gather = watch
    assert ids(made) == expected
    assert set(fetched) == {0}
    assert made.executor.counts().computed > 0
    seen = made.engine.snapshot().experts
    assert seen is not None
    assert seen.pageable_nbytes == seen.pinned_nbytes == made.executor.store.layer_nbytes(0)


@needs_native
def test_live_rates_rewrite_the_split_in_place(engine_of: NewEngine, expected: list[int]):
    """The profile says that PCIe is ten times the CPU; steps show the opposite."""
    made = engine_of(slots=3, known=gbps(pcie_gather=0.03, cpu_experts_mxfp4=0.003))
    made.paths.pcie = made.paths.pcie_together = 0.003
    made.paths.cpu = made.paths.cpu_together = 0.03
    assert made.executor.table[6] >= 5
    assert ids(made) == expected  # tables change under captured graphs, results do not
    ids(made, 90)
    assert made.executor.table[6] <= 1
    assert 1 <= made.live.num_tables <= (TOKENS + 90) // TABLE_STEPS
    seen = made.engine.snapshot().experts
    assert seen is not None
    assert seen.split == made.executor.table
    assert seen.rates_gbps["cpu"] > 2 * seen.rates_gbps["pcie"]


@needs_native
def test_rates_that_stay_write_no_table(engine_of: NewEngine):
    made = engine_of(slots=3)
    ids(made, 40)
    assert made.executor.counts().fetched > 0
    assert made.live.num_tables == 0


@needs_native
def test_slow_only_under_overlap_moves_the_misses_to_one_path(engine_of: NewEngine):
    alone = gbps(
        pcie_gather=0.02, pcie_gather_overlapped=0.019,
        cpu_experts_mxfp4=0.02, cpu_experts_mxfp4_overlapped=0.019,
    )  # fmt: skip
    made = engine_of(slots=3, known=alone)
    assert 0 < made.executor.table[6] < 6
    made.paths.pcie = made.paths.cpu = 0.02
    made.paths.pcie_together = made.paths.cpu_together = 0.002
    ids(made, 60)
    assert made.executor.table[6] in (0, 6)


@needs_native
@pytest.mark.parametrize(("pcie", "cpu", "both"), [(0.001, 0.5, True), (0.5, 0.001, False)])
def test_a_long_prompt_goes_as_the_trackers_rates_say(
    engine_of: NewEngine, model: Path, pcie: float, cpu: float, both: bool
):
    prompt = tuple((7 * i) % 250 for i in range(40))
    alone = Engine.load(EngineConfig(str(model), context=128, device="cpu", backend="reference"))
    want = answer(alone, prompt, max_tokens=6, ignore_eos=True).token_ids
    made = engine_of(known=gbps(pcie_gather=cpu, cpu_experts_mxfp4=pcie))
    prefill: Any = made.executor._prefill
    prefill._cpu.max_tokens = 8  # five pieces, of an engine that takes 64 tokens at once
    top_k = made.executor.shape.top_k
    assert prefill.takes_both_paths(40, top_k) != both
    # The machine turns out otherwise than its profile says: the next prompt follows.
    made.live.tracker = RateTracker(PathRates(pcie, cpu, SLICE_NBYTES))
    before = made.executor.prompt_slices()
    assert ids(made, 6, prompt) == want
    assert prefill.takes_both_paths(40, top_k) == both
    now = made.executor.prompt_slices()
    assert (now.computed > before.computed) == both
    assert both or now.fetched > before.fetched


@needs_native
def test_a_cold_cache_warms_over_a_slow_link(engine_of: NewEngine, expected: list[int]):
    """The split fetches nothing over a link of a thousandth of the CPU's rate, so nothing would ever
    come into empty slots by demand; promotion fills them while the link idles."""
    made = engine_of(slots=9, known=gbps(pcie_gather=0.001, cpu_experts_mxfp4=1.0))
    made.paths.pcie = made.paths.pcie_together = 0.001
    made.paths.cpu = made.paths.cpu_together = 1.0
    tables = made.paths.tables
    tables.slot_of[:], tables.owner_of[:] = [FREE] * len(tables.slot_of), [FREE] * 9
    assert not any(made.executor.table)
    assert ids(made) == expected
    ids(made, 100)
    before = made.executor.counts()
    assert ids(made) == expected
    after = made.executor.counts()
    assert after.fetched == 0
    promoter = made.live._promoter
    assert promoter is not None
    assert promoter.promoted >= 9
    assert made.paths.slots_used() == 9
    assert after.hits - before.hits > 0
    seen = made.engine.snapshot().experts
    assert seen is not None
    assert seen.bytes_total["promoted"] >= promoter.promoted * SLICE_NBYTES


@needs_native
@pytest.mark.parametrize("fault", [ServiceFault.DIE, ServiceFault.HANG, ServiceFault.FAIL])
def test_a_lost_thread_fails_the_requests_of_its_step_only(
    fault: ServiceFault, engine_of: NewEngine, expected: list[int]
):
    made = engine_of(mode="cpu", slots=0, paths=ServicePaths)
    engine, collected = made.engine, Collected()
    assert ids(made) == expected
    for name in ("a", "b", "waits"):  # two run at once
        engine.submit(make_request(name, PROMPT, max_tokens=TOKENS, ignore_eos=True))
    for _ in range(3):
        collected.take(engine.step())
    assert made.executor.service is not None
    made.executor.service.inject(fault, 0)
    collected = drain(engine, collected)
    assert set(collected.failed) == {"a", "b"}
    for failed in collected.failed.values():
        assert "experts on the CPU" in failed.message
        assert "again" in str(failed.hint)
        assert failed.error_class == "WorkerLostError"
    assert collected[("waits", 0)].token_ids == expected
    assert ids(made) == expected
    assert made.executor.num_restarts == 1
    snapshot = engine.snapshot()
    assert snapshot.experts is not None
    assert snapshot.experts.restarts_total == 1
    assert snapshot.requests_finished["error"] == 2


def test_host_paths_are_timed(engine_of: NewEngine):
    made = engine_of(mode="stream", slots=3, paths=HostPaths)
    ids(made)
    counts = made.executor.counts()
    assert counts.fetched > 0
    assert 0 < counts.fetch_s < 1
