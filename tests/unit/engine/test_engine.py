"""The engine with toy decoders: text, ends, failures, cancels, limits, counters."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from headrace.core.errors import (
    ContextLengthError,
    DeviceLostError,
    EngineDeadError,
    RequestError,
    outcome_of,
)
from headrace.core.request import FinishReason, Usage
from tests.fixtures.toy_engine import (
    EOS,
    VOCAB,
    Collected,
    ScriptedDecoder,
    ToyDecoder,
    answer,
    drain,
    make_request,
    says,
    toy_engine,
    toy_tokenizer,
)

HELLO = "hello world, the end"


def test_an_answer_ends_at_the_end_token():
    done = answer(toy_engine(says(HELLO)), [65])
    assert done.text == HELLO
    assert done.finish_reason is FinishReason.STOP
    assert done.deltas[-1].stop_reason is None
    ids = toy_tokenizer().encode(HELLO)
    assert done.token_ids == [*ids, EOS]
    assert done.deltas[-1].usage == Usage(1, len(ids) + 1, 0)
    assert all(d.usage is None for d in done.deltas[:-1])


def test_ignore_eos_goes_on_to_the_limit():
    done = answer(toy_engine(says("ab")), [65], ignore_eos=True, max_tokens=7)
    assert done.token_ids == [97, 98, EOS, EOS, EOS, EOS, EOS]
    assert done.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("include", [False, True])
def test_b072_the_text_of_a_stop_token_is_left_out_unless_included(include):
    done = answer(toy_engine(says("abcd")), [65], stop_token_ids=(ord("c"),), include_stop=include)
    assert done.text == ("abc" if include else "ab")
    assert done.deltas[-1].stop_reason == ord("c")
    assert done.finish_reason is FinishReason.STOP
    assert done.token_ids == [97, 98, 99]


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello wor")])
def test_stop_strings_end_the_sequence_and_cut_the_text(include, text):
    done = answer(toy_engine(says(HELLO)), [65], stop=(" wor", "xyz"), include_stop=include)
    assert done.text == text
    assert done.finish_reason is FinishReason.STOP
    assert done.deltas[-1].stop_reason == " wor"
    # the sequence ended with the token that completed the stop string: nothing was computed after
    assert toy_tokenizer().decode(done.token_ids).endswith((" wor", " world"))


def test_text_held_back_for_a_stop_string_comes_at_the_end():
    done = answer(toy_engine(says("abc")), [65], stop=("bcd",))
    assert done.text == "abc"
    limited = answer(toy_engine(says("abcz")), [65], stop=("bcd",), max_tokens=3)
    assert limited.text == "abc"
    assert limited.finish_reason is FinishReason.LENGTH


def test_b069_characters_split_over_tokens_come_whole():
    emoji = "é😀".encode()
    done = answer(toy_engine(says(list(emoji))), [65])
    assert [d.text for d in done.deltas if d.text] == ["é", "😀"]
    cut = answer(toy_engine(says(list(emoji[:4]))), [65])
    assert cut.text == "é\ufffd"


def test_b126_an_overflow_says_code_limit_and_count():
    engine = toy_engine(ToyDecoder(), context=40)
    for length in (40, 41, 100):
        with pytest.raises(ContextLengthError) as caught:
            engine.submit(make_request("long", [7] * length))
        assert caught.value.code == "context_length_exceeded"
        assert "40" in caught.value.message
        assert str(length) in caught.value.message
        assert outcome_of(caught.value).http_status == 400
    assert not engine.has_work()


def test_b124_a_prompt_is_never_cut():
    with pytest.raises(ContextLengthError):
        toy_engine(context=40).submit(make_request("long", [7] * 41))
    decoder = ToyDecoder()
    prompt = [i % 50 for i in range(24)]  # 0.6 of the context
    done = answer(toy_engine(decoder, context=40), prompt, max_tokens=1)
    assert done.deltas[-1].usage.prompt_tokens == 24
    assert [t for call in decoder.calls for t in call] == prompt


def test_b114_a_request_larger_than_the_pool_is_refused_and_the_next_one_served():
    engine = toy_engine(context=4096, num_blocks=62, block_tokens=16)  # 992 tokens
    with pytest.raises(ContextLengthError, match="KV pool") as caught:
        engine.submit(make_request("large", [5] * 1200))
    assert caught.value.code == "context_length_exceeded"
    assert answer(engine, [5] * 10, max_tokens=3).finish_reason is FinishReason.LENGTH


def test_b127_generation_ends_with_length_at_the_end_of_the_context():
    engine = toy_engine(ScriptedDecoder(lambda position: 65), context=20)
    done = answer(engine, [1, 2, 3, 4, 5])
    assert len(done.token_ids) == 15
    assert done.finish_reason is FinishReason.LENGTH
    short = answer(engine, [1, 2, 3, 4, 5], max_tokens=4)
    assert len(short.token_ids) == 4
    longer = answer(engine, [1, 2, 3, 4, 5], max_tokens=400)
    assert len(longer.token_ids) == 15


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_b099_generated_tokens_are_reused_by_the_next_turn(block_tokens):
    engine = toy_engine(num_blocks=16, block_tokens=block_tokens)
    prompt = [(7 * i) % 250 for i in range(100)]
    first = answer(engine, prompt, max_tokens=50)
    turn = [*prompt, *first.token_ids, *range(50)]
    second = answer(engine, turn, max_tokens=1)
    # the last generated token was never fed back, so its key is not there: 149 tokens are
    cached = second.deltas[-1].usage.cached_tokens
    assert cached == 149 // block_tokens * block_tokens
    fresh = answer(toy_engine(prefix_cache=False), turn, max_tokens=1)
    assert second.token_ids == fresh.token_ids
    assert fresh.deltas[-1].usage.cached_tokens == 0


def test_b100_a_sliding_window_keeps_the_prefix_of_prompts_that_diverge_late():
    engine = toy_engine()  # its second layer has a window of 8
    shared = [(11 * i) % 250 for i in range(200)]
    answer(engine, [*shared, *range(20)], max_tokens=4)
    other = [*shared, *range(100, 120)]
    second = answer(engine, other, max_tokens=8)
    assert second.deltas[-1].usage.cached_tokens == 192  # twelve blocks of 16
    assert second.token_ids == answer(toy_engine(), other, max_tokens=8).token_ids


def test_b103_blocks_are_hits_only_once_they_are_computed():
    prompt = [(3 * i) % 250 for i in range(70)]
    engine = toy_engine(max_batch_tokens=200)
    engine.submit(make_request("a", [*prompt, 1], max_tokens=6))
    engine.submit(make_request("b", [*prompt, 2], max_tokens=6))
    together = drain(engine)
    for name, last in (("a", 1), ("b", 2)):
        alone = answer(toy_engine(), [*prompt, last], max_tokens=6)
        done = together[(name, 0)]
        assert done.token_ids == alone.token_ids
        assert done.deltas[-1].usage.cached_tokens == 0
    assert engine.snapshot().prefix_hit_tokens_total == 0
    # both computed the same four blocks; they are kept once
    assert engine.snapshot().kv_blocks_cached <= 4 + 2


def test_b098_prompts_with_different_salts_do_not_share_blocks():
    engine = toy_engine()
    prompt = list(range(64))
    answer(engine, prompt, max_tokens=1, salt="X")
    assert answer(engine, prompt, max_tokens=1).deltas[-1].usage.cached_tokens == 0
    assert answer(engine, prompt, max_tokens=1, salt="Y").deltas[-1].usage.cached_tokens == 0
    assert answer(engine, prompt, max_tokens=1, salt="X").deltas[-1].usage.cached_tokens == 48


def test_b102_an_evicted_prefix_is_a_miss_and_the_output_is_right():
    engine = toy_engine(num_blocks=8)
    old = [(5 * i) % 250 for i in range(100)]
    expected = answer(toy_engine(), old, max_tokens=5).token_ids
    answer(engine, old, max_tokens=5)
    answer(engine, [(9 * i + 1) % 250 for i in range(110)], max_tokens=10)  # takes all 8 blocks
    again = answer(engine, old, max_tokens=5)
    assert again.deltas[-1].usage.cached_tokens == 0
    assert again.token_ids == expected


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_b130_a_cancel_frees_everything_within_a_step(steps):
    """After one step the 200-token prompt is in prefill; after eight, the answer is decoding."""
    engine = toy_engine(prefix_cache=False)
    engine.submit(make_request("a", [9] * 200, max_tokens=100))
    engine.submit(make_request("waiting", [8] * 200, max_tokens=100))
    for _ in range(steps):
        engine.step()
    engine.cancel("a")
    engine.cancel("waiting")
    engine.cancel("unknown")
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.kv_blocks_used) == (0, 0, 0)
    last = Collected()
    last.take(engine.step())
    assert {k: a.finish_reason for k, a in last.items()} == {
        ("a", 0): FinishReason.CANCELLED,
        ("waiting", 0): FinishReason.CANCELLED,
    }
    assert not engine.has_work()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    fresh = answer(toy_engine(), prompt, max_tokens=20)
    assert answer(engine, prompt, max_tokens=20).token_ids == fresh.token_ids


def test_b155_cancels_are_counted_and_tokens_are_consistent():
    engine = toy_engine()
    for i in range(5):
        engine.submit(make_request(f"r{i}", [i, 2, 3], max_tokens=50))
    seen = Collected()
    for _ in range(4):
        seen.take(engine.step())
    for i in range(5):
        engine.cancel(f"r{i}")
    seen = drain(engine, seen)
    snapshot = engine.snapshot()
    assert snapshot.requests_aborted_total == 5
    assert snapshot.prompt_tokens_total == 15
    assert snapshot.generation_tokens_total == sum(len(a.token_ids) for a in seen.values())
    assert sum(a.deltas[-1].usage.completion_tokens for a in seen.values()) == (
        snapshot.generation_tokens_total
    )


def test_b120_an_allocation_that_fails_in_prefill_fails_that_request_only():
    decoder = ToyDecoder()
    decoder.fail = lambda tokens: MemoryError("no page left") if 99 in tokens else None
    engine = toy_engine(decoder)
    prompts = {"a": [1, 2, 3], "bad": [4, 99, 5], "b": [6, 7, 8]}
    for name, prompt in prompts.items():
        engine.submit(make_request(name, prompt, max_tokens=5, n=2 if name == "bad" else 1))
    done = drain(engine)
    assert list(done.failed) == ["bad"]
    failed = done.failed["bad"]
    assert failed.error_class == "DoesNotFitError"
    assert "no page left" in failed.message
    assert failed.hint is not None
    assert not [key for key in done if key[0] == "bad"]
    for name in ("a", "b"):
        assert (
            done[(name, 0)].token_ids == answer(toy_engine(), prompts[name], max_tokens=5).token_ids
        )
    assert engine.snapshot().kv_blocks_used == 0
    assert engine.snapshot().requests_finished == {"error": 1, "length": 2}


def test_logits_that_are_not_finite_fail_their_request_only():
    decoder = ToyDecoder()
    head = decoder.logits
    decoder.logits = lambda hidden: head(hidden) * torch.where(hidden[:, :1] > 1e3, math.nan, 1.0)
    decoder.embedding[50] = 1e6
    engine = toy_engine(decoder)
    engine.submit(make_request("good", [1, 2], max_tokens=3))
    engine.submit(make_request("bad", [1, 50], max_tokens=3))
    done = drain(engine)
    assert list(done.failed) == ["bad"]
    assert done.failed["bad"].error_class == "InternalError"
    assert "not finite" in done.failed["bad"].message
    assert done[("good", 0)].finish_reason is FinishReason.LENGTH


def test_a_lost_device_ends_the_engine():
    decoder = ToyDecoder()
    engine = toy_engine(decoder)
    engine.submit(make_request("a", [1, 2]))
    decoder.fail = lambda tokens: DeviceLostError("gone")
    with pytest.raises(EngineDeadError, match="gone"):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.submit(make_request("b", [1]))
    with pytest.raises(EngineDeadError):
        engine.step()


def test_b081_a_seeded_request_does_not_depend_on_its_neighbours():
    prompt = [10, 20, 30, 40]
    runs = []
    for neighbours in ((), ({"seed": 7},), ({}, {"seed": 3, "n": 2}, {"temperature": 0.0})):
        engine = toy_engine()
        for i, params in enumerate(neighbours):
            params = {"temperature": 1.0, "max_tokens": 12, **params}
            engine.submit(make_request(f"n{i}", [60 + i, 2], **params))
        engine.submit(make_request("s", prompt, temperature=1.0, seed=42, max_tokens=12, n=2))
        done = drain(engine)
        runs.append([done[("s", index)].token_ids for index in (0, 1)])
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0] != runs[0][1]


def test_requests_without_a_seed_differ():
    texts = {
        tuple(answer(toy_engine(), [1, 2], temperature=1.5, max_tokens=12).token_ids) for _ in "abc"
    }
    assert len(texts) == 3


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_greedy_sequences_of_one_request_are_equal_to_one_alone(length, prefix_cache):
    prompt = [(13 * i) % 250 for i in range(length)]
    engine = toy_engine(prefix_cache=prefix_cache, max_batch_tokens=16, max_num_seqs=3)
    engine.submit(make_request("many", prompt, n=5, max_tokens=9))
    done = drain(engine)
    alone = answer(toy_engine(), prompt, max_tokens=9).token_ids
    assert [done[("many", i)].token_ids for i in range(5)] == [alone] * 5
    usages = [d.usage for a in done.values() for d in a.deltas if d.usage is not None]
    assert usages == [Usage(length, 45, 0)]


def test_b080_penalties_follow_each_sequence():
    """The toy says one token for ever: a penalty of 2 cannot beat a logit of 20, a bias can."""
    stuck = ScriptedDecoder(lambda position: 65)
    plain = answer(toy_engine(stuck), [65, 66], max_tokens=3, presence_penalty=2.0)
    assert plain.token_ids == [65, 65, 65]
    biased = answer(toy_engine(stuck), [65, 66], max_tokens=3, logit_bias=((65, -19.5), (70, 0.1)))
    assert biased.token_ids == [65, 65, 65]  # 0.5 against 0.1
    penalised = answer(
        toy_engine(stuck),
        [65, 66],
        max_tokens=3,
        logit_bias=((65, -19.5), (70, 0.1)),
        presence_penalty=1.0,
    )
    # 65 is in the prompt, which does not count; generated once, it falls to -0.5 and 70 wins; then
    # 70 falls to -0.9, and of the others, all 0, the smallest id is taken
    assert penalised.token_ids == [65, 70, 0]


def test_b086_one_aligned_entry_for_each_token():
    decoder = ToyDecoder()
    done = answer(toy_engine(decoder), [1, 2, 3], max_tokens=4, logprobs=2)
    entries = [e for d in done.deltas for e in d.logprobs]
    assert [e.token_id for e in entries] == done.token_ids
    assert all(len(e.top) == 2 and e.top[0] == (e.token_id, e.logprob) for e in entries)
    assert len({e.top for e in entries}) == 4
    bare = answer(toy_engine(decoder), [1, 2, 3], max_tokens=4, logprobs=0)
    assert [e.logprob for d in bare.deltas for e in d.logprobs] == [e.logprob for e in entries]
    assert all(e.top == () for d in bare.deltas for e in d.logprobs)
    off = answer(toy_engine(decoder), [1, 2, 3], max_tokens=4)
    assert all(d.logprobs == () for d in off.deltas)


@pytest.mark.parametrize("params", [{"top_k": 1, "temperature": 1.0}, {"temperature": 1e-8}])
def test_b085_logprobs_are_valid_json_in_extreme_sampling(params):
    done = answer(toy_engine(), [1, 2, 3], max_tokens=3, logprobs=20, **params)
    text = json.dumps([dataclasses.asdict(d) for d in done.deltas], allow_nan=False)
    assert "logprob" in text


@pytest.mark.parametrize("chunk", [16, 64])
def test_prompt_logprobs_are_those_of_every_prompt_row(chunk):
    """Against one request for each prefix of the prompt, which gives the same distribution."""
    prompt = [(17 * i) % 250 for i in range(37)]
    engine = toy_engine(max_batch_tokens=chunk)
    answer(engine, prompt, max_tokens=1)  # a cached prefix must not leave holes
    done = answer(engine, prompt, max_tokens=2, prompt_logprobs=3)
    scores = done.deltas[0].prompt_logprobs
    assert all(d.prompt_logprobs is None for d in done.deltas[1:])
    assert len(scores) == 37
    assert scores[0] is None
    for at in (1, 15, 16, 17, 36):
        reference = answer(toy_engine(), prompt[:at], max_tokens=1, logprobs=3)
        assert [t for t, _ in scores[at].top] == [t for t, _ in reference.deltas[0].logprobs[0].top]
        np.testing.assert_allclose(
            [v for _, v in scores[at].top],
            [v for _, v in reference.deltas[0].logprobs[0].top],
            atol=1e-5,
        )
        assert scores[at].token_id == prompt[at]


def test_b077_ids_outside_the_vocabulary_are_refused_and_the_next_request_served():
    engine = toy_engine()
    for field, params in (
        ("logit_bias", {"logit_bias": ((99999999, 5.0),)}),
        ("stop_token_ids", {"stop_token_ids": (99999999,)}),
        ("prompt", {}),
    ):
        prompt = [VOCAB] if field == "prompt" else [1]
        with pytest.raises(RequestError) as caught:
            engine.submit(make_request("bad", prompt, **params))
        assert caught.value.param == field
    assert answer(engine, [1], max_tokens=2).token_ids


def test_an_id_in_use_is_refused():
    engine = toy_engine()
    engine.submit(make_request("a", [1], max_tokens=3))
    with pytest.raises(RequestError, match="already"):
        engine.submit(make_request("a", [2]))
    assert len(drain(engine)[("a", 0)].token_ids) == 3


def test_steps_are_observed():
    engine = toy_engine(max_batch_tokens=16)
    seen = []
    engine.observe = seen.append
    engine.submit(make_request("a", range(20), max_tokens=3))
    drain(engine)
    assert [(s.phase, s.batch, s.tokens) for s in seen] == [
        ("prefill", 1, 16),
        ("prefill", 1, 4),
        ("decode", 1, 1),
        ("decode", 1, 1),
    ]
    assert [s.step for s in seen] == [0, 1, 2, 3]
    for stats in seen:
        ranges = {c.id: c.seconds for c in stats.classes}
        assert ranges["decoder"] > 0
        assert sum(ranges.values()) <= stats.seconds
    assert engine.snapshot().step_seconds_total == pytest.approx(sum(s.seconds for s in seen))


def test_close_drops_everything():
    engine = toy_engine()
    engine.submit(make_request("a", [1, 2]))
    engine.step()
    engine.close()
    assert not engine.has_work()
    assert engine.snapshot().kv_blocks_used == 0
    with pytest.raises(EngineDeadError):
        engine.submit(make_request("b", [1]))


def test_b121_what_is_remembered_never_exceeds_the_pool():
    """Ten blocks: a prompt of twelve is refused, ten prompts of three each find room in turn."""
    engine = toy_engine(num_blocks=10)
    with pytest.raises(ContextLengthError):
        engine.submit(make_request("large", [1] * 12 * 16))
    for i in range(10):
        answer(engine, [i, *range(3 * 16 - 1)], max_tokens=2)
        snapshot = engine.snapshot()
        assert snapshot.kv_blocks_used == 0
        assert 3 <= snapshot.kv_blocks_cached <= 10
