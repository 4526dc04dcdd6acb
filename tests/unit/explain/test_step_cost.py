"""Leaves of a step against sums by hand, and their seconds against divisions by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.core.config_library import bundled_model
from headrace.core.plan_spec import AttentionKind
from headrace.explain import leaf
from headrace.explain.catalogue.functions import distinct
from headrace.explain.engine_model import engine_model, engine_models
from headrace.explain.step_cost import (
    KV_BITS,
    Leaf,
    Placement,
    StepShape,
    _pairs,
    step_leaves,
)
from headrace.explain.step_time import step_time
from headrace.machine.known import known_machine

DECODE = StepShape("decode", 1, 1, 1023)


def of(leaves: Sequence[Leaf], name: str, path: str = "gpu") -> Leaf:
    (found,) = [one for one in leaves if one.id == name and one.path == path]
    return found


def test_ids_are_the_catalogues():
    spec = bundled_model("gpt-oss-120b").spec()
    place = Placement(hit_rate=0.5, fetch_share=0.5)
    ids = {one.id for one in step_leaves(spec, DECODE, place)}
    assert ids <= set(leaf.LEAVES)
    assert {leaf.EXPERTS_GPU, leaf.EXPERTS_CPU, leaf.EXPERT_FETCH, leaf.FLAG} <= ids


def test_dense_decode_reads_every_weight_once():
    spec = bundled_model("llama-3-8b").spec()
    leaves = step_leaves(spec, DECODE, Placement())
    ffn, qkv = of(leaves, leaf.DENSE_FFN), of(leaves, leaf.QKV)
    assert ffn.work.tensor_flops["bf16"] == 2 * 32 * 3 * 4096 * 14336
    assert ffn.work.hbm_nbytes == pytest.approx(2 * 32 * 3 * 4096 * 14336, rel=1e-3)
    assert qkv.calls == 32
    cache = of(leaves, leaf.ATTENTION_DECODE)
    assert cache.work.hbm_nbytes == pytest.approx(1024 * 131_072, rel=5e-3)
    # scores and values: 2 * (128 + 128) * 32 heads * 1024 keys * 32 layers
    assert cache.work.tensor_flops["bf16"] == 2 * 256 * 32 * 1024 * 32
    flops = sum(one.work.flops for one in leaves)
    assert flops == pytest.approx(2 * 7.504e9 + 2 * 256 * 32 * 1024 * 32, rel=2e-3)


def test_prefill_is_quadratic_in_attention_only():
    spec = bundled_model("llama-3-8b").spec()

    def flops(tokens: int, name: str) -> float:
        return of(
            step_leaves(spec, StepShape("prefill", 1, tokens, 0), Placement()), name
        ).work.flops

    assert flops(4096, leaf.QKV) == pytest.approx(4 * flops(1024, leaf.QKV))
    ratio = flops(4096, leaf.ATTENTION_PREFILL) / flops(1024, leaf.ATTENTION_PREFILL)
    assert ratio == pytest.approx(16, rel=2e-3)


def test_pairs_against_counting():
    full = AttentionKind("f", 1, 0, 0, 1, 1, 8, 8, cached=16)
    window = AttentionKind("w", 1, 0, 0, 1, 1, 8, 8, cached=16, window=128)
    chosen = AttentionKind("c", 1, 0, 0, 1, 1, 8, 8, cached=16, stride=4, recent=8, top_keys=64)
    for kind in (full, window, chosen):
        for context, new in ((0, 1), (0, 1000), (500, 700), (10_000, 333)):
            exact = sum(kind.attended(context + i + 1) for i in range(new))
            assert _pairs(kind, context, new) == pytest.approx(exact, rel=0.01)


def test_distinct_experts():
    assert distinct(128, 4, 1) == pytest.approx(4)
    assert distinct(128, 4, 10_000) == pytest.approx(128)
    assert distinct(8, 2, 2) == pytest.approx(8 * (1 - (6 / 8) ** 2))


def test_misses_are_shared_between_link_and_cpu():
    spec = bundled_model("gpt-oss-120b").spec()
    leaves = step_leaves(spec, DECODE, Placement(hit_rate=0.25, fetch_share=0.6, disk_share=0.5))
    token = 36 * 4 * spec.expert_nbytes
    fetch = of(leaves, leaf.EXPERT_FETCH, "fetch").work
    assert fetch.pcie_nbytes == pytest.approx(token * 0.75 * 0.6)
    assert fetch.dram_nbytes == fetch.pcie_nbytes
    cpu = of(leaves, leaf.EXPERTS_CPU, "misses").work
    assert cpu.dram_nbytes == pytest.approx(token * 0.75 * 0.4, rel=1e-2)
    assert fetch.disk_nbytes + cpu.disk_nbytes == pytest.approx(token * 0.75 * 0.5)
    hits = of(leaves, leaf.EXPERTS_GPU, "hits").work
    assert hits.hbm_nbytes == pytest.approx(token * 0.25, rel=1e-2)


def test_without_a_gpu_everything_is_in_host_memory():
    spec = bundled_model("gpt-oss-20b").spec()
    leaves = step_leaves(spec, DECODE, Placement(gpu=False))
    assert all(one.work.hbm_nbytes == 0 and one.work.pcie_nbytes == 0 for one in leaves)
    assert sum(one.work.dram_nbytes for one in leaves) > 24 * 4 * spec.expert_nbytes


def test_cache_bits():
    assert KV_BITS["bf16"] == 16
    assert KV_BITS["fp8"] == 8
    assert KV_BITS["nvfp4k-fp8v"] == (4.5 + 8) / 2  # 1/2.56 of bfloat16


def test_a_block_for_each_sequence_and_head_gets_its_part_of_the_bandwidth():
    spec, b200 = bundled_model("llama-3.1-8b").spec(), known_machine("b200")
    shape = StepShape("decode", 1, 1, 131_071)
    time = step_time(spec, shape, Placement(), b200, engine_model("sglang-fa4"))
    # 17.2 GB of cache, 8 blocks on 148 multiprocessors of 7.672 TB/s
    assert time.seconds_of(leaf.ATTENTION_DECODE) == pytest.approx(
        131_072 * 131_072 / (7.672e12 * 8 / 148), rel=0.01
    )
    eight = step_time(
        spec, StepShape("decode", 8, 1, 131_071), Placement(), b200, engine_model("sglang-fa4")
    )
    assert eight.seconds == pytest.approx(time.seconds, rel=0.01)


def test_the_slowest_path_counts():
    spec, machine = bundled_model("gpt-oss-120b").spec(), known_machine("rtx-5070-ti")
    engine = engine_model("freetoken")
    time = step_time(spec, DECODE, Placement(hit_rate=0.5, fetch_share=1.0), machine, engine)
    shown = {(one.leaf.id, one.leaf.path): one.exposed_s for one in time.leaves}
    assert shown[leaf.EXPERTS_GPU, "hits"] == 0
    moved = 36 * 4 * 0.5 * spec.expert_nbytes
    assert shown[leaf.EXPERT_FETCH, "fetch"] == pytest.approx(moved / (63.02e9 * 0.836))
    assert time.seconds == pytest.approx(sum(one.exposed_s for one in time.leaves))


def test_prefill_hides_the_shorter_of_link_and_compute():
    spec, machine = bundled_model("gpt-oss-120b").spec(), known_machine("rtx-5070-ti")
    shape = StepShape("prefill", 1, 2048, 0)
    place = Placement(hit_rate=0.0, fetch_share=1.0)
    time = step_time(spec, shape, place, machine, engine_model("freetoken"))
    pool = 36 * 128 * spec.expert_nbytes / (63.02e9 * 0.836)
    assert time.bound == "pcie"
    assert pool <= time.seconds <= 1.05 * pool


def test_engines_have_sources():
    for engine in engine_models().values():
        assert engine.sources
        assert all(len(source) > 7 for source in engine.sources.values())
        shares = [*engine.reach.values(), *engine.kernel.values()]
        assert all(0 < share <= 1 for share in shares)


def test_a_prompt_s_latent_attention_is_unfolded():
    """DeepSeek-V3: 128 heads of 128 + 64 for scores and 128 for values, not the latent's 576 and 512."""
    spec = bundled_model("deepseek-v3").spec()

    def flops(phase, new, context):
        leaves = step_leaves(spec, StepShape(phase, 1, new, context), Placement())
        name = leaf.ATTENTION_PREFILL if phase == "prefill" else leaf.ATTENTION_DECODE
        return sum(one.work.tensor_flops["bf16"] for one in leaves if one.id == name)

    pairs = 8192 * 8193 / 2
    assert flops("prefill", 8192, 0) == pytest.approx(61 * 2 * 128 * (192 + 128) * pairs, rel=1e-5)
    # behind 8,192 tokens, whose keys and values are made again: 512 x (128 + 128) a token and head
    pairs += 8192 * 8192
    again = 8192 * 512 * 256
    wanted = 61 * 2 * 128 * (320 * pairs + again)
    assert flops("prefill", 8192, 8192) == pytest.approx(wanted, rel=1e-5)
    # 16 tokens behind 8,192: making them again would cost more than the latent's width does
    pairs = 16 * 8192 + 16 * 17 / 2
    assert flops("prefill", 16, 8192) == pytest.approx(61 * 2 * 128 * (576 + 512) * pairs, rel=1e-5)
    assert flops("decode", 1, 8191) == 61 * 2 * 128 * (576 + 512) * 8192
