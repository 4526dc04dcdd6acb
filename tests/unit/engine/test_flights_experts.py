"""Steps that run ahead with experts in host memory: counters of each step, and threads that die under two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.experts.host_paths import HostPaths
from headrace.ops.expert_records import ServiceFault
from tests.fixtures.cpu_cases import needs_native
from tests.fixtures.expert_engine import SLICES, ExpertEngine, ServicePaths
from tests.fixtures.late_device import LateDevice
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy import write_gpt_oss
from tests.fixtures.toy_engine import Collected, answer, drain, make_request

PROMPT, TOKENS = (5, 9, 200, 17, 3, 44), 12
# Two layers of the toy, two experts of a token.
USED = 2 * 2 * SLICES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_gpt_oss(tmp_path_factory.mktemp("toy")).path)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    engine = Engine.load(EngineConfig(str(model), context=128, device="cpu", backend="reference"))
    return answer(engine, PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids


def counted_late(paths: type[HostPaths], device: LateDevice) -> Any:
    """Paths whose counters are sent in the order of the device's work."""

    class Late(paths):
        def post_counts(self) -> None:
            device.push(super().post_counts)

        def posted_counts(self) -> Any:
            while not self._posted:
                device.work_until(device.done + 1)
            return super().posted_counts()

    return Late


@pytest.fixture
def late_of(model: Path) -> Iterator[Callable[..., ExpertEngine]]:
    made: list[ExpertEngine] = []

    def make(
        paths: type[HostPaths] = HostPaths, seed: int | None = None, **options: Any
    ) -> ExpertEngine:
        device = LateDevice(seed)
        made.append(ExpertEngine(model, late=device, paths=counted_late(paths, device), **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@needs_native
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("mode", ["hybrid", "stream", "gpu", "cpu"])
def test_every_step_has_its_own_counters(
    mode: str, seed: int | None, late_of: Callable[..., ExpertEngine], expected: list[int]
):
    made = late_of(seed=seed, mode=mode, slots=99 if mode == "gpu" else 12)
    engine, live = made.engine, made.live
    engine.submit(make_request("a", PROMPT, max_tokens=TOKENS, ignore_eos=True))
    found, steps, flying = Collected(), [], 0
    while engine.has_work():
        found.take(engine.step())
        if live.last is not None:
            steps.append(live.last.hits + live.last.fetched + live.last.computed)
        flying += len(engine._flights)
    assert found[("a", 0)].token_ids == expected
    assert steps == [USED] * (TOKENS - 1)
    # The promoter looks at the cache between some of the steps of a split.
    assert flying == TOKENS - 2 if mode != "hybrid" else flying > 0
    snapshot = engine.snapshot().experts
    assert snapshot is not None
    assert made.executor.num_restarts == 0


@needs_native
@pytest.mark.parametrize("fault", [ServiceFault.DIE, ServiceFault.FAIL])
def test_a_dead_thread_fails_the_request_of_both_steps_once(
    fault: ServiceFault, late_of: Callable[..., ExpertEngine], expected: list[int]
):
    made = late_of(ServicePaths, mode="cpu")
    engine, x = made.engine, made.executor
    engine.submit(make_request("lost", PROMPT, max_tokens=TOKENS, ignore_eos=True))
    found = Collected()
    for _ in range(4):
        found.take(engine.step())
    assert len(engine._flights) == 1
    assert x.service is not None
    x.service.inject(fault, 0)
    drain(engine, found)
    assert set(found.failed) == {"lost"}
    assert "experts on the CPU" in found.failed["lost"].message
    assert found[("lost", 0)].token_ids == expected[:4]
    assert x.num_restarts == 0  # the step behind the one that failed may still be on its way
    engine.submit(make_request("next", PROMPT, max_tokens=TOKENS, ignore_eos=True))
    drain(engine, found)
    assert set(found.failed) == {"lost"}
    assert found[("next", 0)].token_ids == expected
    assert x.num_restarts == 1
