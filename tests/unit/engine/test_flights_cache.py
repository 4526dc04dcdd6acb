"""The prefix cache, preemption and counters where steps run ahead of what they depend on."""

import pytest

from headrace.core.request import FinishReason
from tests.fixtures.late_device import late_engine
from tests.fixtures.plain_answers import check_answers
from tests.fixtures.toy_engine import (
    Collected,
    ScriptedDecoder,
    ToyDecoder,
    answer,
    drain,
    make_request,
)

PROMPT = [(7 * i) % 95 + 32 for i in range(40)]


def test_b099_generated_tokens_are_reused_whether_steps_ran_ahead_or_not():
    """Of 40 + 30 tokens the last was never fed back: four blocks of 16 of the 69 are full."""
    decoder = ToyDecoder()
    engine, device = late_engine(decoder=decoder)
    first = make_request("first", PROMPT, max_tokens=30)
    engine.submit(first)
    found = drain(engine)
    assert device.replays == 29
    turn = [*PROMPT, *found[("first", 0)].token_ids, 65, 66]
    second = make_request("second", turn, max_tokens=5)
    engine.submit(second)
    drain(engine, found)
    check_answers(decoder, [first, second], found, 512)
    assert found[("second", 0)].deltas[-1].usage.cached_tokens == 64


@pytest.mark.parametrize("stop_at", [7, 8, 9])
def test_b102_what_a_dropped_row_wrote_is_in_no_cached_prefix(stop_at: int):
    """An answer that stops before, at and behind the end of a block of 16, with a step on its way."""
    decoder = ToyDecoder()
    engine, device = late_engine(decoder=decoder)
    said = answer(late_engine()[0], PROMPT, max_tokens=30).token_ids
    at = next(i for i in range(stop_at, 30) if said[i] not in said[:i])
    stopped = make_request("stopped", PROMPT, max_tokens=30, stop_token_ids=(said[at],))
    engine.submit(stopped)
    found = drain(engine)
    assert device.replays == at + 1  # one for each token behind the first, and one that was dropped
    # Two go on from the same answer: as it did, and another way.
    ways = [[*PROMPT, *said[: at + 2]], [*PROMPT, *said[: at + 1], 65, 66, 67]]
    requests = [make_request(f"way {i}", way, max_tokens=20) for i, way in enumerate(ways)]
    for request in requests:
        engine.submit(request)
    drain(engine, found)
    check_answers(decoder, [stopped, *requests], found, 512)
    known = (40 + at) // 16 * 16  # the stop token itself was fed to nobody who counts
    assert found[("way 0", 0)].deltas[-1].usage.cached_tokens == known


def test_b117_preempted_sequences_are_no_hits_of_their_own_blocks():
    """Two sequences of up to 40 + 40 tokens in eight blocks of 16: one is computed again."""
    decoder = ToyDecoder()
    engine, _ = late_engine(decoder=decoder, num_blocks=8, max_num_seqs=2)
    requests = [make_request(n, p, max_tokens=40) for n, p in (("a", PROMPT), ("b", PROMPT[::-1]))]
    found = Collected()
    for request in requests:
        engine.submit(request)
    ahead = 0
    while engine.has_work():
        found.take(engine.step())
        ahead += len(engine._flights)
    snapshot = engine.snapshot()
    assert snapshot.preemptions_total > 0
    assert ahead > 20
    assert snapshot.prefix_hit_tokens_total == 0
    assert (snapshot.prompt_tokens_total, snapshot.prefix_query_tokens_total) == (80, 80)
    assert snapshot.generation_tokens_total == 80
    check_answers(decoder, requests, found, engine._scheduler.sequence_limit)
    assert all(a.deltas[-1].usage.cached_tokens == 0 for a in found.values())


def test_b127_the_context_ends_an_answer_with_length_at_its_last_position():
    """No row is launched for a position behind the context, whose block table has no place for it."""
    engine, device = late_engine(decoder=ScriptedDecoder(lambda position: 65), context=20)
    done = answer(engine, [1, 2, 3, 4, 5])
    assert len(done.token_ids) == 15
    assert done.finish_reason is FinishReason.LENGTH
    assert device.replays == 14


@pytest.mark.parametrize("step", range(1, 6))
def test_b155_tokens_add_up_whenever_somebody_is_cancelled(step: int):
    engine, _ = late_engine()
    engine.submit(make_request("a", PROMPT, max_tokens=12, n=2))
    engine.submit(make_request("b", PROMPT[:5], max_tokens=12, temperature=1.0, seed=1))
    found = Collected()
    for _ in range(step):
        found.take(engine.step())
    engine.cancel("a")
    found.take(engine.step())
    assert {found[("a", i)].finish_reason for i in (0, 1)} == {FinishReason.CANCELLED}
    drain(engine, found)
    usage = [d.usage for a in found.values() for d in a.deltas if d.usage is not None]
    said = sum(len(a.token_ids) for a in found.values())
    assert sum(u.completion_tokens for u in usage) == said
    snapshot = engine.snapshot()
    assert snapshot.generation_tokens_total == said
    assert (snapshot.requests_aborted_total, snapshot.requests_finished) == (1, {"length": 1})
    assert (snapshot.running, snapshot.kv_blocks_used) == (0, 0)
