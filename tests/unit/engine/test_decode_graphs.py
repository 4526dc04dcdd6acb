"""Captured decoding on the host: fixed inputs, padded batches, greedy rows."""

import pytest

from headrace.core.errors import DeviceLostError, EngineDeadError
from headrace.core.step import ScheduledChunk
from headrace.engine.decode_graphs import BATCH_SIZES, DecodeGraphs
from headrace.engine.decode_inputs import DecodeInputs
from headrace.kv.open_pages import OpenChunk
from headrace.kv.storage import allocate_kv
from headrace.machine.device import HostDevice
from tests.fixtures.toy_engine import (
    ToyDecoder,
    answer,
    drain,
    make_request,
    toy_engine,
)

PROMPTS = [[(i * 17 + j * j) % 250 for j in range(5 + 3 * i)] for i in range(7)]


def chunk(seq, token, start, blocks, sample=True):
    return ScheduledChunk(seq, (token,), start, blocks, sample)


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 7])
def test_captured_steps_give_the_tokens_of_eager_ones(streams):
    """3, 5 and 7 sequences are padded to 4 and 8, and to 7 where no more may run."""
    for limit in (16, 7):
        requests = [make_request(f"r{i}", PROMPTS[i], max_tokens=9) for i in range(streams)]
        engines = toy_engine(max_num_seqs=limit), toy_engine(graphs=True, max_num_seqs=limit)
        found = []
        for engine in engines:
            for request in requests:
                engine.submit(request)
            done = drain(engine)
            assert not done.failed
            found.append({key: a.token_ids for key, a in done.items()})
        assert found[0] == found[1]


def test_sampled_rows_get_their_logits_beside_greedy_ones():
    requests = [
        make_request("greedy", PROMPTS[0], max_tokens=8),
        make_request("drawn", PROMPTS[1], max_tokens=8, temperature=1.0, seed=3),
        make_request("told", PROMPTS[2], max_tokens=8, logprobs=2),
        make_request("changed", PROMPTS[3], max_tokens=8, repetition_penalty=1.4),
        make_request("scored", PROMPTS[4], max_tokens=3, prompt_logprobs=1),
    ]
    found = []
    for graphs in (False, True):
        engine = toy_engine(graphs=graphs)
        for request in requests:
            engine.submit(request)
        done = drain(engine)
        assert not done.failed
        found.append({k: (a.token_ids, [d.logprobs for d in a.deltas]) for k, a in done.items()})
    assert found[0] == found[1]
    assert any(logprobs for logprobs in found[0][("told", 0)][1])


def test_inputs_of_a_step_and_its_padding():
    inputs = DecodeInputs(HostDevice(), 4, 3, scratch_block=9, block_tokens=16)
    inputs.fill([chunk(0, 7, 33, (5, 2, 8)), chunk(1, 9, 16, (4, 1))], 4)
    tokens, batch = inputs.batch(4)
    assert tokens.tolist() == [7, 9, 0, 0]
    assert batch.positions.tolist() == [33, 16, 0, 0]
    assert batch.slots.tolist() == [8 * 16 + 1, 1 * 16, 144, 144]
    assert batch.context_lens.tolist() == [34, 17, 1, 1]
    assert batch.query_start.tolist() == [0, 1, 2, 3, 4]
    assert batch.block_tables[0].tolist() == [5, 2, 8]
    assert batch.block_tables[1, :2].tolist() == [4, 1]
    assert batch.block_tables[2:, 0].tolist() == [9, 9]
    assert batch.valid is not None
    assert batch.valid.tolist() == [True, True, False, False]
    assert batch.decode
    assert batch.open is None
    # a smaller step leaves nothing of the larger one within its rows
    inputs.fill([chunk(0, 3, 0, (6,))], 2)
    tokens, batch = inputs.batch(2)
    assert (tokens.tolist(), batch.slots.tolist()) == ([3, 0], [96, 144])
    assert batch.valid is not None
    assert batch.valid.tolist() == [True, False]
    assert inputs.batch(1)[1].valid is None


def test_tables_follow_rows_that_grow_shrink_and_change_places():
    inputs = DecodeInputs(HostDevice(), 2, 4, scratch_block=9, block_tokens=2)
    tables = inputs.batch(2)[1].block_tables

    def fill(*sequences: tuple[int, tuple[int, ...]]) -> list[list[int]]:
        inputs.fill([ScheduledChunk(n, (0,), n, ids, True) for n, ids in sequences], 2)
        return [tables[row, : n // 2 + 1].tolist() for row, (n, _) in enumerate(sequences)]

    assert fill((3, (5, 6)), (1, (7,))) == [[5, 6], [7]]
    assert fill((4, (5, 6, 2)), (1, (7,))) == [[5, 6, 2], [7]]  # one more block
    assert fill((1, (7,)), (5, (5, 6, 2))) == [[7], [5, 6, 2]]  # the other way around
    assert fill((5, (7, 6, 2))) == [[7, 6, 2]]  # as at the start of a row, then others
    assert tables[1, 0].item() == 9  # padding
    assert fill((5, (7, 3, 2)), (5, (5, 6, 2))) == [[7, 3, 2], [5, 6, 2]]
    assert fill((3, (7, 3))) == [[7, 3]]
    assert fill((5, (7, 3, 1))) == [[7, 3, 1]]


def test_open_pages_of_a_step_and_its_padding():
    """Row 33 of the first goes to row 1 of its open page; row 15 of the second fills its first page."""
    inputs = DecodeInputs(HostDevice(), 4, 3, scratch_block=9, block_tokens=16, sealed=True)
    chunks = [chunk(0, 7, 33, (5, 2, 8)), chunk(1, 9, 15, (4,))]
    inputs.fill(chunks, 4, [OpenChunk((6,), ()), OpenChunk((3,), ((4, 3, 1),))])
    opened = inputs.batch(4)[1].open
    assert opened is not None
    assert opened.rows.tolist() == [6 * 16 + 1, 3 * 16 + 15, 0, 0]
    assert opened.pages.tolist() == [[6], [3], [0], [0]]
    assert opened.seals.tolist() == [[-1, 0, 0], [4, 3, 1], [-1, 0, 0], [-1, 0, 0]]
    inputs.fill(chunks[:1], 2, [OpenChunk((6,), ())])  # nothing is left of the step before
    again = inputs.batch(2)[1].open
    assert again is not None
    assert again.seals.tolist() == [[-1, 0, 0]] * 2
    assert again.pages.tolist() == [[6], [0]]


def test_padding_touches_no_block_but_its_own():
    decoder, device = ToyDecoder(), HostDevice()
    kv = allocate_kv(decoder.spec, 6, 16, "f32", device.torch_device)
    for cache in kv:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    graphs = DecodeGraphs(decoder, kv, device, max_batch=8, context=64)
    graphs.capture()
    graphs.run([chunk(i, 5, 0, (i,)) for i in range(3)])
    for cache in kv:
        written = ~cache.keys[:, 0, :, 0].isnan()
        rows = {tuple(at) for at in written.nonzero().tolist()}
        assert rows == {(0, 0), (1, 0), (2, 0), (5, 0)}


def test_the_largest_capture_is_what_may_run():
    decoder, device = ToyDecoder(), HostDevice()
    kv = allocate_kv(decoder.spec, 6, 16, "f32", device.torch_device)
    for limit, largest in ((1, 1), (3, 3), (16, 16), (100, 16)):
        graphs = DecodeGraphs(decoder, kv, device, max_batch=limit, context=64)
        assert graphs.max_batch == largest
    assert BATCH_SIZES == (1, 2, 4, 8, 16)


def test_larger_batches_than_the_largest_capture_run_eagerly():
    engine = toy_engine(graphs=True, max_num_seqs=20)
    for i in range(20):
        engine.submit(make_request(f"r{i}", [i, 3], max_tokens=4))
    done = drain(engine)
    alone = toy_engine(prefix_cache=False)
    for i in range(20):
        assert done[(f"r{i}", 0)].token_ids == answer(alone, [i, 3], max_tokens=4).token_ids


def test_logits_that_are_not_finite_fail_their_request_only():
    """A greedy row never leaves the device, and is refused all the same."""

    class Broken(ToyDecoder):
        def logits(self, hidden):
            out = super().logits(hidden)
            out[self.last[-len(out) :].eq(66)] = float("nan")
            return out

        def forward(self, token_ids, batch, kv):
            self.last = token_ids
            return super().forward(token_ids, batch, kv)

    engine = toy_engine(Broken(), graphs=True)
    engine.submit(make_request("bad", [66], max_tokens=3))
    done = drain(engine)
    assert set(done.failed) == {"bad"}
    assert "not finite" in done.failed["bad"].message
    assert answer(engine, [65, 67], max_tokens=2).token_ids


def test_an_observer_of_routes_sees_eager_steps():
    decoder = ToyDecoder()
    engine = toy_engine(decoder, graphs=True)
    decoder.calls.clear()
    engine.watch_routing(lambda layer, ids: None)
    answer(engine, [65, 66], max_tokens=3)
    assert [len(c) for c in decoder.calls] == [2, 1, 1]  # nothing is padded
    engine.watch_routing(None)


def test_a_lost_device_ends_the_engine():
    engine = toy_engine(graphs=True)
    engine._device.is_lost = lambda error: True
    engine._decoder.fail = lambda tokens: RuntimeError("CUDA error: unspecified launch failure")
    engine.submit(make_request("r", [65], max_tokens=3))
    with pytest.raises(EngineDeadError, match="unspecified launch failure") as caught:
        drain(engine)
    assert isinstance(caught.value.__cause__, DeviceLostError)
