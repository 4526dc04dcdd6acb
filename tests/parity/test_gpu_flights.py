"""On a GPU, steps that run ahead of the host give the tokens of steps one after the other, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.core.config import EngineConfig
from headrace.core.request import FinishReason, GenerationRequest
from headrace.engine.engine import Engine
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy_engine import Collected, make_request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TOKENS = 90


def requests() -> list[tuple[int, GenerationRequest]]:
    """With the number of tokens said before each is sent. Prompts begin alike, some end early."""
    rng = random.Random(7)
    stem = [rng.randrange(10, 4000) for _ in range(40)]
    found: list[tuple[int, GenerationRequest]] = []
    for i in range(6):
        prompt = stem[: 12 + 5 * i] + [rng.randrange(10, 4000) for _ in range(3)]
        stops = tuple(range(i, 4000, 9)) if i % 2 else ()
        request = make_request(
            f"r{i}", prompt, max_tokens=TOKENS - 9 * i, n=1 + i % 2, stop_token_ids=stops,
            ignore_eos=True,
        )  # fmt: skip
        found.append((0 if i < 3 else 40 * i, request))
    return found


def run(engine: Engine, ahead: bool) -> tuple[dict[tuple[str, int], list[int]], Collected, int]:
    engine.run_ahead(ahead)
    done, pending, said, flying = Collected(), requests(), 0, 0
    while pending or engine.has_work():
        while pending and (pending[0][0] <= said or not engine.has_work()):
            engine.submit(pending.pop(0)[1])
        for item in engine.step():
            done.take([item])
            said += len(getattr(item, "token_ids", ()))
        engine._scheduler.check()
        flying += len(engine._flights)
    assert not done.failed
    assert engine.snapshot().kv_blocks_used == 0
    return {key: found.token_ids for key, found in done.items()}, done, flying


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "nvfp4k-fp8v"])
def test_the_same_tokens_whether_steps_run_ahead_or_not(kv_format: str):
    config = EngineConfig(
        "tiny", device="cuda", context=256, dense_format="f32", kv_format=kv_format,
        block_tokens=16, max_batch_tokens=16, max_num_seqs=8, vram_budget_nbytes=4 * 2**30,
    )  # fmt: skip
    engine = Engine.load(config)
    try:
        expected, _, none = run(engine, False)
        for _ in range(2):  # the second time from cached pages
            found, done, flying = run(engine, True)
            assert found == expected
            assert flying > TOKENS / 2
        assert none == 0
        reasons = {answer.finish_reason for answer in done.values()}
        assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    finally:
        engine.close()
