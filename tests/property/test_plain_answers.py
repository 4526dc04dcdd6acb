"""Any mixture of requests is answered as each would be by hand, however the engine runs its steps.

Token by token against ``plain_answers``: rows that a device chooses and rows that the host chooses in one
step, steps that run ahead of ends, cancels, failures and preemptions.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from headrace.core.request import FinishReason, GenerationRequest
from tests.fixtures.late_device import late_engine
from tests.fixtures.plain_answers import SometimesNaN, check_answers
from tests.fixtures.toy_engine import Collected, ToyDecoder, make_request, toy_engine

STEM = [65 + i % 26 for i in range(40)]
STOPS = ["a", "e", "7", "th", "é", "he", "ab", " ", "xyzzy"]
CONTEXT = 64


def drawn_request(rng: random.Random, name: str) -> GenerationRequest:
    """Each parameter is there now and then."""
    prompt = STEM[: rng.randrange(0, 40)] if rng.random() < 0.5 else []
    prompt += [rng.randrange(32, 127) for _ in range(rng.randrange(1, 12))]
    p: dict[str, Any] = {}

    def some(share: float, **values: Any) -> None:
        if rng.random() < share:
            p.update(values)

    if rng.random() < 0.6:
        some(1.0, temperature=rng.choice([0.3, 0.8, 1.0, 2.0, 1e-4]), seed=rng.randrange(-9, 99))
        some(0.4, top_k=rng.choice([1, 3, 40, 500]))
        some(0.4, top_p=rng.choice([0.3, 0.9, 0.99]))
        some(0.3, min_p=rng.choice([0.05, 0.5]))
    some(0.15, presence_penalty=rng.choice([2.0, -1.0]))
    some(0.15, frequency_penalty=rng.choice([1.0, -0.5]))
    some(0.15, repetition_penalty=rng.choice([1.3, 0.8]))
    bias = [(t, rng.choice([-100.0, 100.0, 5.0, -5.0])) for t in rng.sample(range(280), 3)]
    some(0.15, logit_bias=tuple(bias))
    some(0.3, stop_token_ids=tuple(range(rng.randrange(9), 280, rng.choice([5, 17, 40]))))
    some(0.4, stop=tuple(rng.sample(STOPS, rng.randrange(1, 4))))
    some(0.3, include_stop=True)
    some(0.2, ignore_eos=True)
    some(0.2, n=rng.choice([2, 3, 5]))
    some(0.2, logprobs=rng.choice([0, 1, 5]))
    some(0.1, prompt_logprobs=rng.choice([0, 2]))
    some(0.9, max_tokens=rng.randrange(1, 30))
    some(0.1, salt="x")
    return make_request(name, prompt, **p)


def drawn_limits(rng: random.Random) -> dict[str, Any]:
    seqs = rng.randrange(1, 6)
    batch = rng.randrange(seqs, 40)
    return {
        "num_blocks": rng.randrange(5, 20),
        "block_tokens": rng.choice([4, 8, 16]),
        "max_num_seqs": seqs,
        "max_batch_tokens": batch,
        "prefix_cache": rng.random() < 0.7,
        "context": CONTEXT,
        "beside_tokens": rng.choice([None, rng.randrange(seqs, batch + 1)]),
        "tail_tokens": rng.choice([None, rng.randrange(0, 5)]),
    }


def run(seed: int, count: Counter[str]) -> None:
    rng = random.Random(seed)
    limits = drawn_limits(rng)
    decoder: ToyDecoder = ToyDecoder()
    if rng.random() < 0.3:
        decoder = SometimesNaN()
        decoder.bad = tuple(rng.sample(range(127, 250), 9))
    if rng.random() < 0.7:
        engine, _ = late_engine(rng.choice([None, rng.randrange(1000)]), decoder=decoder, **limits)
    else:
        engine = toy_engine(decoder, graphs=rng.random() < 0.5, **limits)
    context = engine._scheduler.sequence_limit
    requests = [drawn_request(rng, f"r{i}") for i in range(rng.randrange(1, 6))]
    requests = [r for r in requests if len(r.prompt_token_ids) < context]
    pending = sorted(((rng.randrange(15), r) for r in requests), key=lambda item: item[0])
    cancels = {rng.randrange(30): f"r{rng.randrange(6)}" for _ in range(rng.choice([0, 0, 1, 2]))}
    found, cancelled, step = Collected(), set[str](), 0
    while pending or engine.has_work():
        while pending and (pending[0][0] <= step or not engine.has_work()):
            engine.submit(pending.pop(0)[1])
        if step in cancels:
            if engine._scheduler.is_active(cancels[step]):
                cancelled.add(cancels[step])
            engine.cancel(cancels[step])
        found.take(engine.step())
        engine._scheduler.check()
        count["ahead"] += len(engine._flights)
        step += 1
        assert step < 3000
    check_answers(decoder, requests, found, context, cancelled)
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.kv_blocks_used) == (0, 0, 0)
    assert snapshot.generation_tokens_total == sum(len(a.token_ids) for a in found.values())
    count["preempted"] += snapshot.preemptions_total
    count["failed"] += len(found.failed)
    count["cancelled"] += len(cancelled)
    count["stopped"] += sum(a.finish_reason is FinishReason.STOP for a in found.values())
    engine.close()


@pytest.mark.parametrize("part", range(3))
def test_every_answer_is_the_plain_one(part: int):
    count = Counter[str]()
    for seed in range(20 * part, 20 * part + 20):
        run(seed, count)
    assert count["ahead"] > 20
    assert min(count[kind] for kind in ("failed", "cancelled", "stopped")) > 0
