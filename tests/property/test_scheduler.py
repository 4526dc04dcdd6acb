"""The scheduler against a model without blocks: what it plans is right, and it always progresses.

The fake machine below keeps the tokens of each block as a plain list, and the next token is a hash
of all that a sequence reads through its block table: a wrong table, a stale block or an overwritten
one shows at once.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headrace.core.request import FinishReason, GenerationRequest, SamplingParams
from headrace.core.step import SampledToken, StepOutput
from headrace.engine.scheduler import Scheduler
from headrace.engine.scheduler_records import SchedulerConfig
from headrace.kv.prefix import PrefixCache

VOCAB = 5  # few tokens, so that random prompts share prefixes


def next_token(history, index):
    return hash((tuple(history), index)) % VOCAB


class FakeMachine:
    """Blocks as lists of tokens; checks every write."""

    def __init__(self, config):
        self.size = config.block_tokens
        self.blocks = [[None] * self.size for _ in range(config.num_blocks)]
        self.index_of = {}

    def run(self, plan, scheduler):
        for source, target in plan.block_copies:
            self.blocks[target] = list(self.blocks[source])
        written = [
            c.block_ids[p // self.size]
            for c in plan.chunks
            for p in {q // self.size * self.size for q in self.positions(c)}
        ]
        assert len(written) == len(set(written)), "two sequences write to one block"
        for block in written:
            assert scheduler.tables.pool.references(block) == 1
            assert not scheduler.tables.pool.is_kept(block)
        sampled = []
        for chunk in plan.chunks:
            history = [
                self.blocks[chunk.block_ids[p // self.size]][p % self.size]
                for p in range(chunk.start)
            ]
            for position, token in zip(self.positions(chunk), chunk.token_ids, strict=True):
                history.append(token)
                self.blocks[chunk.block_ids[position // self.size]][position % self.size] = token
            if chunk.sample:
                token = next_token(history, self.index_of[chunk.seq_id])
                sampled.append(SampledToken(chunk.seq_id, token))
        return StepOutput(plan.step, tuple(sampled))

    def arrivals(self, scheduler, pending, step):
        """Submit the requests whose step has come, or the next one to an idle scheduler: their sequences."""
        while pending and (pending[0][0] <= step or not scheduler.has_work()):
            request = pending.pop(0)[1]
            for index, seq_id in enumerate(scheduler.submit(request)):
                self.index_of[seq_id] = index
                yield seq_id, index, request

    @staticmethod
    def positions(chunk):
        return range(chunk.start, chunk.start + len(chunk.token_ids))


def expected_tokens(prompt, index, count):
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, index))
    return history[len(prompt) :]


def drive(config, requests, cancels=(), prefix=None):
    """Run requests, given as (step of submission, request), to their end; return their tokens."""
    scheduler = Scheduler(config, prefix)
    machine = FakeMachine(config)
    owner, tokens, reasons = {}, {}, {}
    pending = sorted(requests, key=lambda r: r[0])
    cancels = dict(cancels)
    step = 0
    while pending or scheduler.has_work():
        for seq_id, index, request in machine.arrivals(scheduler, pending, step):
            owner[seq_id] = (request.request_id, index)
            tokens[owner[seq_id]] = []
        if step in cancels:
            scheduler.abort(cancels[step])
            scheduler.check()
        plan = scheduler.schedule()
        if plan is not None:
            assert plan.num_tokens <= config.max_batch_tokens
            assert len(plan.chunks) <= config.max_num_seqs
            output = machine.run(plan, scheduler)
            for item in output.sampled:
                tokens[owner[item.seq_id]].append(item.token_id)
            for end in scheduler.commit(output):
                reasons[owner[end.seq_id]] = end.reason
            scheduler.check()
        step += 1
        assert step < 5000, "no end in sight"
    assert scheduler.tables.pool.num_owned == 0
    assert scheduler.schedule() is None
    return scheduler, tokens, reasons


@st.composite
def configs(draw):
    size = draw(st.sampled_from([1, 2, 3, 4]))
    num_blocks = draw(st.integers(2, 14))
    max_num_seqs = draw(st.integers(1, 5))
    max_batch_tokens = draw(st.integers(max_num_seqs, 12))
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_tokens=size,
        context=draw(st.integers(4, 40)),
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        prefix_cache=draw(st.booleans()),
        beside_tokens=draw(st.one_of(st.none(), st.integers(max_num_seqs, max_batch_tokens))),
        tail_tokens=draw(st.one_of(st.none(), st.integers(0, 4))),
    )


@given(st.data(), configs(), st.booleans())
@settings(max_examples=250, deadline=None)
def test_b110_any_load_ends_with_the_right_tokens_and_all_blocks_back(data, config, constant_hash):
    limit = Scheduler(config).sequence_limit
    if limit < 2:
        return
    requests = []
    for i in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=min(limit - 1, 12)))
        params = SamplingParams(
            n=data.draw(st.integers(1, 3)),
            max_tokens=data.draw(st.one_of(st.none(), st.integers(1, 10))),
        )
        salt = data.draw(st.sampled_from(["", "", "other"]))
        requests.append(
            (data.draw(st.integers(0, 8)), GenerationRequest(f"r{i}", tuple(prompt), params, salt))
        )
    names = [r.request_id for _, r in requests]
    cancels = data.draw(st.dictionaries(st.integers(0, 30), st.sampled_from(names), max_size=3))
    prefix = PrefixCache(config.block_tokens, lambda key: 0) if constant_hash else None
    _, tokens, reasons = drive(config, requests, cancels.items(), prefix)
    cancelled = set(cancels.values())
    for _, request in requests:
        room = limit - len(request.prompt_token_ids)
        count = min(room, request.sampling.max_tokens or room)
        for index in range(request.sampling.n):
            key = (request.request_id, index)
            expected = expected_tokens(request.prompt_token_ids, index, count)
            if key in reasons:
                assert reasons[key] is FinishReason.LENGTH
                assert tokens[key] == expected
            else:
                assert request.request_id in cancelled
                assert tokens[key] == expected[: len(tokens[key])]


def request(name, prompt, **params):
    return GenerationRequest(name, tuple(prompt), SamplingParams(**params))


def config(**changes):
    values = {
        "num_blocks": 64,
        "block_tokens": 4,
        "context": 1000,
        "max_batch_tokens": 16,
        "max_num_seqs": 8,
    }
    return SchedulerConfig(**{**values, **changes})


def test_prompts_are_cut_alike_and_shorter_while_others_decode():
    """In steps of 16, or 6 beside others: 20 tokens are 10 and 10, 18 are 16 and a rest of 2."""
    limits = config(beside_tokens=6, tail_tokens=2, prefix_cache=False)
    scheduler = Scheduler(limits)
    machine = FakeMachine(limits)

    def steps(count):
        found = []
        for _ in range(count):
            plan = scheduler.schedule()
            scheduler.commit(machine.run(plan, scheduler))
            found.append([len(chunk.token_ids) for chunk in plan.chunks])
        return found

    def submit(name, tokens, **params):
        for index, seq_id in enumerate(scheduler.submit(request(name, range(tokens), **params))):
            machine.index_of[seq_id] = index

    submit("alone", 20, max_tokens=1)
    assert steps(2) == [[10], [10]]
    submit("rest", 18, max_tokens=30)
    assert steps(2) == [[16], [2]]
    # The decoding row takes one of 6: 5 + 5 + 5 would be left of 14, as 5, 5 and 4.
    submit("beside", 14, max_tokens=1)
    assert steps(4) == [[1, 5], [1, 5], [1, 4], [1]]


def test_b115_two_that_fit_alone_but_not_together_both_finish():
    small = config(num_blocks=10, context=41)
    shared = [1, 0, 1, 1, 0, 0, 1, 0]
    first = request("a", [*shared, 2, 2, 2], max_tokens=28)
    second = request("b", [*shared, 3, 3], max_tokens=30)
    scheduler, tokens, _ = drive(small, [(0, first), (0, second)])
    assert scheduler.counters.preemptions > 0
    assert tokens[("a", 0)] == expected_tokens(first.prompt_token_ids, 0, 28)
    assert tokens[("b", 0)] == expected_tokens(second.prompt_token_ids, 0, 30)


def test_b117_recompute_after_preemption_is_not_a_hit():
    small = config(num_blocks=10, context=41)
    scheduler, _, _ = drive(
        small,
        [
            (0, request("a", [4, 3, 2, 1] * 3, max_tokens=28)),
            (0, request("b", [0, 1, 2, 3] * 3, max_tokens=28)),
        ],
    )
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.prefix_query_tokens == 24
    assert scheduler.counters.prefix_hit_tokens == 0
    assert scheduler.counters.prompt_tokens == 24
    assert scheduler.counters.generation_tokens == 56


@pytest.mark.parametrize("n", [2, 3, 8])
def test_n_sequences_share_the_blocks_of_the_prompt(n):
    """Ten full blocks and a part: n sequences need 11 blocks and one more for each sibling."""
    prompt = [i % 5 for i in range(42)]
    scheduler = Scheduler(config(prefix_cache=False))
    scheduler.submit(request("a", prompt, n=n, max_tokens=2))
    machine = FakeMachine(scheduler.config)
    machine.index_of = dict(enumerate(range(n)))
    most = 0
    copies = 0
    while (plan := scheduler.schedule()) is not None:
        most = max(most, scheduler.tables.pool.num_owned)
        copies += len(plan.block_copies)
        scheduler.commit(machine.run(plan, scheduler))
    assert most <= 11 + (n - 1)
    assert copies == n - 1
