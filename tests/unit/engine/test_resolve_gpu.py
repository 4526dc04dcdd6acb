"""Choices and the memory plan of a GPU, on machines that are written down here."""

from dataclasses import replace

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.model_sizes import ModelSizes
from headrace.core.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.engine.expert_rates import StartingRates
from headrace.engine.kv_choice import KVSupport
from headrace.engine.resolve import GpuSupport, resolve
from headrace.engine.vram_plan import (
    CONTEXT_NBYTES,
    VramPlan,
    Workspace,
    dense_nbytes,
    gpu_workspace_nbytes,
    long_chunk_nbytes,
    streamed_nbytes,
)
from headrace.experts.slab import slab_layout
from headrace.machine.cgroup import Cgroup
from headrace.machine.probe import CpuInfo, GpuInfo, LogicalCpu, Machine, MemoryInfo
from headrace.machine.profile import Rate

GB, GIB = 10**9, 2**30
READY = GpuSupport(None, frozenset({"mxfp4", "bf16"}))


def smollm2(**changes):
    values = {
        "family": "llama", "hidden": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64,
        "vocab": 49152, "intermediate": 1536, "norm_eps": 1e-5,
        "rope": RopeSpec(theta=100000.0, dim=64), "max_context": 8192, "tie_embeddings": True,
        "layers": (LayerSpec(None, False),) * 30,
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})


def gpt_oss(layers=36):
    """The 120b geometry: 128 experts of 13 MB in every layer."""
    return smollm2(
        family="gpt_oss", hidden=2880, num_heads=64, num_kv_heads=8, vocab=201088, intermediate=0,
        max_context=131072, tie_embeddings=False, layers=(LayerSpec(None, True),) * layers,
        moe=MoeSpec(128, 4, 2880, "topk_softmax", True, expert_bias=True, router_bias=True),
    )  # fmt: skip


def machine(gpu_nbytes=80 * GIB, free=None, ram=128 * GB):
    cpus = tuple(LogicalCpu(i, i, 0, True) for i in range(16))
    return Machine(
        system="Linux",
        wsl=False,
        cpu=CpuInfo("made up", "x86_64", ("avx2",), cpus, tuple(range(16))),
        memory=MemoryInfo(ram, ram),
        cgroup=Cgroup(),
        python="3.12",
        gpus=(GpuInfo(0, "H200", gpu_nbytes, free or gpu_nbytes, "1"),),
    )


def sizes(of, formats=("mxfp4",), dense=("bf16",)):
    moe = of.moe
    experts = 0 if moe is None else len(of.layers) * 128 * 13 * 10**6
    return ModelSizes(
        experts + GB, experts, frozenset(formats) if moe else frozenset(), frozenset(dense)
    )


def choose(of=None, on=None, support=READY, stored=None, **values):
    of = of or smollm2()
    return resolve(
        EngineConfig("m", **values), of, on or machine(), GB,
        sizes=stored or sizes(of), gpu=support,
    )  # fmt: skip


def test_a_dense_model_on_a_large_gpu():
    made = choose()
    assert (made.device, made.backend, made.experts) == ("cuda", "triton", "gpu")
    assert (made.dense_format, made.kv_format) == ("bf16", "bf16")
    assert made.context == 8192
    assert made.num_blocks == 16 * 8192 // 32  # the whole context for every sequence
    plan = made.vram
    assert plan is not None
    # 134,515,008 weights of two bytes (norms count four), as the model's card says
    assert plan.weights_nbytes == pytest.approx(2 * 134_515_008, rel=0.001)
    per_token = 2 * 30 * 3 * 64 * 2
    assert plan.kv_nbytes == (16 * 8192 + 32) * per_token == made.kv_nbytes
    assert plan.experts_nbytes == 0
    assert 0 < plan.total_nbytes <= plan.budget_nbytes == 80 * GIB - 80 * GIB // 20
    names = [c.name for c in made.choices]
    assert len(names) == len(set(names))
    assert all(c.reason for c in made.choices)
    assert {"device", "dense_format", "kv_format", "vram_budget", "vram", "experts"} <= set(names)
    values = {c.name: c.value for c in made.choices}
    assert values["vram_budget"] == "81,604 MB"  # 80 GiB less a twentieth
    assert values["vram"].endswith(" MB")
    assert made.plan.kv_nbytes == 0


def test_auto_takes_a_sealed_cache_on_a_gpu_as_its_accuracy_says():
    """SmolLM2 is a llama: 4-bit keys hold there with calibrated directions, and miss by a hair without."""
    of = smollm2()

    def made(kv_format, **support):
        kv = KVSupport(frozenset({"triton", "cpu"}), **support)
        config = EngineConfig("m", kv_format=kv_format)
        return resolve(config, of, machine(), GB, sizes=sizes(of), gpu=READY, kv=kv)

    auto = made("auto", directions="directions")
    assert (auto.kv_format, auto.kv_rank) == ("nvfp4k-fp8v", 4)
    assert (made("auto").kv_format, made("auto").kv_rank) == ("fp8", 0)
    assert made(None).kv_format == "bf16"
    assert made("fp8").warnings == made("bf16").warnings
    # A block more than sequences get, for padding, whose open page is a shared one.
    pool = auto.kv_pool
    assert pool.num_blocks == auto.num_blocks + 1
    assert pool.num_shared == 2048 // auto.block_tokens
    # 128 pages of 64 tokens, 3 key heads, 8 columns of 4 bytes; 16 rows in eager steps, 16 in graphs
    assert auto.vram is not None
    plain = made("fp8").vram
    assert plain is not None
    assert auto.vram.workspace_nbytes - plain.workspace_nbytes == 128 * 3 * 8 * 4 * (16 + 16)


def test_a_sealed_cache_without_kernels_is_refused():
    of = smollm2()
    config = EngineConfig("m", kv_format="fp8")
    with pytest.raises(ConfigError, match="triton back-end has no kernel") as caught:
        resolve(config, of, machine(), GB, sizes=sizes(of), gpu=READY, kv=KVSupport())
    assert "f32, bf16" in (caught.value.hint or "")


def test_a_gpu_whose_programs_have_too_little_shared_memory():
    """Heads of 256 in blocks of 64 take 126,980 bytes; an RTX 4090's programs have 101,376."""
    of = replace(smollm2(), head_dim=256)

    def made(shared, **values):
        kv = KVSupport(frozenset({"triton"}), None, shared)
        return resolve(
            EngineConfig("m", **values), of, machine(), GB, sizes=sizes(of), gpu=READY, kv=kv
        )

    with pytest.raises(ConfigError, match=r"126980 bytes of shared memory.*101376"):
        made(101_376, kv_format="fp8")
    assert made(101_376, kv_format="auto").kv_format == "bf16"
    assert made(101_376, kv_format="fp8", block_tokens=32).kv_format == "fp8"
    assert made(232_448, kv_format="fp8", block_tokens=128).kv_format == "fp8"
    with pytest.raises(ConfigError, match="186372 bytes"):
        made(166_912, kv_format="fp8", block_tokens=128)
    of = replace(smollm2(), head_dim=16)
    with pytest.raises(ConfigError, match="heads of 16 are not supported on a GPU"):
        made(232_448, kv_format="fp8")


def test_the_cpu_serves_where_no_gpu_can():
    for support, reason in (
        (GpuSupport("triton is not installed"), "triton is not installed"),
        (None, "not looked"),
    ):
        made = choose(support=support)
        assert (made.device, made.vram) == ("cpu", None)
        assert reason in next(c.reason for c in made.choices if c.name == "device")
        assert any(reason in w for w in made.warnings)
    assert choose(device="cpu").warnings == ()
    assert choose(backend="reference").device == "cpu"
    assert choose(device="cuda", backend="reference").backend == "reference"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"device": "cuda"}, "--device"),
        ({"experts": "hybrid"}, "--experts"),
        ({"vram_budget_nbytes": GB}, "--vram-budget"),
        ({"dense_format": "f16"}, "--dense-format"),
        ({"backend": "triton"}, "--backend"),
    ],
)
def test_what_needs_a_gpu_says_what_is_missing(values, param):
    with pytest.raises(ConfigError, match="triton is not installed") as caught:
        choose(support=GpuSupport("triton is not installed"), **values)
    assert caught.value.param == param
    assert caught.value.hint


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"device": "gpu"}, "--device"),
        ({"dense_format": "fp8"}, "--dense-format"),
        ({"dense_format": "packed", "backend": "reference"}, "--dense-format"),
        ({"vram_budget_nbytes": 81 * GIB}, "--vram-budget"),
        ({"experts": "hybrid"}, "--experts"),  # a model without experts
        ({"device": "cuda", "backend": "cpu"}, "--backend"),
        ({"device": "cpu", "vram_budget_nbytes": GB}, "--vram-budget"),
    ],
)
def test_what_is_not_possible_is_refused_by_flag(values, param):
    with pytest.raises(ConfigError) as caught:
        choose(**values)
    assert caught.value.param == param


def test_packed_matrices_stay_and_float32_stays():
    """134.5 million weights at 4.5 bits are 76 MB; a prompt expands the head, 49,152 x 576, in bf16."""
    packed = replace(sizes(smollm2(), dense=("q4_k", "q6_k")), packed_nbytes=76 * 10**6)
    made = choose(stored=packed)
    assert made.dense_format == "packed"
    assert made.kv_format == "bf16"
    assert made.vram.weights_nbytes == 76 * 10**6
    assert "q4_k, q6_k" in next(c.reason for c in made.choices if c.name == "dense_format")
    wide = choose(stored=packed, dense_format="bf16")
    assert wide.vram.weights_nbytes == pytest.approx(2 * 134_515_008, rel=0.001)
    scratch = made.vram.workspace_nbytes - wide.vram.workspace_nbytes
    assert scratch == 2 * 49_152 * 576
    # What only the reference multiplies there it multiplies as plain floats.
    assert choose(stored=packed, device="cuda", backend="reference").dense_format == "bf16"
    made = choose(stored=sizes(smollm2(), dense=("fp8_e4m3", "f32")))
    assert made.dense_format == "bf16"
    made = choose(stored=sizes(smollm2(), dense=("f32",)))
    assert (made.dense_format, made.kv_format) == ("f32", "f32")
    made = choose(dense_format="f16", kv_format="f32")
    assert (made.dense_format, made.kv_format) == ("f16", "f32")


def test_experts_that_all_fit_go_to_the_gpu():
    made = choose(gpt_oss(), machine(144 * GIB))
    assert made.experts == "gpu"
    assert made.slots
    layout = slab_layout("mxfp4", 2880, 2880, has_bias=True)
    assert made.vram is not None
    assert made.vram.experts_nbytes == 36 * 128 * layout.slab_nbytes
    assert made.vram.headroom_nbytes >= 0


def test_experts_that_do_not_fit_get_what_the_rest_leaves():
    made = choose(gpt_oss(18), vram_budget_nbytes=8 * GIB, context=4096, max_num_seqs=1)
    assert made.experts == "hybrid"
    assert "missing" in next(c.reason for c in made.choices if c.name == "experts")
    plan = made.vram
    assert plan is not None
    layout = slab_layout("mxfp4", 2880, 2880, has_bias=True)
    assert plan.experts_nbytes % layout.slice_nbytes == 0
    assert 0 <= plan.headroom_nbytes < layout.slice_nbytes  # nothing is left over
    assert plan.total_nbytes <= 8 * GIB
    assert plan.weights_nbytes == dense_nbytes(gpt_oss(18), "bf16")
    assert made.plan.weights_nbytes == 18 * 128 * 13 * 10**6
    assert {"expert_slots"} <= {c.name for c in made.choices}


def test_the_context_of_a_hybrid_model_leaves_room_for_slots():
    made = choose(gpt_oss(18), vram_budget_nbytes=12 * GIB)
    plan = made.vram
    assert plan is not None
    assert plan.kv_nbytes <= plan.experts_nbytes
    assert made.kv_tokens >= made.context


@pytest.mark.parametrize("mode", ["cpu", "stream", "hybrid"])
def test_where_experts_go_can_be_configured(mode):
    made = choose(gpt_oss(18), experts=mode, vram_budget_nbytes=12 * GIB)
    assert made.experts == mode
    assert made.vram is not None
    assert (made.vram.experts_nbytes == 0) == (mode == "cpu")


def test_b016_what_does_not_fit_is_refused_with_the_plan():
    with pytest.raises(DoesNotFitError, match="weights") as caught:
        choose(gpt_oss(), vram_budget_nbytes=2 * GIB)
    assert caught.value.hint
    with pytest.raises(DoesNotFitError, match="experts"):
        choose(gpt_oss(), experts="gpu", vram_budget_nbytes=16 * GIB)
    with pytest.raises(DoesNotFitError, match="other programs leave"):
        choose(on=machine(free=4 * GIB), vram_budget_nbytes=8 * GIB)
    with pytest.raises(DoesNotFitError, match="q4_k"):
        choose(gpt_oss(), machine(16 * GIB), stored=sizes(gpt_oss(), ("q4_k",)), device="cuda")


def test_b016_experts_must_fit_the_host():
    with pytest.raises(DoesNotFitError, match="host's memory"):
        choose(gpt_oss(), machine(16 * GIB, ram=32 * GB), device="cuda")


def test_auto_falls_back_to_the_cpu_and_says_why():
    made = choose(gpt_oss(2), machine(2 * GIB))
    assert made.device == "cpu"
    assert "does not fit the GPU" in next(c.reason for c in made.choices if c.name == "device")
    assert any("does not fit the GPU" in w for w in made.warnings)


def test_experts_of_other_formats_are_unpacked_where_they_fit():
    made = choose(gpt_oss(2), machine(144 * GIB), stored=sizes(gpt_oss(2), ("q4_k",)))
    assert (made.experts, made.slots) == ("gpu", False)
    assert made.vram is not None
    # three matrices of 2,880 x 2,880, and biases, in bfloat16
    assert made.vram.experts_nbytes == 2 * 128 * (3 * 2880 * 2880 + 3 * 2880) * 2


def test_plan_arithmetic():
    plan = VramPlan(1, 20, 300, 4000, 50_000, 100_000, context_nbytes=6, reserve_nbytes=7)
    assert plan.total_nbytes == 54_334
    assert plan.headroom_nbytes == 45_666
    plan.require_fit("x")
    assert CONTEXT_NBYTES > 0
    with pytest.raises(DoesNotFitError, match="missing"):
        VramPlan(1, 0, 0, 0, 0, GB).require_fit("x") or VramPlan(GB, 0, 0, 0, 0, GB).require_fit(
            "x"
        )


def qwen3(layers=4):
    """The geometry of Qwen3-30B-A3B: 128 experts of 2048 x 768 in every layer."""
    return smollm2(
        family="qwen3_moe", hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab=151936,
        intermediate=0, max_context=40960, layers=(LayerSpec(None, True),) * layers,
        tie_embeddings=False, moe=MoeSpec(128, 8, 768, "softmax_topk", True, False, False),
    )  # fmt: skip


def test_mixed_block_types_lie_in_slots_of_the_longest_slice():
    """As Q4_K_M: down in Q6_K in every second layer. A slice has 256 of the 768 columns."""
    kinds = (("q4_k", "q6_k", False), ("q4_k", "q4_k", False)) * 2
    of = qwen3()
    stored = ModelSizes(
        4 * GB, 3 * GB, frozenset({"q4_k", "q6_k"}), frozenset({"q4_k", "q6_k"}), 700 * 10**6, kinds
    )
    able = GpuSupport(None, frozenset({"q4_k", "q6_k"}))
    made = choose(of, support=able, stored=stored, experts="gpu")
    nbytes = 256 * 2048 * (2 * 4.5 + 6.5625) / 8
    assert nbytes % 4096 == 0
    assert made.vram.experts_nbytes == 4 * 128 * 3 * nbytes
    assert made.slots
    (dense,) = (c for c in made.choices if c.name == "dense_format")
    assert dense.value == "packed"
    assert "multiplied as they are, 700 MB" in dense.reason
    without = GpuSupport(None, frozenset({"q4_k"}))
    assert not choose(of, support=without, stored=stored, experts="gpu").slots


@pytest.mark.parametrize(("context", "laid_out"), [(1024, 4_718_592), (131_072, 134_217_728)])
def test_the_past_that_prefill_lays_out_is_counted(context: int, laid_out: int) -> None:
    """By hand: 1,024 tokens and a tile of 128, keys and values, 8 heads of 128, 2 bytes; 128 MiB at most."""
    spec = smollm2(num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeSpec(theta=1e5, dim=128))
    fewer, few, enough = (
        gpu_workspace_nbytes(spec, context=context, max_batch_tokens=n, max_num_seqs=1)
        for n in (510, 511, 512)
    )
    # Everything else grows alike from one row to the next.
    assert enough - few - (few - fewer) == pytest.approx(laid_out, abs=2)


@pytest.mark.parametrize(
    ("system", "wsl", "then"),
    [
        ("Linux", False, "they fail, or this one does"),
        ("Linux", True, "the driver moves some of ours to host memory, without an error"),
        ("Windows 11", False, "the driver moves some of ours to host memory, without an error"),
    ],
)
def test_b123_little_gpu_memory_left_is_a_warning_with_the_headroom(system, wsl, then):
    """All of 8 GiB given away: a twentieth, 429 MB, is what is left to others when nothing is said."""
    box = replace(machine(8 * GIB), system=system, wsl=wsl)
    tight = choose(gpt_oss(), box, vram_budget_nbytes=8 * GIB, context=8192)
    assert tight.vram is not None
    spare = 8 * GIB - tight.vram.total_nbytes
    assert spare < 8 * GIB // 40
    (said,) = [w for w in tight.warnings if "little GPU memory" in w]
    assert f"{spare / 1e6:,.0f} MB of 8,590 MB that were free" in said
    assert then in said
    assert not any("little GPU memory" in w for w in choose(gpt_oss(), box, context=8192).warnings)


def _rates(**values):
    return replace(
        READY, known=StartingRates({k: Rate(v, "", "alone", "") for k, v in values.items()})
    )


def test_chunks_are_as_long_as_streaming_makes_worth_it():
    """36 x 128 experts of 13.3 MB over 50 GB/s: a second and more for each chunk, whatever its length."""
    known = _rates(
        pcie_h2d=50.0, dram_read=130.0, hbm_read=4500.0, gpu_flops_bf16=780e3, gpu_flops_f32=51e3
    )
    made = choose(gpt_oss(), machine(16 * GIB), known, context=32_768)
    assert made.max_batch_tokens == 16_384 + 2048
    assert made.chunks is not None
    assert made.chunks.beside == made.max_batch_tokens  # PCIe binds: who decodes waits no longer
    # A stream reads 128 experts at 50 GB/s. 128 tokens on both paths use 125.8, 4.07 tokens each, which the
    # CPU computes at (130 - 50) * 0.75 / (4.07 / 3.4) = 50.1 GB/s beside PCIe: 0.49 of a stream. So two such
    # pieces take 0.98, a third of one token (four experts at 110 GB/s) 0.01 more, of two tokens 0.03.
    assert made.chunks.tail == 257
    (choice,) = [c for c in made.choices if c.name == "max_batch_tokens"]
    assert choice.value == "18432"
    assert "GiB of workspace" in choice.reason
    short = choose(gpt_oss(), machine(16 * GIB), known, context=32_768, max_batch_tokens=2048)
    assert short.chunks is None
    assert short.max_batch_tokens == 2048
    # The state of all rows, float32; beside it 2,048 rows in attention, 111,616 bytes each (4 x 2,880 and 2 x
    # 5,120 numbers of 4 bytes, 4,096 of 6), which are more than a mixture's 11,680 of all rows.
    long, piece = 18_432 * 11_520 + 2048 * 111_616, 2048 * 111_616
    assert 2048 * 111_616 > 18_432 * 11_680
    grown = made.vram.workspace_nbytes - short.vram.workspace_nbytes
    assert grown == pytest.approx(1.4 * (long - piece), abs=2)
    assert made.vram.total_nbytes <= made.vram.budget_nbytes
    assert choose(gpt_oss(), machine(16 * GIB), known, context=4096).max_batch_tokens == 4096


def test_who_decodes_does_not_wait_longer_for_a_longer_chunk():
    """16,384 tokens at 111 us take 1.8 s, 8,192 as long as their stream of 54 GB, 1.1 s."""
    known = _rates(
        pcie_h2d=50.0, dram_read=130.0, hbm_read=4500.0, gpu_flops_bf16=330e3, gpu_flops_f32=51e3
    )
    made = choose(gpt_oss(), machine(16 * GIB), known, context=32_768)
    assert made.chunks is not None
    assert made.max_batch_tokens == 16_384 + 2048
    assert made.chunks.beside == 8192 + 1024
    (choice,) = [c for c in made.choices if c.name == "max_batch_tokens"]
    assert "9,216 while others decode" in choice.reason


def test_chunks_stay_short_where_the_gpu_or_nobody_binds():
    slow = _rates(pcie_h2d=50.0, dram_read=130.0, gpu_flops_bf16=5e3)
    assert choose(gpt_oss(), machine(16 * GIB), slow).max_batch_tokens == 2048 + 256
    for found in (
        choose(gpt_oss(), machine(16 * GIB)),  # no rates are known
        choose(gpt_oss(), machine(), slow),  # all experts fit
        choose(smollm2(), machine(), slow),
        choose(gpt_oss(), machine(16 * GIB), slow, experts="cpu"),
    ):
        assert (found.max_batch_tokens, found.chunks) == (2048, None)


@pytest.mark.parametrize("budget", range(8020 * 10**6, 8340 * 10**6, 40 * 10**6))
def test_chunks_are_no_longer_than_what_fits(budget):
    """Where a step of 2,048 tokens just fits beside the context, a longer one is not planned."""
    known = _rates(
        pcie_h2d=25.0, dram_read=80.0, hbm_read=900.0, gpu_flops_bf16=780e3, gpu_flops_f32=130e3
    )
    given = {"vram_budget_nbytes": budget, "context": 32_768, "experts": "hybrid"}
    made = choose(gpt_oss(), machine(16 * GIB), known, **given)
    assert made.vram is not None
    assert made.vram.total_nbytes <= budget
    assert made.context == 32_768


@pytest.mark.parametrize("slots", [1000, 1080, 1160])
def test_chunks_leave_room_for_the_slots_that_are_asked_for(slots):
    """More slots than fit beside the longest chunk: a shorter one, and no refusal."""
    known = _rates(
        pcie_h2d=25.0, dram_read=80.0, hbm_read=900.0, gpu_flops_bf16=780e3, gpu_flops_f32=130e3
    )
    given = {"vram_budget_nbytes": 12 * GB, "context": 32_768, "experts": "hybrid"}
    made = choose(gpt_oss(), machine(16 * GIB), known, expert_slots=slots, **given)
    assert made.vram is not None
    assert made.vram.total_nbytes <= 12 * GB
    assert (made.max_batch_tokens == 18_432) == (slots == 1000)


def test_what_a_long_chunk_keeps_by_hand():
    """Of 8,192 rows of 2,880: float32; then bfloat16 beside 2,880 activations and 4 pairs of 40 bytes."""
    rows, mixture = long_chunk_nbytes(gpt_oss(), 8192)
    assert rows == 94_371_840
    assert mixture == 8192 * (5760 + 5760 + 160)
    assert long_chunk_nbytes(smollm2(), 8192) == (8192 * 576 * 4, 0)
    # Of 2,048 rows of a mixture: 18 x 2,880 bytes; 8,192 pairs' activations (2 bytes); outputs, as float32 of
    # 33 pairs for each of 128 experts.
    assert streamed_nbytes(replace(gpt_oss(), num_heads=8), 2048) == (
        2048 * 18 * 2880 + 2 * 2880 * 8192 + 4 * 2880 * 33 * 128
    )
    # Formats without grouped kernels of their own: float32 of all 8,192 pairs.
    assert streamed_nbytes(replace(gpt_oss(), num_heads=8), 2048, wide=True) == (
        2048 * 18 * 2880 + 2 * 2880 * 8192 + 4 * 2880 * 8192
    )
    # The H200 allocated 203, 189, 235 and 392 MB (benchmarks.residency.chunks).
    for tokens, measured in ((2048, 203e6), (4096, 189e6), (8192, 235e6), (16_384, 392e6)):
        assert measured < 1.05 * streamed_nbytes(gpt_oss(), tokens) < 1.6 * measured
    base = {"context": 4096, "max_num_seqs": 1}
    one, two = (gpu_workspace_nbytes(smollm2(), max_batch_tokens=n, **base) for n in (2048, 8192))
    assert two - one == 8192 * 576 * 4


def test_prompts_of_experts_without_grouped_kernels_take_more_workspace():
    """Of gpt-oss-120b with 2,048 rows: 2,880 x 4 x (8,192 - 33 x 128) bytes, with the allocator's share."""
    kinds = {
        "own": (("mxfp4", "mxfp4", False),) * 36,
        "blocks": (("q4_k", "q6_k", False),) * 36,
        "one layer": (*(("mxfp4", "mxfp4", False),) * 35, ("mxfp4", "bf16", False)),
    }
    assert {name: ModelSizes(0, expert_kinds=of).have_grouped_kernels for name, of in kinds.items()} == {
        "own": True, "blocks": False, "one layer": False,
    }  # fmt: skip
    assert ModelSizes(0, expert_formats=frozenset({"mxfp4_gguf"})).have_grouped_kernels
    assert not ModelSizes(0, expert_formats=frozenset({"q8_0"})).have_grouped_kernels
    spec = replace(gpt_oss(), num_heads=8)  # with 64 attention takes more than the mixture
    base = Workspace(spec, 2048, 16, packed=False, scored=0, streamed=True)
    more = replace(base, wide=True)(4096) - base(4096)
    assert more == pytest.approx(1.4 * 2880 * 4 * (8192 - 33 * 128), abs=2)
