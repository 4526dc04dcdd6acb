"""Plans: what fits where, and what is said where it does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from headrace.core.config_library import bundled_model
from headrace.core.errors import ConfigError
from headrace.engine import resolve
from headrace.engine.plan import fetch_share, make_plan, with_rate
from headrace.engine.plan_changes import alternatives, changes, faster_ways
from headrace.engine.plan_hits import expected_hit_rate
from headrace.engine.plan_memory import (
    CHUNK_TOKENS,
    CPU_CHUNK_TOKENS,
    VRAM_RESERVE_NBYTES,
    Workload,
    workspace_nbytes,
)
from headrace.engine.plan_search import refined
from headrace.engine.resolve_gpu import DEFAULT_MAX_BATCH_TOKENS
from headrace.explain.engine_model import engine_model
from headrace.explain.leaf import EXPERTS_CPU
from headrace.machine.known import known_machine

WORK = Workload(4096, prompt=1024)


def plan(model: str, machine: str, work: Workload = WORK):
    return make_plan(bundled_model(model).spec(), known_machine(machine), work)


@pytest.mark.parametrize(
    ("model", "machine", "mode"),
    [
        ("gpt-oss-20b", "rtx-5070-ti", "vram"),  # published: 16 GB are enough
        ("gpt-oss-120b", "h100", "vram"),  # published: one GPU of 80 GB
        ("gpt-oss-120b", "rtx-5070-ti", "ram"),  # published: 16 GB and 128 GB of memory
        ("deepseek-v4-flash", "rtx-5090+ram=128GiB", "disk"),  # published: 167 GB do not fit in 128
        ("llama-3.1-70b", "rtx-3090", "none"),
        ("llama-3-8b", "ddr5-6000-dual", "cpu"),
        ("gpt-oss-120b", "apple-m4-max", "vram"),
    ],
)
def test_where_models_go(model, machine, mode):
    assert plan(model, machine).layout.mode == mode


def test_every_byte_is_somewhere():
    found = plan("gpt-oss-120b", "rtx-5070-ti")
    spec, layout = found.spec, found.layout
    vram = layout.used["vram"]
    fixed = spec.dense_nbytes - spec.nbytes()["embedding"] + spec.kv_nbytes(4096, 16)
    fixed += VRAM_RESERVE_NBYTES + workspace_nbytes(spec, WORK)
    slots = (16 * 2**30 - fixed) // spec.expert_nbytes
    assert layout.slots == slots
    assert sum(vram.values()) == fixed + slots * spec.expert_nbytes
    assert 0 <= layout.free("vram") < spec.expert_nbytes
    assert layout.used["ram"]["experts"] == 36 * 128 * spec.expert_nbytes


def test_short_of_what_by_hand():
    found = plan("llama-3.1-70b", "rtx-3090+ddr4-3200-dual+ram=64GiB")
    assert found.speed is None
    assert not found.fits
    spec = found.spec
    needed = spec.weights_nbytes + spec.kv_nbytes(4096, 16) + workspace_nbytes(spec, WORK)
    assert found.layout.short == {"ram": needed + 512 * 2**20 - (64 * 2**30 - 3 * 10**9)}
    said = alternatives(found)
    assert any("q4_k" in text for text in said)
    assert any("largest bundled model that fits" in text for text in said)


def test_the_largest_model_that_fits_may_have_more_weights_in_fewer_bytes():
    """141 GB of bfloat16 do not fit 103 GB of host memory, 65 GB of MXFP4 with more weights do."""
    said = alternatives(plan("llama-3.1-70b", "rtx-4090+ddr5-6000-dual"))
    assert any("largest bundled model that fits is gpt-oss-120b (" in text for text in said)


def test_b016_a_mixture_too_large_for_the_host_is_refused_from_its_configuration():
    """gpt-oss-120b on a host of 32 GiB, each byte counted by hand from the published shapes."""
    found = plan("gpt-oss-120b", "ddr5-6000-dual+ram=32GiB")
    # Three matrices of 2,880 x 2,880 in MXFP4 (4 bits, and 8 for each 32 of them), their biases in bfloat16.
    experts = 36 * 128 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2)
    # 64 heads of 64 on 8 key heads; biases and sinks of attention and router, 0.6 MB, are not counted.
    attention = 36 * 2 * (2 * 2880 * 4096 + 2 * 2880 * 512)
    table = 201_088 * 2880 * 2
    router, norms = 36 * 2 * 128 * 2880, 73 * 2880 * 2
    assert found.layout.used["ram"]["experts"] == experts == 60_993_699_840
    # Every other layer sees 128 tokens, the others all 4,096: keys and values of 8 heads of 64.
    kv = 18 * (4096 + 128) * 2 * 8 * 64 * 2
    needed = experts + attention + 2 * table + router + norms + kv
    needed += workspace_nbytes(found.spec, WORK) + 512 * 2**20
    assert found.layout.mode == "none"
    assert found.layout.short == {"ram": needed - (32 * 2**30 - 3 * 10**9)}
    assert found.speed is None


def test_the_cpu_keeps_its_own_format_beside_a_gpu_that_is_too_small():
    """141 GB of weights in bfloat16 and a GPU of 24 GiB: 4,096 tokens of 80 layers, 8 heads of 128."""
    elements = 4096 * 80 * 2 * 8 * 128
    work = replace(WORK, kv_on_cpu="f32")
    beside = plan("llama-3.1-70b", "rtx-3090+ddr5-6000-dual+ram=192GiB", work)
    assert beside.layout.mode == "cpu"
    assert beside.layout.kv_format == "f32"
    assert beside.layout.used["ram"]["KV cache"] == 4 * elements
    alone = plan("llama-3.1-70b", "ddr5-6000-dual+ram=192GiB", work)
    assert alone.layout == replace(beside.layout, capacity=alone.layout.capacity)
    assert alone.speed.tokens_s == beside.speed.tokens_s
    # a GPU that holds it keeps what tensor cores multiply
    larger = plan("llama-3.1-70b", "b200", work)
    assert (larger.layout.mode, larger.layout.kv_format) == ("vram", "bf16")
    assert larger.layout.used["vram"]["KV cache"] == 2 * elements
    # half of the bytes is what a change to bfloat16 saves, and what a step does not read
    smaller = next(c for c in changes(beside) if c.name == "KV cache in bf16")
    assert smaller.plan.layout.used["ram"]["KV cache"] == 2 * elements
    assert smaller.factor > 1
    # who asks for a format gets it on both
    asked = plan("llama-3.1-70b", "rtx-3090+ddr5-6000-dual+ram=192GiB", WORK)
    assert asked.layout.used["ram"]["KV cache"] == 2 * elements


def test_what_is_short_counts_in_the_format_of_the_memory_that_lacks_it():
    work = replace(WORK, kv_on_cpu="f32")
    found = plan("llama-3.1-70b", "rtx-3090+ddr4-3200-dual+ram=64GiB", work)
    spec = found.spec
    needed = spec.weights_nbytes + spec.kv_nbytes(4096, 32) + workspace_nbytes(spec, work)
    assert found.layout.short == {"ram": needed + 512 * 2**20 - (64 * 2**30 - 3 * 10**9)}


def test_a_mixture_can_lack_both_memories():
    found = plan("glm-5.2", "rtx-4090")
    assert set(found.layout.short) == {"vram", "ram"}
    assert found.layout.short_nbytes > 300e9


def test_shorter_context_is_offered():
    found = plan("llama-3.1-8b", "rtx-3090+ram=8GiB", Workload(131072, 4))
    assert found.layout.mode == "none"
    assert any("--context" in text for text in alternatives(found))


def test_hit_rate_is_the_published_one():
    # A blog post on one RTX 5070 Ti: 31.5% under LRU with 15.2% of gpt-oss-120b resident; another on
    # an RTX 5090: 61% with 11% of DeepSeek-V4-Flash, which routes more evenly than nobody.
    assert expected_hit_rate(128, 4, 0.152, "lru").expected == pytest.approx(0.315, abs=0.005)
    assert expected_hit_rate(256, 6, 0.11, "lru").high == pytest.approx(0.61, abs=0.03)
    assert expected_hit_rate(128, 4, 0).expected == 0
    assert expected_hit_rate(128, 4, 1).expected == 1
    rate = expected_hit_rate(128, 4, 0.3)
    assert rate.low == pytest.approx(0.3, abs=0.02)  # uniform routing hits what is resident
    assert rate.low < rate.expected < rate.high


def test_the_value_policy_serves_more_than_lru():
    lru, value = (expected_hit_rate(128, 4, 0.152, p).expected for p in ("lru", "value"))
    assert value > lru


def test_one_memory_holds_an_expert_once():
    found = plan("qwen3-30b-a3b", "apple-m4-pro")
    spec = bundled_model("qwen3-30b-a3b").spec()
    used = found.layout.used
    stored = used["vram"]["expert slots"] + used["ram"]["experts"] + used["disk"]["experts"]
    assert stored == spec.moe_layers * spec.num_experts * spec.expert_nbytes


def test_split_is_the_papers():
    # B_P = 10, memory channels 40: the CPU has 30 left, q*/m = 10/40
    machine = known_machine("rtx-4090")
    machine = with_rate(machine, "pcie_h2d", 10 / machine.rates["pcie_h2d"].value / 0.836)
    machine = with_rate(machine, "dram_read", 40 / machine.rates["dram_read"].value / 0.75)
    assert fetch_share(machine, engine_model("freetoken")) == pytest.approx(0.25)


def test_changes_are_sorted_and_named():
    found = changes(plan("gpt-oss-120b", "rtx-5070-ti"))
    names = [change.name for change in found]
    for name in ("+8 GB of VRAM", "link twice as fast", "twice the memory channels"):
        assert name in names
    assert any("KV cache" in name for name in names)
    assert any("half the context" in name for name in names)
    factors = [change.factor for change in found]
    assert factors == sorted(factors, reverse=True)
    assert min(factors) >= 1


def test_disk_is_slower_than_memory():
    small = plan("gpt-oss-120b", "rtx-5070-ti+ram=16GiB")
    large = plan("gpt-oss-120b", "rtx-5070-ti+ram=128GiB")
    assert small.layout.mode == "disk"
    assert small.layout.short["ram"] > 0
    assert small.speed.tokens_s.expected < large.speed.tokens_s.expected
    assert small.speed.decode.bound == "disk"


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Workload(10**9), "trained for at most"),
        (Workload(4096, 0), "concurrency"),
        (Workload(4096, prompt=8192), "prompt"),
        (Workload(4096, kv_format="int3"), "kv-format"),
    ],
)
def test_impossible_workloads_are_refused(work, message):
    with pytest.raises(ConfigError, match=message):
        plan("gpt-oss-20b", "h200", work)


def test_concurrency_shares_weights():
    one, eight = (
        plan("llama-3-8b", "h200"),
        plan("llama-3-8b", "h200", replace(WORK, concurrency=8)),
    )
    assert eight.speed.tokens_s.expected > 6 * one.speed.tokens_s.expected
    assert eight.layout.used["vram"]["KV cache"] == 8 * one.layout.used["vram"]["KV cache"]


def test_sequences_that_vram_does_not_hold_wait():
    work = Workload(2048, 40, "bf16", 1024)
    found = plan("opt-13b", "a100", work)
    spec, layout = found.spec, found.layout
    # 80 GiB less weights, reserve and what a step needs; 40 layers x 2 x 5,120 x 2 bytes a token
    one = 2048 * 819_200
    fixed = spec.weights_nbytes + VRAM_RESERVE_NBYTES
    fixed += workspace_nbytes(spec, replace(work, concurrency=found.at_once))
    assert found.at_once == (80 * 2**30 - fixed) // one
    assert 20 < found.at_once < 40
    assert layout.mode == "vram"
    assert layout.used["vram"]["KV cache"] == found.at_once * one
    # 400 sequences' cache is more than VRAM and host memory have together: the same run, more wait
    many = plan("opt-13b", "a100", replace(work, concurrency=400))
    assert 400 * one > 80 * 2**30 + many.machine.host.memory_nbytes
    assert (many.at_once, many.layout, many.speed) == (found.at_once, layout, found.speed)
    half = plan("opt-13b", "a100", replace(work, concurrency=20))
    assert half.at_once == 20
    assert half.speed.tokens_s.expected < found.speed.tokens_s.expected


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("gpt-oss-20b", "rtx-4090"),  # from VRAM to experts in host memory
        ("gpt-oss-20b", "rtx-5070-ti"),
        ("qwen3-30b-a3b", "a100"),  # from there to the CPU
        ("llama-3-8b", "rtx-3090"),  # from VRAM to the CPU
        ("minimax-m2", "b200+ram=512GiB"),
        ("kimi-k2", "b200"),  # with a part on the disk
    ],
)
def test_more_sequences_never_make_fewer_tokens(model, machine):
    context = min(32768, bundled_model(model).spec().max_context)
    speeds = [plan(model, machine, Workload(context, n)).speed for n in (1, 2, 5, 8, 16, 31)]
    tokens = [speed.tokens_s.expected for speed in speeds]
    # but for counts that are tried for one of the loads only
    assert all(more > 0.999 * fewer for fewer, more in itertools.pairwise(tokens))


def test_the_count_at_a_time_is_looked_for_between_round_ones():
    """With the value -(n - 13)^2 none of 1, 2, 4, 8, 16, 24 is the best, and halving finds 13."""
    assert 13 in refined([1, 2, 4, 8, 16, 24], lambda n: -((n - 13) ** 2))
    assert refined([5], lambda n: n) == [5]
    assert refined([1, 2], lambda n: -n) == [1, 2]


def test_a_faster_part_never_makes_more_sequences_slower():
    """Chunks of prompts take slots away, and the count at a time is chosen with that in mind."""
    box = "trainium2+pcie3x16+ddr5-6400-dual+ram=192GiB"
    found = plan("gpt-oss-120b", box, Workload(131072, 1000, "nvfp4k-fp8v", 131072))
    factors = {one.name: one.factor for one in changes(found)}
    assert factors["twice the memory channels"] >= 1
    assert factors["link twice as fast"] >= 1


def test_what_would_bring_it_into_vram_is_said():
    said = faster_ways(plan("llama-3.1-70b", "h100"))
    # 70.55 billion weights: 141 GB in 16 bits, half of it in 8, beside caches in 80 GB
    assert len(said) == 1
    assert said[0].startswith("stored as fp8_e4m3 (71 GB) all of it lies in VRAM")
    assert faster_ways(plan("gpt-oss-120b", "h100")) == []


def test_one_memory_has_no_link():
    names = [change.name for change in changes(plan("gpt-oss-120b", "apple-m4-max"))]
    assert "+8 GB of memory" in names
    assert "memory twice as fast" in names
    assert not any("link" in name or "VRAM" in name for name in names)


def test_a_chunk_is_the_engines():
    assert CHUNK_TOKENS == DEFAULT_MAX_BATCH_TOKENS
    assert plan("llama-3-8b", "rtx-4090").layout.chunk == CHUNK_TOKENS
    assert CPU_CHUNK_TOKENS == resolve.DEFAULT_MAX_BATCH_TOKENS
    found = plan("llama-3-8b", "ddr5-6000-dual", Workload(4096, prompt=2048))
    assert found.layout.chunk == CPU_CHUNK_TOKENS
    # float32: four rows of 4,096, gate, up and their product of 14,336; then logits, twice
    workspace = 4 * 512 * (4 * 4096 + 3 * 14336) + 2 * 4 * 128256
    assert found.layout.used["ram"]["workspace"] == workspace
    one, long = (plan("gpt-oss-120b", "rtx-4090", Workload(32768, prompt=n)) for n in (2048, 8192))
    assert long.layout.chunk == 16_384 + 2048
    # What is not resident crosses a PCIe 4.0 x16, of which the engine gets 0.88, once in both: 2,048 tokens
    # take no less than 8,192.
    stream = 36 * 128 * (1 - long.layout.resident) * long.spec.expert_nbytes / (0.88 * 31.5e9)
    for found in (one, long):
        assert found.speed.ttft_s.expected == pytest.approx(stream, rel=0.1)
    # A 5070 Ti behind a PCIe 5.0 computes 8,192 tokens no faster in one chunk than in two.
    assert plan("gpt-oss-120b", "rtx-5070-ti", Workload(32768)).layout.chunk == 4096 + 512


def test_a_prompt_of_two_chunks_has_equal_ones():
    """10,000 tokens in chunks of up to 4,608: 3,334, 3,334 and 3,332."""
    work = Workload(32768, prompt=10_000)
    found = plan("gpt-oss-120b", "rtx-5070-ti", work)
    third = plan("gpt-oss-120b", "rtx-5070-ti", replace(work, prompt=3334))
    assert found.speed.ttft_s.expected == pytest.approx(3 * third.speed.ttft_s.expected, rel=0.05)


def test_a_short_prompt_takes_both_paths():
    box = "rtx-4090+pcie4x4+ddr5-4800-12ch"
    found = plan("gpt-oss-120b", box, Workload(8192, prompt=1))
    spec = found.spec
    ids = {one.leaf.id for one in found.speed.prefill.leaves if one.exposed_s > 0}
    # 4 of 128 experts in 36 layers, less what is resident, come over PCIe 4.0 x4 in this time
    missing = 36 * 4 * (1 - found.layout.resident) * spec.expert_nbytes
    assert found.speed.ttft_s.expected < 0.5 * missing / 7.88e9
    assert EXPERTS_CPU in ids
    # and no sooner than a decoding step, which finds more of its experts in VRAM
    assert found.speed.ttft_s.expected > found.speed.decode.seconds


def test_a_long_prompt_takes_both_paths_where_the_link_is_slow():
    box = "rtx-4090+pcie4x4+ddr5-4800-12ch"
    slow = plan("gpt-oss-120b", box, Workload(8192, prompt=2048))
    # streaming: what is not resident over PCIe 4.0 x4, of which the engine gets 0.88
    missing = 36 * 128 * (1 - slow.layout.resident) * slow.spec.expert_nbytes
    assert 0.5 < slow.speed.ttft_s.expected / (missing / (0.88 * 7.88e9)) < 0.95
    assert EXPERTS_CPU in {one.leaf.id for one in slow.speed.prefill.leaves}
    # sixteen pieces of 128 tokens, each of which costs as much as a prompt of 128
    piece = plan("gpt-oss-120b", box, Workload(8192, prompt=128)).speed.ttft_s.expected
    assert slow.speed.ttft_s.expected == pytest.approx(16 * piece, rel=0.05)
    fast = plan("gpt-oss-120b", "rtx-5070-ti", Workload(8192, prompt=2048))
    assert EXPERTS_CPU not in {one.leaf.id for one in fast.speed.prefill.leaves}


def test_a_plan_on_the_disk_says_what_would_help():
    found = plan("deepseek-v3", "rtx-4090", Workload(8192))
    waits = found.speed.decode.by_resource()
    assert sum(waits.values()) == pytest.approx(found.speed.decode.seconds)
    gains = {change.name: change.factor for change in changes(found)}
    # a wait that is halved: 1 / (1 - d / 2) where d is the disk's share, less what the other path allows
    share = waits["disk"] / found.speed.decode.seconds
    assert 0.5 < share < 0.95
    assert 0.9 / (1 - share / 2) < gains["disk twice as fast"] <= 1 / (1 - share / 2)
    assert gains["+32 GB of host memory"] > 1


def test_a_table_shows_the_memory_that_is_short():
    layout = plan("llama-3.1-70b", "rtx-3090").layout
    assert layout.total("ram") - layout.capacity["ram"] == layout.short["ram"]


def test_what_a_tiny_machine_lacks_counts_the_system_s_part():
    """1 GiB is less than the 3 GB that a system keeps: what is missing is the model and the rest of those."""
    found = plan("llama-3-8b", "ddr4-3200-dual+ram=1GiB")
    wanted = found.layout.total("ram")
    assert found.layout.short_nbytes == wanted + 3 * 10**9 - 2**30
    more = found.machine.host.memory_nbytes + found.layout.short_nbytes
    host = replace(found.machine.host, memory_nbytes=more)
    assert make_plan(found.spec, replace(found.machine, host=host), found.workload).fits
    # what has to lie in host memory does not: no disk helps
    small = plan("gpt-oss-20b", "rtx-4060-laptop+ram=2GiB")
    assert small.layout.mode == "none"
    assert any("more host memory would hold it" in said for said in alternatives(small))
