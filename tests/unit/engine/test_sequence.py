"""Sequences of a request share its prompt until they go their own ways."""

from headrace.core.request import GenerationRequest, SamplingParams
from headrace.core.step import SampledToken, StepOutput
from headrace.engine.scheduler import Scheduler
from headrace.engine.scheduler_records import SchedulerConfig


def test_a_waiting_choice_takes_no_memory_for_its_prompt():
    """128 choices of a million tokens would be a gigabyte of lists otherwise."""
    prompt = tuple(range(20))
    scheduler = Scheduler(SchedulerConfig(64, 4, 1000, 64, 2))
    ids = scheduler.submit(GenerationRequest("r", prompt, SamplingParams(n=4, max_tokens=3)))
    group = scheduler._groups["r"]
    assert all(s.tokens is prompt for s in group.sequences)
    plan = scheduler.schedule()
    assert plan is not None
    assert [c.token_ids for c in plan.chunks] == [prompt]
    scheduler.commit(StepOutput(plan.step, (SampledToken(ids[0], 77),)))
    first, *others = group.sequences
    assert list(first.tokens) == [*prompt, 77]
    assert all(s.tokens is prompt for s in others)
    plan = scheduler.schedule()
    assert plan is not None
    said = {c.seq_id: SampledToken(c.seq_id, 80 + c.seq_id) for c in plan.chunks if c.sample}
    scheduler.commit(StepOutput(plan.step, tuple(said.values())))
    assert [list(s.tokens)[20:] for s in group.sequences[:2]] == [[77, 80], [81]]
    assert prompt == tuple(range(20))
    scheduler.check()
