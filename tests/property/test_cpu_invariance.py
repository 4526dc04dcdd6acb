"""A row's bits depend on neither its neighbours, threads and chunks nor the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.numeric import FORMATS
from headrace.ops.records import Activation, ExpertWeights
from tests.fixtures.cpu_cases import PagedCase, isas, needs_native, random_f32
from tests.fixtures.cpu_oracle import ALL_FORMATS, random_packed

pytestmark = needs_native

if isas():
    from headrace.ops.cpu import control, num_threads, set_num_threads
    from headrace.ops.cpu.attention import attention
    from headrace.ops.cpu.linear import gated_linear, linear, linear_group, moe
    from headrace.ops.cpu.rows import rmsnorm, router_topk

SETTINGS = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def shapes(draw):
    name = draw(st.sampled_from(ALL_FORMATS))
    unit = {"nvfp4": 16, "f32": 1, "f16": 1, "bf16": 1, "fp8_e4m3": 1}.get(name)
    unit = unit or FORMATS[name].block_weights
    cols = unit * draw(st.integers(1, max(1, 600 // unit)))
    return name, draw(st.integers(1, 70)), cols


@SETTINGS
@given(shapes(), st.integers(1, 64), seeds)
def test_linear_rows(shape, tokens, seed):
    rng = np.random.default_rng(seed)
    name, rows, cols = shape
    w, x = random_packed(name, rows, cols, rng), random_f32(rng, tokens, cols)
    other, residual = random_packed("f32", 5, cols, rng), random_f32(rng, tokens, rows)
    whole = linear(x, w)
    added = linear(x, w, None, residual)
    pair = linear_group(x, (other, w), (None, None))[1]
    gated = gated_linear(x, w, w, Activation())
    assert torch.equal(pair, whole)
    for i in {0, tokens // 2, tokens - 1}:
        row = x[i : i + 1]
        assert torch.equal(linear(row, w)[0], whole[i])
        assert torch.equal(linear(row, w, None, residual[i : i + 1])[0], added[i])
        assert torch.equal(gated_linear(row, w, w, Activation())[0], gated[i])


@SETTINGS
@given(st.sampled_from(ALL_FORMATS), st.integers(1, 64), seeds)
def test_instruction_sets_and_threads_agree(name, tokens, seed):
    rng = np.random.default_rng(seed)
    w, x = random_packed(name, 40, 512, rng), random_f32(rng, tokens, 512)
    before = num_threads()
    results = []
    try:
        for isa in isas():
            control.select_isa(isa)
            for threads in (1, 3):
                set_num_threads(threads)
                results.append(gated_linear(x, w, w, Activation("swiglu_clamped")))
    finally:
        control.select_isa("")
        set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


@SETTINGS
@given(st.integers(1, 64), st.integers(1, 4), seeds)
def test_moe_rows(tokens, k, seed):
    rng = np.random.default_rng(seed)
    experts = ExpertWeights(
        [random_packed("mxfp4", 48, 64, rng) for _ in range(5)],
        [random_packed("q4_0", 48, 64, rng) for _ in range(5)],
        [random_packed("f16", 64, 48, rng) for _ in range(5)],
        down_bias=random_f32(rng, 5, 64),
    )
    x, weights = random_f32(rng, tokens, 64), random_f32(rng, tokens, k)
    ids = torch.from_numpy(rng.integers(-1, 5, (tokens, k)).astype(np.int32))
    whole = moe(x, ids, weights, experts, Activation())
    for i in {0, tokens // 2, tokens - 1}:
        row = slice(i, i + 1)
        assert torch.equal(moe(x[row], ids[row], weights[row], experts, Activation())[0], whole[i])


@SETTINGS
@given(st.integers(1, 64), st.integers(1, 80), seeds)
def test_row_operations(tokens, size, seed):
    rng = np.random.default_rng(seed)
    x, weight = random_f32(rng, tokens, size), random_f32(rng, size)
    norm = rmsnorm(x, weight, 1e-6)
    k = min(4, size)
    ids, weights = router_topk(x, k, "softmax_topk", True)
    for i in {0, tokens - 1}:
        assert torch.equal(rmsnorm(x[i : i + 1], weight, 1e-6)[0], norm[i])
        one = router_topk(x[i : i + 1], k, "softmax_topk", True)
        assert torch.equal(one[0][0], ids[i])
        assert torch.equal(one[1][0], weights[i])


@SETTINGS
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=3),
    st.sampled_from([16, 32, 128]),
    st.sampled_from([(1, 1, 16), (6, 2, 40), (4, 1, 64)]),
    st.sampled_from([None, 7, 200]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    seeds,
)
def test_attention_rows(contexts, block, heads, window, dtype, seed):
    """One prefill, two chunks, and single rows (as in decoding) give the same bits."""
    rng = np.random.default_rng(seed)
    count, kv_heads, head = heads
    case = PagedCase(rng, contexts, kv_heads, head, block, dtype)
    starts = [int(rng.integers(0, c)) for c in contexts]
    spans = [(s, a, c) for s, (a, c) in enumerate(zip(starts, contexts, strict=True))]
    batch = case.batch(spans)
    q, sinks = random_f32(rng, batch.positions.numel(), count, head), random_f32(rng, count)
    whole = attention(q, case.cache, batch, 0.3, window, sinks)
    at = 0
    for s, start, end in spans:
        rows = slice(at, at + end - start)
        at = rows.stop
        middle = (start + end) // 2
        pieces = [(a, b) for a, b in ((start, middle), (middle, end)) if b > a]
        pieces += [(p, p + 1) for p in {start, middle, end - 1}]
        for a, b in pieces:
            some = slice(rows.start + a - start, rows.start + b - start)
            alone = attention(q[some], case.cache, case.batch([(s, a, b)]), 0.3, window, sinks)
            assert torch.equal(alone, whole[some])


@pytest.mark.parametrize("isa", isas())
def test_environment_forces_an_instruction_set(isa: str):
    code = (
        "from headrace.ops.cpu import available\n"
        "from headrace.ops.cpu.control import isa\n"
        "assert available() is None\n"
        "print(isa())"
    )
    env = {**os.environ, "HEADRACE_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == isa


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_workers_of_its_own():
    rng = np.random.default_rng(0)
    w, x = random_packed("q8_0", 512, 512, rng), random_f32(rng, 8, 512)
    before = num_threads()
    try:
        set_num_threads(2)
        expected = linear(x, w)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(linear(x, w), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(linear(x, w), expected)
    finally:
        set_num_threads(before)
