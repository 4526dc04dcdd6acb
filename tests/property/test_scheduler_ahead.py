"""The scheduler with plans made ahead, against the model without blocks of ``test_scheduler``.

The machine runs a plan as soon as it is made, as a stream does; what it gave is committed one plan later.
"""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from headrace.core.request import FinishReason, GenerationRequest, SamplingParams
from headrace.core.step import UNKNOWN, StepOutput
from headrace.engine.block_tables import BlockTables
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Group, Sequence
from headrace.kv.prefix import CacheSpace, PrefixCache
from tests.property.test_scheduler import FakeMachine, configs, expected_tokens

STOP = 4  # of the tokens 0 to 4: ends a sequence of a request that stops


def run_ahead(machine, plan, before, scheduler):
    """Run a plan whose tokens are those of the step before."""
    chosen = {item.seq_id: item.token_id for item in before.sampled}
    assert all(chunk.token_ids == (UNKNOWN,) for chunk in plan.chunks)
    chunks = (replace(c, token_ids=(chosen[c.seq_id],)) for c in plan.chunks)
    return machine.run(replace(plan, chunks=tuple(chunks)), scheduler)


def drive(config, requests, cancels, may_run_ahead, stops):
    scheduler, machine = Scheduler(config), FakeMachine(config)
    owner, tokens, reasons, ahead = {}, {}, {}, 0
    pending = sorted(requests, key=lambda r: r[0])
    step, flying = 0, None
    while pending or scheduler.has_work():
        for seq_id, index, request in machine.arrivals(scheduler, pending, step):
            owner[seq_id] = (request.request_id, index)
            tokens[owner[seq_id]] = []
        if step in cancels:
            scheduler.abort(cancels[step])
            scheduler.check()
        if flying is not None and not scheduler.concerns(flying[0]):
            scheduler.commit(StepOutput(flying[0].step))
            flying = None
        if flying is None:
            plan = scheduler.schedule()
            if plan is None:
                step += 1
                continue
            flying = plan, machine.run(plan, scheduler)
        behind = scheduler.schedule_ahead() if may_run_ahead(step) else None
        scheduler.check()
        plan, output = flying
        if behind is not None:
            assert [c.seq_id for c in behind.chunks] == [c.seq_id for c in plan.chunks]
            behind = behind, run_ahead(machine, behind, output, scheduler)
            ahead += 1
        there = [s for s in output.sampled if scheduler.is_active(owner[s.seq_id][0])]
        there = [s for s in there if owner[s.seq_id] not in reasons]
        for item in there:
            tokens[owner[item.seq_id]].append(item.token_id)
        stopped = frozenset(
            s.seq_id for s in there if s.token_id == STOP and owner[s.seq_id][0] in stops
        )
        output = StepOutput(plan.step, tuple(there), stopped=stopped)
        for end in scheduler.commit(output):
            reasons[owner[end.seq_id]] = end.reason
        scheduler.check()
        flying = behind
        step += 1
        assert step < 5000, "no end in sight"
    assert scheduler.tables.pool.num_owned == 0
    return tokens, reasons, ahead, scheduler.counters


@given(st.data(), configs())
@settings(max_examples=200, deadline=None)
def test_plans_made_ahead_never_change_a_token_nor_lose_a_block(data, config):
    limit = Scheduler(config).sequence_limit
    if limit < 2:
        return
    requests = []
    for i in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=min(limit - 1, 12)))
        params = SamplingParams(
            n=data.draw(st.integers(1, 3)),
            max_tokens=data.draw(st.one_of(st.none(), st.integers(1, 12))),
        )
        requests.append(
            (data.draw(st.integers(0, 8)), GenerationRequest(f"r{i}", tuple(prompt), params))
        )
    names = [r.request_id for _, r in requests]
    cancels = data.draw(st.dictionaries(st.integers(0, 30), st.sampled_from(names), max_size=3))
    stops = data.draw(st.sets(st.sampled_from(names)))
    rests = data.draw(st.sets(st.integers(0, 30), max_size=4))
    tokens, reasons, _, counters = drive(config, requests, cancels, lambda s: s not in rests, stops)
    for _, request in requests:
        room = limit - len(request.prompt_token_ids)
        count = min(room, request.sampling.max_tokens or room)
        for index in range(request.sampling.n):
            key = (request.request_id, index)
            expected = expected_tokens(request.prompt_token_ids, index, count)
            reason = FinishReason.LENGTH
            if request.request_id in stops and STOP in expected:
                expected = expected[: expected.index(STOP) + 1]
                reason = FinishReason.STOP
            if key in reasons:
                assert (tokens[key], reasons[key]) == (expected, reason)
            else:
                assert request.request_id in cancels.values()
                assert tokens[key] == expected[: len(tokens[key])]
    assert counters.generation_tokens == sum(map(len, tokens.values()))


def test_blocks_for_the_position_after_next_are_all_there_or_none_is_taken():
    """Two sequences in blocks of two tokens, each computing the second of its first block; three blocks."""
    prefix = PrefixCache(2)
    tables = BlockTables(3, prefix, use_cache=False)
    group = Group(GenerationRequest("r", (1, 2), SamplingParams()), CacheSpace())
    first, second = (Sequence(i, group, 0, [1, 2], 9) for i in range(2))
    for seq in (first, second):
        assert tables.extend(seq, 2, [])
        seq.num_computed = 1
    assert not tables.extend_ahead([first, second])  # one block is left for two
    assert (len(first.blocks), len(second.blocks)) == (1, 1)
    assert tables.extend_ahead([second])
    assert (len(second.blocks), tables.pool.num_available) == (2, 0)
    assert tables.extend_ahead([second])  # it is there already
    tables.pool.share(second.blocks[1:])
    assert not tables.extend_ahead([second])  # somebody else reads it now
