"""Steps that run ahead of the host give the tokens of steps one after the other, whatever happens."""

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.fixtures.late_device import late_engine
from tests.fixtures.toy_engine import Collected, make_request, toy_engine


def check_flights(engine):
    """What a step on its way writes is nobody else's, and no cached prefix's."""
    pool, size = engine._scheduler.tables.pool, engine._scheduler.config.block_tokens
    assert len(engine._flights) <= 1
    for flight in engine._flights._flying:
        for chunk in flight.plan.chunks:
            block = chunk.block_ids[chunk.start // size]
            assert pool.references(block) <= 1
            assert not pool.is_kept(block)


def drive(engine, requests, cancels, each_step):
    """Submit and cancel at given calls of ``step``; the tokens by sequence, and who was cancelled."""
    done, step, pending = Collected(), 0, sorted(requests, key=lambda r: r[0])
    cancelled = set()
    while pending or engine.has_work():
        while pending and (pending[0][0] <= step or not engine.has_work()):
            engine.submit(pending.pop(0)[1])
        if step in cancels:
            before = engine._scheduler.is_active(cancels[step])
            engine.cancel(cancels[step])
            if before:
                cancelled.add(cancels[step])
                each_step(engine)
        done.take(engine.step())
        each_step(engine)
        step += 1
        assert step < 3000
    assert not done.failed
    return done, cancelled


@st.composite
def loads(draw):
    requests = []
    stem = draw(st.lists(st.integers(0, 249), min_size=0, max_size=40))
    for i in range(draw(st.integers(1, 5))):
        tail = draw(st.lists(st.integers(0, 249), min_size=1, max_size=12))
        prompt = (stem if draw(st.booleans()) else []) + tail
        params = draw(
            st.sampled_from(
                [
                    {},
                    {},
                    {"stop_token_ids": tuple(range(0, 250, 4))},
                    {"stop_token_ids": tuple(range(1, 250, 9))},
                    {"stop": ("a", "e", "7")},
                    {"n": 3, "stop_token_ids": tuple(range(2, 250, 5))},
                    {"temperature": 1.0, "seed": 11},
                    {"logprobs": 1},
                ]
            )
        )
        count = draw(st.integers(1, 30))
        request = make_request(f"r{i}", prompt, max_tokens=count, **params)
        requests.append((draw(st.integers(0, 12)), request))
    return requests


@given(
    loads(),
    st.dictionaries(st.integers(0, 30), st.sampled_from([f"r{i}" for i in range(5)]), max_size=3),
    st.fixed_dictionaries(
        {
            "num_blocks": st.integers(5, 14),
            "block_tokens": st.sampled_from([4, 16]),
            "max_batch_tokens": st.integers(4, 40),
            "max_num_seqs": st.integers(1, 4),
            "prefix_cache": st.booleans(),
            "context": st.just(64),
        }
    ),
    st.one_of(st.none(), st.integers(0, 1000)),
)
@settings(max_examples=120, deadline=None)
def test_running_ahead_never_changes_a_token(requests, cancels, limits, seed):
    ahead, device = late_engine(seed, **limits)
    limit = ahead._scheduler.sequence_limit
    requests = [(at, r) for at, r in requests if len(r.prompt_token_ids) < limit]
    if not requests:
        return

    def each_step(engine):
        engine._scheduler.check()
        check_flights(engine)

    found, cancelled = drive(ahead, requests, cancels, each_step)
    alone, _ = drive(toy_engine(**limits), requests, {}, lambda _: None)
    for key, answer in alone.items():
        if key[0] not in cancelled:
            assert found[key].token_ids == answer.token_ids
            assert found[key].text == answer.text
            assert found[key].finish_reason == answer.finish_reason
            ends = [d.usage for d in found[key].deltas if d.usage is not None]
            tokens = [len(a.token_ids) for k, a in alone.items() if k[0] == key[0]]
            assert all(usage.completion_tokens == sum(tokens) for usage in ends)
        elif key in found:
            there = found[key].token_ids
            assert there == answer.token_ids[: len(there)]
    said = sum(len(a.token_ids) for a in found.values())
    snapshot = ahead.snapshot()
    assert snapshot.generation_tokens_total == said
    assert snapshot.kv_blocks_used == 0
    ahead.close()
    assert not ahead._flights
    assert device.done == device.queued
