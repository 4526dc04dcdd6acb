"""A request's tokens do not depend on what the engine does around it."""

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.fixtures.toy_engine import answer, drain, make_request, toy_engine


def run_together(requests, **limits):
    engine = toy_engine(**limits)
    for request in requests:
        engine.submit(request)
    done = drain(engine)
    assert not done.failed
    assert engine.snapshot().kv_blocks_used == 0
    return {key: a.token_ids for key, a in done.items()}, engine


def test_b096_fifty_pairs_with_shared_prefixes_are_the_same_with_the_cache_on_and_off():
    rng = random.Random(5)
    hits = 0
    for pair in range(50):
        shared = [rng.randrange(250) for _ in range(rng.randrange(1, 70))]
        prompts = [shared + [rng.randrange(250) for _ in range(rng.randrange(1, 20))] for _ in "ab"]
        engine = toy_engine(num_blocks=24, max_batch_tokens=rng.choice([16, 32, 100]))
        for i, prompt in enumerate(prompts):
            with_cache = answer(engine, prompt, max_tokens=5).token_ids
            without = answer(toy_engine(prefix_cache=False), prompt, max_tokens=5).token_ids
            assert with_cache == without, (pair, i)
        hits += engine.snapshot().prefix_hit_tokens_total
    assert hits > 50 * 16  # the prefixes were long enough to matter


def test_b131_sixteen_prompts_in_parallel_answer_as_one_by_one():
    prompts = [[(i * 17 + j * j) % 250 for j in range(5 + i)] for i in range(16)]
    requests = [make_request(f"r{i}", p, max_tokens=12) for i, p in enumerate(prompts)]
    together, _ = run_together(requests)
    engine = toy_engine(prefix_cache=False)
    for i, prompt in enumerate(prompts):
        assert together[(f"r{i}", 0)] == answer(engine, prompt, max_tokens=12).token_ids
    assert len({tuple(t) for t in together.values()}) == 16


@st.composite
def loads(draw):
    requests = []
    stem = draw(st.lists(st.integers(0, 249), min_size=0, max_size=40))
    for i in range(draw(st.integers(1, 4))):
        tail = draw(st.lists(st.integers(0, 249), min_size=1, max_size=12))
        prompt = (stem if draw(st.booleans()) else []) + tail
        params = draw(
            st.sampled_from(
                [
                    {},
                    {"temperature": 1.0, "seed": 11},
                    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "presence_penalty": 1.0},
                    {"temperature": 1.0, "seed": -5, "n": 2, "repetition_penalty": 1.3},
                ]
            )
        )
        count = draw(st.integers(1, 12))
        requests.append(make_request(f"r{i}", prompt, max_tokens=count, **params))
    return requests


@given(
    loads(),
    st.fixed_dictionaries(
        {
            "num_blocks": st.integers(5, 12),
            "block_tokens": st.sampled_from([16, 32]),
            "max_batch_tokens": st.integers(4, 40),
            "max_num_seqs": st.integers(1, 4),
            "prefix_cache": st.booleans(),
        }
    ),
)
@settings(max_examples=40, deadline=None)
def test_chunks_neighbours_preemption_and_cache_never_change_a_token(requests, limits):
    together, _ = run_together(requests, **limits)
    for request in requests:
        alone, _ = run_together([request], max_batch_tokens=256, prefix_cache=False)
        for key, tokens in alone.items():
            assert together[key] == tokens


def test_a_tiny_pool_preempts_and_the_tokens_stay_the_same():
    requests = [make_request(f"r{i}", range(i, i + 40), max_tokens=40) for i in range(3)]
    together, engine = run_together(requests, num_blocks=8)
    assert engine.snapshot().preemptions_total > 0
    assert engine.snapshot().prefix_hit_tokens_total == 0
    for request in requests:
        alone, _ = run_together([request])
        assert together[(request.request_id, 0)] == alone[(request.request_id, 0)]
