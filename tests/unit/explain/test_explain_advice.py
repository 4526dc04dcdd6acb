"""Advice against sums by hand: drafts, batches, bits, hardware."""

import math
from dataclasses import replace

import pytest

from headrace.core.errors import MachineError
from headrace.core.model_spec import MoeSpec
from headrace.explain import advice, leaf
from headrace.explain.cost import price
from headrace.explain.kernel_rates import predict
from headrace.explain.running_cost import RunningModel, StepRows, decode_rows, running_cost
from headrace.machine.profile import MachineProfile
from tests.fixtures.running_models import KERNELS, dense_model, machine


def at_its_floor(
    model: RunningModel, on: MachineProfile, extra_s: float = 0.0
) -> advice.Calibrated:
    """A step that takes exactly its floors, and ``extra_s`` that no class explains."""
    rows = decode_rows(1, 5)
    measured = {n: price(one.work, on).floor_s for n, one in running_cost(model, rows).items()}
    return advice.Calibrated(model, rows, on, measured, sum(measured.values()) + extra_s)


def test_drafting_is_cheap_while_the_memory_binds():
    step = at_its_floor(dense_model(), machine())
    found = advice.speculation(step)
    # Weights are read once for five rows, the cache five times and a little more each: the sum by hand.
    weights = 2 * 2 * 576 + 320
    plain = weights + 2 * 2 * 6 * 16 + 2 * 2 * 16 + 40 + 32
    cache = 2 * 2 * 16 * (6 + 7 + 8 + 9 + 10)
    verify = weights + cache + 5 * (2 * 2 * 16 + 40 + 32)
    assert found.round_in_steps == pytest.approx(verify / plain, rel=0.02)
    assert 0 < found.acceptance < 0.7
    assert "pays from" in found.text()


def test_drafting_never_pays_once_arithmetic_binds():
    step = at_its_floor(dense_model(), machine(dram=1000, flops=0.001))
    found = advice.speculation(step)
    assert found.round_in_steps > 4.9  # five rows take five times the FLOPs, and attention more
    assert found.acceptance > 0.95
    slower = advice.Speculation(4, 5.2, math.inf)
    assert "never pays" in slower.text()
    assert slower.most == pytest.approx(5 / 5.2)


def test_break_even_with_experts_in_host_memory():
    assert advice.offloaded_break_even(128, 4) == pytest.approx(0.96875)
    # At that acceptance a round's tokens and its distinct experts grow by the same factor, any k.
    for drafts in (1, 3, 7):
        grown = 128 * (1 - (1 - 4 / 128) ** (drafts + 1)) / 4
        tokens = sum(0.96875**i for i in range(drafts + 1))
        assert grown == pytest.approx(tokens)


def test_offloaded_experts_grow_with_those_that_more_tokens_touch():
    """Of 128 experts, 4 a token: five rows touch 128 (1 - (31/32)^5) of them, 4.7 times as many."""
    base = at_its_floor(dense_model(), machine())
    moe = MoeSpec(128, 4, 16, "topk_softmax", normalize=True)
    layers = tuple(replace(one, moe=True) for one in base.model.spec.layers)
    spec = replace(base.model.spec, moe=moe, layers=layers)
    model = replace(base.model, spec=spec, misses_of_twice_the_slots=0.5)
    fetch_s = 1000 * base.step_s  # nothing else counts
    measured = {**base.measured, leaf.EXPERT_FETCH: fetch_s}
    step = replace(base, model=model, measured=measured, step_s=base.step_s + fetch_s)
    found = advice.speculation(step)
    grown = 128 * (1 - (1 - 4 / 128) ** 5) / 4
    assert found.round_in_steps == pytest.approx(grown, rel=5e-3)
    assert found.acceptance == pytest.approx(advice.offloaded_break_even(128, 4), abs=5e-3)
    sixteen = advice.batching(step, (16,))[0]
    assert sixteen.step_s == pytest.approx(fetch_s * 32 * (1 - (31 / 32) ** 16), rel=5e-3)


def test_batching_shares_the_weights_but_not_the_cache_or_the_host():
    step = at_its_floor(dense_model(), machine(), extra_s=1e-6)
    two = advice.batching(step, (2,))[0]
    weights = 2 * 2 * 576 + 320
    plain = sum(one.work.dram_nbytes for one in running_cost(step.model, step.rows).values())
    assert two.step_s == pytest.approx((weights + 2 * (plain - weights)) / 1e9 + 1e-6, rel=0.01)
    assert two.tokens_per_s == pytest.approx(2 / two.step_s)


def test_no_more_sequences_are_advised_than_the_pool_holds():
    """A step of 5 tokens and one more: 2 blocks of 4. Thirteen blocks hold six such sequences."""
    step = replace(at_its_floor(dense_model(), machine()), room=advice.Room(13, 4))
    assert step.most_times == 6
    assert [gain.batch for gain in advice.batching(step)] == [2, 4, 6]
    # 24 tokens fill 6 blocks: the pool holds two of them, and no third
    long = replace(step, rows=decode_rows(1, 23))
    assert [gain.batch for gain in advice.batching(long)] == [2]
    # two sequences at a time take twice the blocks: 3 times as many fit
    assert advice.Room(13, 4).times(decode_rows(2, 5)) == 3
    # of a format that has first pages, each sequence needs one
    assert advice.Room(13, 4, num_first=5).times(decode_rows(2, 5)) == 2
    assert advice.batching(replace(step, room=advice.Room(3, 4))) == []
    # sequences are counted, not multiples of those that ran: 15 of 9 tokens, three blocks each, in 46
    assert advice.Room(46, 4).sequences(9) == 15
    assert advice.Room(46, 4).times(decode_rows(8, 8)) == 1
    assert advice.Room(46, 4, num_first=9).sequences(9) == 9
    # 16 times as many fit: nothing is bounded
    for room in (None, advice.Room(32, 4)):
        free = replace(step, room=room)
        assert free.most_times is None
        assert [gain.batch for gain in advice.batching(free)] == [2, 4, 8, 16]


def test_fewer_bits_shrink_the_matrices_only():
    step = at_its_floor(dense_model(), machine())
    half = advice.with_weight_bits(step, 8)
    # 1,152 weights of two bytes become one byte each, 80 of four become one
    assert step.step_s - half == pytest.approx((1152 + 240) / 1e9, rel=0.01)
    assert advice.with_weight_bits(step, 64) == pytest.approx(step.step_s)
    cache = advice.with_kv_nbytes(step, 2)
    assert step.step_s - cache == pytest.approx((2 * 2 * 6 * 8 + 2 * 2 * 8) / 1e9, rel=0.01)


def test_hardware_twice_as_fast_halves_what_it_binds():
    step = at_its_floor(dense_model(), machine(), extra_s=1e-6)
    faster = advice.faster(step.machine, ("dram_read",), 2)
    assert advice.with_machine(step, faster) == pytest.approx(
        (step.step_s - 1e-6) / 2 + 1e-6, rel=0.02
    )
    assert advice.with_machine(step, advice.faster(step.machine, ("pcie",), 2)) == step.step_s


def test_a_kernel_keeps_its_distance_from_the_floor():
    step = at_its_floor(dense_model(), machine())
    slow = {**step.measured, leaf.DENSE_FFN: 3 * step.measured[leaf.DENSE_FFN]}
    total = step.step_s + 2 * step.measured[leaf.DENSE_FFN]
    again = replace(step, measured=slow, step_s=total)
    faster = advice.with_machine(again, advice.faster(step.machine, ("dram_read",), 2))
    assert faster == pytest.approx(total / 2, rel=0.01)


def test_prediction_by_the_kernels_rates():
    model, on = dense_model(), machine(**KERNELS)
    found = predict(model, decode_rows(1, 5), on).classes
    assert found[leaf.DENSE_FFN] == pytest.approx(2 * 2 * 384 / 2e9)
    assert found[leaf.LM_HEAD] == pytest.approx(320 / 4e9)
    assert found[leaf.ATTENTION_DECODE] == pytest.approx(2e-6 + 384 / 1e9)
    assert found[leaf.LAUNCHES] == pytest.approx(2 * 7e-6)
    assert found[leaf.RMSNORM] == pytest.approx((2 * 2 + 1) * 1e-9)
    assert found[leaf.ROPE] == pytest.approx(2 * 2e-9)
    assert found[leaf.SCHEDULE] == 5e-6
    assert found[leaf.SAMPLING] == pytest.approx(40 / 1e9)
    prefill = predict(model, StepRows(((3, 2),), 1), on).classes
    assert prefill[leaf.LAUNCHES] == pytest.approx((10 * 2 + 3) * 2e-6)
    assert prefill[leaf.RMSNORM] == pytest.approx(5 * 3 * 8 * 4 / 1e12)
    assert prefill[leaf.ATTENTION_PREFILL] == pytest.approx(2 * 12 * 2 * 17 / 1e9)


def test_prediction_names_the_rate_that_is_missing():
    bare = machine()
    assert predict(dense_model(), StepRows(((1, 1),), 1), machine(**KERNELS)).seconds > 0
    with pytest.raises(MachineError, match="call_token_embedding"):
        predict(dense_model(), decode_rows(1, 5), bare)
    with pytest.raises(MachineError, match="kernel_rows"):
        predict(dense_model(), StepRows(((3, 2),), 1), bare)


def test_kernels_of_a_graph_keep_their_starts():
    on = machine(
        hbm_read=(1.0, "GB/s"), gpu_flops_bf16=(1e6, "GFLOP/s"), gpu_flops_f32=(1e6, "GFLOP/s"),
        graph_read=(2e-6, "s"),
    )  # fmt: skip
    model, rows = dense_model(gpu=True), decode_rows(1, 5)
    measured = {
        name: price(one.work, on).floor_s + one.calls * 2e-6
        for name, one in running_cost(model, rows).items()
    }
    step = advice.Calibrated(model, rows, on, measured, sum(measured.values()))
    twice = advice.with_machine(step, advice.faster(on, ("hbm_read",), 2.0))
    floors = sum(price(one.work, on).floor_s for one in running_cost(model, rows).values())
    assert twice == pytest.approx(step.step_s - floors / 2, rel=1e-3)
