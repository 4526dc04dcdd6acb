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
End = tuple[list[int], FinishReason | None]


def requests(salt: str) -> list[GenerationRequest]:
    """Prompts begin alike; some end early."""
    rng = random.Random(7)
    stem = [rng.randrange(10, 4000) for _ in range(40)]
    found: list[GenerationRequest] = []
    for i in range(6):
        prompt = stem[: 12 + 5 * i] + [rng.randrange(10, 4000) for _ in range(3)]
        stops = tuple(range(i, 4000, 9)) if i % 2 else ()
        found.append(
            make_request(
                f"r{i}",
                prompt,
                max_tokens=TOKENS - 9 * i,
                n=1 + i % 2,
                stop_token_ids=stops,
                ignore_eos=True,
                salt=salt,
            )
        )
    return found


def run(engine: Engine, *, ahead: bool) -> tuple[dict[tuple[str, int], End], int]:
    """Tokens and ends of all at once, twice: the second time from cached pages. How often a step was on its
    way, too.

    Prompts are cut the same way whether steps run ahead or not, since those that compute one do not; and
    rows of decoding steps have their bits whatever runs beside them.
    """
    engine.run_ahead(ahead)
    found: dict[tuple[str, int], End] = {}
    flying = 0
    for turn in range(2):
        for request in requests(f"ahead {ahead}"):
            engine.submit(request)
        done = Collected()
        while engine.has_work():
            done.take(engine.step())
            engine._scheduler.check()
            flying += len(engine._flights)
        assert not done.failed
        assert engine.snapshot().kv_blocks_used == 0
        ends = {
            (f"{name} {turn}", i): (a.token_ids, a.finish_reason) for (name, i), a in done.items()
        }
        found |= ends
    return found, flying


@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4k-fp8v"])
def test_the_same_tokens_whether_steps_run_ahead_or_not(kv_format: str):
    config = EngineConfig(
        "tiny", device="cuda", context=256, dense_format="f32", kv_format=kv_format,
        block_tokens=16, max_batch_tokens=16, max_num_seqs=12, vram_budget_nbytes=4 * 2**30,
    )  # fmt: skip
    engine = Engine.load(config)
    try:
        expected, never = run(engine, ahead=False)
        found, often = run(engine, ahead=True)
    finally:
        engine.close()
    assert found == expected
    assert never == 0
    assert often > TOKENS
    assert any(reason is FinishReason.STOP for _, reason in found.values())
