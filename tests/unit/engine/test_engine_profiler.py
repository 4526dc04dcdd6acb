"""Watching a real decoder's operations: classes, sums, and nothing left behind."""

from collections.abc import Iterator

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, InternalError
from headrace.core.step import StepStats
from headrace.engine.engine import Engine
from headrace.engine.explaining import Watch, Workload, report_of, run_steps
from headrace.explain import leaf
from headrace.explain.running_cost import decode_rows, running_cost
from tests.fixtures.running_models import machine
from tests.fixtures.toy_engine import toy_engine

LAYERS = 8  # of the embedded model


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = Engine.load(EngineConfig("tiny", context=128, threads=2, device="cpu"))
    yield loaded
    loaded.close()


def test_every_class_of_a_step_is_seen_and_the_sum_is_the_step(engine: Engine):
    check_classes(engine)


def test_the_reference_backend_times_the_same_classes():
    loaded = Engine.load(
        EngineConfig("tiny", context=64, threads=2, backend="reference", device="cpu")
    )
    check_classes(loaded)
    loaded.close()


def check_classes(engine: Engine) -> None:
    watch = run_steps(engine, Workload(prompt=40, steps=8))
    phases = [one.stats.phase for one in watch.steps]
    assert phases == ["prefill"] + ["decode"] * 7
    for stats, rows, slowed in watch.steps:
        assert not slowed
        found = {c.id: c for c in stats.classes}
        expected = set(running_cost(watch.model, rows))
        assert expected <= set(found)
        assert found[leaf.EXPERTS_GPU].calls == LAYERS
        assert found[leaf.RMSNORM].calls >= 2 * LAYERS + 1
        assert found[leaf.EXPERTS_GPU].bytes.dram > 0
        total = sum(c.seconds for c in stats.classes)
        # Nothing is counted twice, and what no class explains is a part of the step.
        assert 0 < total <= stats.seconds * 1.001


def test_the_models_bytes_are_the_checkpoints(engine: Engine):
    watch = run_steps(engine, Workload(prompt=4, steps=4))
    # The file's header and its norms, which are not matrices, are the difference.
    assert watch.model.weights_nbytes == pytest.approx(engine.info.weights_nbytes, rel=0.02)


def test_watching_leaves_the_kernels_as_they_were(engine: Engine):
    ops = Watch(engine)
    ops.start()
    wrapped = ops._profiler.ops
    assert wrapped.linear is not wrapped.chosen["linear"].function
    ops.stop()
    for name, op in wrapped.chosen.items():
        assert getattr(wrapped, name) is op.function


def test_the_same_tokens_with_and_without_watching(engine: Engine):
    def tokens() -> list[int]:
        from headrace.core.request import GenerationRequest, OutputDelta, SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        engine.submit(GenerationRequest("same", (5, 6, 7), sampling))
        found: list[int] = []
        while engine.has_work():
            for item in engine.step():
                assert isinstance(item, OutputDelta)
                found += item.token_ids
        return found

    plain = tokens()
    engine.watch_classes(True)
    watched = tokens()
    engine.watch_classes(False)
    assert plain == watched


def test_who_observed_before_still_does(engine: Engine):
    seen: list[StepStats] = []
    engine.observe = seen.append
    run_steps(engine, Workload(prompt=4, steps=4))
    engine.observe = None
    assert len(seen) == 4


def test_reports_of_both_phases(engine: Engine):
    watch = run_steps(engine, Workload(prompt=20, steps=6, batch=2))
    decode = report_of(engine, watch, "decode", machine())
    assert decode is not None
    assert decode.sequences == 2
    assert decode.predicted_s is None
    assert any(line.startswith("Drafting") for line in decode.advice)
    # Nothing is offloaded here: all experts are where they are computed.
    assert not any("1 - 4/32" in line for line in decode.advice)
    # Each sequence has 22 tokens in the middle step; the pool bounds how many times two of them fit.
    limits = engine.parts.scheduler
    blocks = 2 * -(-(decode.context + 1) // limits.block_tokens)
    (batching,) = (line for line in decode.advice if line.startswith("Batching"))
    assert ("KV pool" in batching) == (limits.num_blocks // blocks < 16)
    prefill = report_of(engine, watch, "prefill", machine())
    assert prefill is not None
    assert prefill.tokens >= 20
    assert report_of(engine, Watch(engine), "decode", machine()) is None


def test_progress_is_the_share_of_tokens_computed(engine: Engine):
    """Two sequences of 20 tokens that write 6 each, the last of which is not computed: 50 tokens."""
    told: list[float] = []
    run_steps(engine, Workload(prompt=20, steps=6, batch=2), told.append)
    assert told == sorted(told)
    assert told[0] >= 20 / 50
    assert told[-1] == 1.0


def test_what_does_not_fit_is_refused(engine: Engine):
    with pytest.raises(ConfigError, match="do not fit the context of 128"):
        run_steps(engine, Workload(prompt=120, steps=20))


def test_a_decoder_without_operations_cannot_be_watched():
    toy = toy_engine()
    with pytest.raises(InternalError, match="no operations to watch"):
        toy.watch_classes(True)


def test_costs_of_a_batch_of_the_embedded_model(engine: Engine):
    watch = run_steps(engine, Workload(prompt=4, steps=4))
    spec = watch.model.spec
    assert spec.moe is not None
    one = running_cost(watch.model, decode_rows(1, 4))[leaf.EXPERTS_GPU].work
    stored = watch.model.matrices["expert"]
    share = spec.moe.num_experts_per_token / spec.moe.num_experts
    assert one.dram_nbytes == pytest.approx(stored.nbytes * share)
