"""Predicted steps of a GPU against sums by hand."""

from dataclasses import replace

import pytest

from headrace.core.errors import MachineError
from headrace.explain import leaf
from headrace.explain.gpu_kernel_rates import EAGER_KERNELS, attention_seconds
from headrace.explain.kernel_rates import ExpertSeconds, predict
from headrace.explain.running_cost import StepRows, decode_rows
from headrace.machine.profile import GpuProfile
from tests.fixtures.running_models import KERNELS, dense_model, machine

GPU_KERNELS = {n: v for n, v in KERNELS.items() if n.startswith(("kernel_one", "kernel_many"))} | {
    "kernel_attention_prefill": (1.0, "GFLOP/s"),
    "call_rmsnorm": (2e-6, "s"),
    "call_token_embedding": (3e-6, "s"),
    "call_sampling": (15e-6, "s"),
    "call_rope_rotation": (2.5e-6, "s"),
    "attention_t128": (6e-6, "s"),
    "attention_t512": (7e-6, "s"),
    "attention_t2048": (10e-6, "s"),
    "hbm_read": (4000.0, "GB/s"),
    "kernel_launch": (14e-6, "s"),
    "step_host": (100e-6, "s"),
    "block_host": (0.1e-6, "s"),
    "token_host": (5e-6, "s"),
}


def gpu(**more: tuple[float, str]):
    return replace(machine(**{**GPU_KERNELS, **more}), gpu=GpuProfile("g", 1 << 30))


def test_attention_is_straight_between_what_was_measured_and_goes_on_beyond():
    on = gpu()
    assert attention_seconds(128, on) == pytest.approx(6e-6)
    assert attention_seconds(320, on) == pytest.approx(6.5e-6)
    assert attention_seconds(1280, on) == pytest.approx(8.5e-6)
    assert attention_seconds(2048 + 1536, on) == pytest.approx(13e-6)
    assert attention_seconds(4, on) == pytest.approx(6e-6)  # no kernel is faster than the shortest
    with pytest.raises(MachineError, match="attention_t"):
        attention_seconds(128, machine())


def test_a_replayed_step_is_the_sum_of_its_kernels():
    model = dense_model((None, 512), gpu=True)
    found = predict(model, decode_rows(1, 1279), gpu()).classes
    assert found[leaf.RMSNORM] == pytest.approx(5 * 2e-6)
    assert found[leaf.ROPE] == pytest.approx(2 * 2.5e-6)
    assert found[leaf.KV_APPEND] == 0  # the rotation's kernel writes it
    assert found[leaf.ATTENTION_DECODE] == pytest.approx(
        8.5e-6 + 7e-6
    )  # 1,280 tokens, and a window
    assert found[leaf.QKV] == pytest.approx(2 * 2 * 128 / 2e9)
    assert found[leaf.LM_HEAD] == pytest.approx(320 / 4e9)
    assert found[leaf.EMBED] == pytest.approx(3e-6)
    assert found[leaf.SAMPLING] == pytest.approx(15e-6)
    assert leaf.LAUNCHES not in found  # the host's part of a step has the graph's start
    # The host takes 100 us, 0.1 us for each block of 1,280 tokens at 32, and 5 us for the text: longer than
    # the kernels, beside which it works. So it is the host that counts, and kernels are in its shadow.
    assert sum(found.values()) == pytest.approx(100e-6 + 40 * 0.1e-6 + 5e-6)
    assert found[leaf.SCHEDULE] / found[leaf.DETOKENIZE] == pytest.approx(104 / 5)


def test_the_gpu_hides_the_host_where_it_takes_longer():
    slow = gpu(call_rmsnorm=(50e-6, "s"))
    found = predict(dense_model((None, 512), gpu=True), decode_rows(1, 1279), slow).classes
    assert found[leaf.RMSNORM] == pytest.approx(5 * 50e-6)
    assert found[leaf.SCHEDULE] == found[leaf.DETOKENIZE] == 0


def test_several_sequences_share_the_weights_and_add_up_their_keys():
    one, four = (
        predict(dense_model((None, None), gpu=True), decode_rows(n, 319), gpu()) for n in (1, 4)
    )
    for found, count in (
        (one, 1),
        (four, 4),
    ):  # the host takes longer: 10 blocks of each, and a text
        assert found.seconds == pytest.approx(100e-6 + count * (10 * 0.1e-6 + 5e-6))
    one, four = one.classes, four.classes
    assert four[leaf.QKV] == one[leaf.QKV]
    assert four[leaf.ATTENTION_DECODE] == pytest.approx(2 * attention_seconds(1280, gpu()))
    assert four[leaf.SAMPLING] == one[leaf.SAMPLING]


def test_a_short_prompt_is_bound_by_its_launches():
    model, on = dense_model(gpu=True), gpu()
    found = predict(model, StepRows(((20, 0),), 1), on).classes
    kernels = sum(
        s for n, s in found.items() if n not in (leaf.LAUNCHES, leaf.SCHEDULE, leaf.DETOKENIZE)
    )
    assert kernels + found[leaf.LAUNCHES] == pytest.approx(EAGER_KERNELS * 2 * 14e-6)
    long = predict(model, StepRows(((40000, 0),), 1), on).classes
    assert long[leaf.LAUNCHES] == 0


def test_experts_are_told_by_the_engine():
    found = predict(
        dense_model(gpu=True), decode_rows(1, 5), gpu(), ExpertSeconds(1e-3, 2e-3, 3e-3)
    )
    assert found.classes[leaf.EXPERTS_GPU] == 1e-3
    assert found.classes[leaf.EXPERT_FETCH] == 2e-3
    assert found.classes[leaf.EXPERTS_CPU] == 3e-3
    assert found.seconds == pytest.approx(sum(found.classes.values()))


def test_the_rate_that_is_missing_is_named():
    on = gpu()
    rates = {n: r for n, r in on.rates.items() if n != "call_rmsnorm"}
    without = replace(on, rates=rates)
    with pytest.raises(MachineError, match="call_rmsnorm"):
        predict(dense_model(gpu=True), decode_rows(1, 5), without)
