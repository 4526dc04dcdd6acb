"""The kernels that choose tokens, interpreted, in an engine whose steps run ahead.

They feed each step's tokens to the next one, rows beside them are chosen by the host, and rows may have no
finite logits; every answer is the one worked out without an engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.core.request import GenerationRequest
from headrace.engine.device_choice import TokenChooser
from headrace.engine.engine import Engine
from tests.fixtures.late_device import LateDevice, late_engine
from tests.fixtures.plain_answers import SometimesNaN, check_answers, plain_answer, plain_logits
from tests.fixtures.threads import one_thread  # noqa: F401 (applies to every test here)
from tests.fixtures.toy_engine import Collected, ToyDecoder, drain, make_request
from tests.fixtures.triton_interpreter import INTERPRETED, needs_triton

pytestmark = [
    needs_triton,
    # Compiled, they choose in parity/test_gpu_flights.py and test_kernel_engine.py.
    pytest.mark.skipif(not INTERPRETED, reason="the late device is the host's"),
]
BACKENDS = ("triton", "reference")
STEM = [65 + i % 26 for i in range(9)]
SEEDED = {"temperature": 1.0, "seed": 42}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on late devices choose tokens by the kernels, of prompts' last rows too."""
    monkeypatch.setattr(LateDevice, "backends", BACKENDS, raising=False)


def engine_of(decoder: Any, **limits: Any) -> Engine:
    values = {"context": 64, "max_num_seqs": 4, **limits}
    engine, device = late_engine(decoder=decoder, **values)
    runner: Any = engine._runner
    runner._chooser = TokenChooser(decoder, BACKENDS, device.torch_device, values["max_num_seqs"])
    for chooser in (runner._chooser, runner._graphs._chooser):
        assert chooser._ops.chosen["sample"].backend == "triton"
    return engine


def run(engine: Engine, requests: list[GenerationRequest]) -> tuple[Collected, int]:
    """The answers, and how often a step was on its way."""
    for request in requests:
        engine.submit(request)
    found, ahead = Collected(), 0
    while engine.has_work():
        found.take(engine.step())
        engine._scheduler.check()
        ahead += len(engine._flights)
    return found, ahead


@pytest.mark.usefixtures("kernels")
def test_b081_seeds_draw_the_same_beside_rows_of_any_kind():
    decoder = ToyDecoder()
    seeded = make_request("seeded", STEM, max_tokens=7, **SEEDED)
    neighbours = [
        make_request("greedy", [70], max_tokens=5),
        make_request("cut", [71, 72], max_tokens=9, temperature=0.8, top_k=9, top_p=0.9, seed=4),
        make_request("host", [73], max_tokens=3, logprobs=2, **{**SEEDED, "min_p": 0.1}),
    ]
    for requests in ([seeded], [seeded, neighbours[0]], [*neighbours, seeded]):
        found, ahead = run(engine_of(decoder), requests)
        check_answers(decoder, requests, found, 64)
        assert ahead > 2


@pytest.mark.usefixtures("kernels")
def test_b076_the_smallest_of_equal_ids_in_steps_that_run_ahead():
    class Tied(ToyDecoder):
        """Logits in steps of 8: many are equal."""

        def logits(self, hidden: Any) -> Any:
            return (super().logits(hidden) / 8).round() * 8

    decoder = Tied()
    requests = [
        make_request("zero", STEM, max_tokens=8),
        make_request("one", STEM, max_tokens=8, temperature=1.0, top_k=1, seed=1),
        make_request("host", STEM, max_tokens=8, logprobs=3),
    ]
    said = plain_answer(decoder, requests[0], 0, 64).tokens
    rows = [np.sort(plain_logits(decoder, STEM + said[:i])) for i in range(len(said))]
    assert sum(row[-1] == row[-2] for row in rows) > 2
    found, ahead = run(engine_of(decoder), requests[:2])
    assert ahead > 4
    check_answers(decoder, requests[:2], found, 64)
    found, _ = run(engine_of(decoder), requests)
    check_answers(decoder, requests, found, 64)
    assert len({tuple(a.token_ids) for a in found.values()}) == 1


@pytest.mark.usefixtures("kernels")
def test_b079_penalties_and_bias_beside_rows_that_kernels_choose():
    decoder = ToyDecoder()
    requests = [
        make_request("plain", STEM, max_tokens=8, **SEEDED),
        make_request("greedy", STEM, max_tokens=8),
        make_request("bias", STEM, max_tokens=4, logit_bias=((77, 100.0),), **SEEDED),
        make_request("both", STEM, max_tokens=6, repetition_penalty=1.5, frequency_penalty=1.0),
    ]
    found, ahead = run(engine_of(decoder), requests)
    check_answers(decoder, requests, found, 64)
    assert ahead > 0  # once those that the host chooses for have ended
    assert found[("bias", 0)].token_ids == [77] * 4
    assert found[("both", 0)].token_ids != found[("greedy", 0)].token_ids


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("logprobs", [None, 1])
def test_b120_a_row_without_finite_logits_fails_alone(logprobs: int | None):
    """Found on the device, with the next step on its way; or in a step that is computed at once."""
    decoder = SometimesNaN()
    bad = make_request("bad", STEM, max_tokens=9, logprobs=logprobs, **SEEDED)
    good = [
        make_request("greedy", [70], max_tokens=9),
        make_request("drawn", [71, 72], max_tokens=9, temperature=0.8, top_p=0.9, seed=4),
    ]
    said = plain_answer(decoder, bad, 0, 64).tokens
    others = [t for r in good for t in plain_answer(decoder, r, 0, 64).tokens]
    at = next(i for i in range(3, 9) if said[i] not in [*said[:i], *others, *STEM, 70, 71, 72])
    decoder.bad = (said[at],)
    found, _ = run(engine_of(decoder), [bad, *good])
    check_answers(decoder, [bad, *good], found, 64)
    assert list(found.failed) == ["bad"]
    assert found[("bad", 0)].token_ids == said[: at + 1]


@pytest.mark.usefixtures("kernels")
def test_b130_a_row_of_a_cancelled_request_feeds_nobody():
    """Its block and its row go to the next request while the step that writes to them is on its way."""
    decoder = ToyDecoder()
    engine = engine_of(decoder, num_blocks=2, block_tokens=16, max_num_seqs=1, prefix_cache=False)
    found = Collected()
    engine.submit(make_request("gone", STEM, max_tokens=20, **SEEDED))
    while len(engine._flights) == 0:
        found.take(engine.step())
    engine.cancel("gone")
    after = make_request("after", [90, 91, 92], max_tokens=6, temperature=0.9, seed=5)
    engine.submit(after)
    drain(engine, found)
    check_answers(decoder, [after], found, 64)
