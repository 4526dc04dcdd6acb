"""Work of a step by class, against sums by hand."""

import pytest

from headrace.core.model_spec import LayerSpec, ModelSpec, MoeSpec
from headrace.explain import leaf
from headrace.explain.running_cost import (
    RunningModel,
    StepRows,
    Stored,
    decode_rows,
    running_cost,
)
from tests.fixtures.running_models import dense_model


def test_matrices_are_read_once_and_multiplied_with_every_row():
    model = dense_model()
    one, four = running_cost(model, decode_rows(1, 5)), running_cost(model, decode_rows(4, 5))
    qkv = 2 * (64 + 32 + 32)
    assert one[leaf.QKV].work.cpu_flops == {"f32": 2 * qkv}
    assert four[leaf.QKV].work.cpu_flops == {"f32": 8 * qkv}
    assert one[leaf.QKV].work.dram_nbytes == four[leaf.QKV].work.dram_nbytes == 2 * qkv
    assert one[leaf.DENSE_FFN].work.dram_nbytes == 2 * 2 * 3 * 128
    assert (one[leaf.QKV].calls, one[leaf.DENSE_FFN].calls, one[leaf.LM_HEAD].calls) == (2, 4, 1)
    assert one[leaf.LM_HEAD].work.dram_nbytes == 320
    assert one[leaf.EMBED].work.dram_nbytes == 32  # one row of eight float32


def test_attention_reads_what_it_keeps_and_meets_what_it_may():
    decode = running_cost(dense_model(), decode_rows(1, 5))[leaf.ATTENTION_DECODE].work
    # 6 keys and values of 4 float32 in each of 2 layers
    assert decode.dram_nbytes == 2 * 2 * 6 * 4 * 4
    # 6 pairs, 2 heads: two products of 4 multiply-adds and an exponential each
    assert decode.flops == 2 * 6 * 2 * (2 * 4 * 2 + 1)
    prefill = running_cost(dense_model(), StepRows(((3, 2),), 1))[leaf.ATTENTION_PREFILL].work
    assert prefill.flops == 2 * (3 + 4 + 5) * 2 * 17


def test_a_window_bounds_both():
    work = running_cost(dense_model((3, None)), decode_rows(1, 9))[leaf.ATTENTION_DECODE].work
    assert work.dram_nbytes == (3 + 10) * 2 * 4 * 4
    assert work.flops == (3 + 10) * 2 * 17


def test_no_sampled_row_reads_no_head():
    work = running_cost(dense_model(), StepRows(((4, 0),), 0))
    assert work[leaf.LM_HEAD].calls == 0
    assert work[leaf.LM_HEAD].work.nbytes == 0


def test_a_gpu_moves_activations_too_and_multiplies_on_matrix_units():
    work = running_cost(dense_model(gpu=True), decode_rows(1, 5))[leaf.QKV].work
    assert work.tensor_flops == {"bf16": 2 * 256}
    # rows of 8 in, 8 + 2 x 4 out, float32, in two layers
    assert work.hbm_nbytes == 2 * 256 + 2 * (8 + 12) * 4


def test_a_mixture_reads_the_experts_that_its_tokens_touch():
    dense = dense_model((None,))
    moe = MoeSpec(8, 2, 16, "topk_softmax", normalize=False)
    spec = ModelSpec(**{**vars(dense.spec), "layers": (LayerSpec(None, moe=True),), "moe": moe})
    matrices = {k: v for k, v in dense.matrices.items() if k not in ("gate", "up", "down")}
    matrices |= {"router": Stored(1, 64, 256, "f32"), "expert": Stored(24, 3072, 1632, "mxfp4")}
    model = RunningModel(spec, matrices, 4, "f32")
    one = running_cost(model, decode_rows(1, 0))
    assert one[leaf.EXPERTS_GPU].work.dram_nbytes == pytest.approx(1632 / 4)
    assert one[leaf.EXPERTS_GPU].work.flops == 2 * 2 * 3 * 8 * 16
    two = running_cost(model, decode_rows(2, 0))
    assert two[leaf.EXPERTS_GPU].work.dram_nbytes == pytest.approx(1632 * 3.5 / 8)
    assert leaf.DENSE_FFN not in one
    assert one[leaf.ROUTER].work.dram_nbytes == 256


def test_weights_of_a_tied_model_are_counted_once():
    assert dense_model().weights_nbytes == 2 * 2 * 576 + 320
