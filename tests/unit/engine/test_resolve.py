"""Choices and the memory plan, on machines that are written down here."""

import dataclasses

import pytest

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.kv_formats import FORMATS
from headrace.core.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.engine.kv_choice import KVChoice, KVPool
from headrace.engine.memory_plan import RESERVE_NBYTES, MemoryPlan, megabytes, workspace_nbytes
from headrace.engine.resolve import BLOCK_TOKENS, resolve
from headrace.machine.cgroup import Cgroup
from headrace.machine.probe import CpuInfo, GpuInfo, LogicalCpu, Machine, MemoryInfo

GB = 10**9


def spec(**changes):
    """SmolLM2-135M's shape."""
    values = {
        "family": "llama",
        "hidden": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab": 49152,
        "intermediate": 1536,
        "norm_eps": 1e-5,
        "rope": RopeSpec(theta=100000.0, dim=64),
        "max_context": 8192,
        "tie_embeddings": True,
        "layers": (LayerSpec(None, False),) * 30,
    }
    return ModelSpec(**{**values, **changes})


def machine(available=16 * GB, total=32 * GB, gpus=(), limit=None, cores=4):
    cpus = tuple(LogicalCpu(i, i, 0, True) for i in range(cores))
    return Machine(
        system="Linux",
        wsl=False,
        cpu=CpuInfo("made up", "x86_64", ("avx2",), cpus, tuple(range(cores))),
        memory=MemoryInfo(total, available, limit),
        cgroup=Cgroup(),
        python="3.12",
        gpus=gpus,
    )


def choose(config=None, on=None, of=None, weights=100_000_000, **kwargs):
    config = config or EngineConfig("m")
    return resolve(config, of or spec(), on or machine(), weights, **kwargs)


def config(**values):
    return EngineConfig("m", **values)


def test_defaults_on_a_roomy_machine():
    made = choose()
    assert made.context == 8192
    assert made.kv_format == "f32"
    assert made.block_tokens in BLOCK_TOKENS
    assert made.backend == "cpu"
    assert made.threads == 4
    assert made.experts == "cpu"
    # the whole context for sixteen sequences would be 6.0 GB: a quarter of what is left is less
    assert 8192 <= made.kv_tokens < 16 * 8192
    left = 16 * GB * 9 // 10 - 100_000_000 - RESERVE_NBYTES - made.plan.workspace_nbytes
    per_token = 2 * 30 * 3 * 64 * 4
    assert made.kv_tokens == left // 4 // per_token // 32 * 32
    assert made.plan.kv_nbytes == made.kv_tokens * per_token
    assert made.plan.headroom_nbytes > 0
    assert not made.warnings
    names = [c.name for c in made.choices]
    assert len(names) == len(set(names))
    assert all(c.reason for c in made.choices)
    assert {"context", "kv_format", "threads", "block_tokens", "kv_tokens", "memory"} <= set(names)


def test_bytes_are_printed_as_people_read_them():
    values = {c.name: c.value for c in choose().choices}
    assert values["ram_budget"] == "14,400 MB"  # 16 GB, less a tenth
    given = {c.name: c.value for c in choose(config(ram_budget_nbytes=2_500_000_000)).choices}
    assert given["ram_budget"] == "2,500 MB"
    # the sum that the reason ends with
    reason = next(c.reason for c in choose().choices if c.name == "memory")
    assert f"= {values['memory']} of 14,400 MB" in reason
    assert [megabytes(n) for n in (0, 999, 12_345, 2_600_000)] == ["0 MB", "999 B", "12 kB", "3 MB"]


def test_a_small_machine_gets_the_context_that_fits():
    made = choose(on=machine(available=GB))
    assert 256 <= made.context < 8192
    assert made.kv_tokens >= made.context
    assert made.plan.headroom_nbytes >= 0
    reason = next(c.reason for c in made.choices if c.name == "context")
    assert "8192" in reason


def test_b016_a_model_that_cannot_fit_is_refused_before_weights_are_read():
    """A mixture of 60 GB of experts on a 32 GB host; numbers of the plan are in the message."""
    moe = MoeSpec(128, 4, 2880, "topk_softmax", True)
    large = spec(
        hidden=2880,
        num_heads=64,
        num_kv_heads=8,
        vocab=201088,
        moe=moe,
        layers=(LayerSpec(None, True),) * 36,
    )
    with pytest.raises(DoesNotFitError) as caught:
        choose(of=large, on=machine(available=30 * GB), weights=60 * GB)
    assert "60,000 MB" in caught.value.message
    assert "27,000 MB" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"kv_format": "q8_0"}, "--kv-format"),
        ({"kv_format": "nvfp4k-fp8v"}, "--kv-format"),  # the kernels are not there in these tests
        ({"experts": "gpu"}, "--experts"),
        ({"experts": "stream"}, "--experts"),
        ({"experts": "hybrid"}, "--experts"),
        ({"experts": "fast"}, "--experts"),
        ({"vram_budget_nbytes": GB}, "--vram-budget"),
        ({"context": 8193}, "--context"),
        ({"context": 0}, "--context"),
        ({"threads": 0}, "--threads"),
        ({"block_tokens": 8}, "--block-tokens"),
        ({"block_tokens": 48}, "--block-tokens"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_batch_tokens": 4, "max_num_seqs": 8}, "--max-batch-tokens"),
        ({"kv_tokens": 100, "context": 200}, "--kv-tokens"),
        ({"kv_tokens": 0}, "--kv-tokens"),
        ({"ram_budget_nbytes": 33 * GB}, "--ram-budget"),
        ({"backend": "cuda"}, "--backend"),
    ],
)
def test_what_is_not_possible_is_refused_by_flag(values, param):
    with pytest.raises(ConfigError) as caught:
        choose(config(**values))
    assert caught.value.param == param
    name, value = next(iter(values.items()))
    said = f"{value // 10**6:,} MB" if name.endswith("_nbytes") else str(value)
    assert said in caught.value.message


def test_b107_an_unknown_kv_format_lists_the_supported_ones():
    with pytest.raises(ConfigError, match="f32, bf16"):
        choose(config(kv_format="q4_0"))


def test_what_is_configured_is_what_is_chosen():
    made = choose(
        config(
            context=1000,
            kv_format="bf16",
            block_tokens=128,
            max_batch_tokens=64,
            max_num_seqs=2,
            kv_tokens=1500,
            ram_budget_nbytes=8 * GB,
            threads=3,
            experts="cpu",
            backend="reference",
        )
    )
    assert (made.context, made.kv_format, made.block_tokens) == (1000, "bf16", 128)
    assert (made.max_batch_tokens, made.max_num_seqs, made.threads) == (64, 2, 3)
    assert made.num_blocks == 12  # 1500 tokens in blocks of 128, rounded up
    assert made.backend == "reference"
    assert made.plan.budget_nbytes == 8 * GB
    assert not made.warnings


def test_a_pool_smaller_than_the_model_context_bounds_the_context():
    assert choose(config(kv_tokens=640)).context == 640


def test_a_context_that_does_not_fit_is_refused_with_the_plan():
    with pytest.raises(DoesNotFitError, match="KV") as caught:
        choose(config(context=8192), on=machine(available=900_000_000))
    assert "--context" in caught.value.hint


def test_a_gpu_is_reported_as_not_used():
    gpu = GpuInfo(0, "A100", 40 * GB, 40 * GB, "1")
    made = choose(on=machine(gpus=(gpu,)), of=spec(moe=MoeSpec(8, 2, 64, "softmax_topk", True)))
    assert "A100" in next(c.reason for c in made.choices if c.name == "experts")
    with pytest.raises(ConfigError, match="A100"):
        choose(config(experts="gpu"), on=machine(gpus=(gpu,)))


def test_missing_kernels_fall_back_and_say_so():
    made = choose(missing_kernels="no compiler was found")
    assert made.backend == "reference"
    assert "no compiler" in made.warnings[0]
    with pytest.raises(ConfigError, match="no compiler"):
        choose(config(backend="cpu"), missing_kernels="no compiler was found")


def test_a_container_limit_is_the_budget():
    made = choose(on=machine(available=30 * GB, limit=2 * GB))
    assert made.plan.budget_nbytes == 2 * GB - 2 * GB // 10


def test_b123_little_headroom_is_a_warning():
    tight = choose(config(context=8192, kv_tokens=8192, ram_budget_nbytes=1_080_000_000))
    assert 0 <= tight.plan.headroom_nbytes < 54_000_000
    assert any("little memory" in w for w in tight.warnings)


def test_plan_arithmetic():
    plan = MemoryPlan(1, 20, 300, 4000, 5000)
    assert plan.total_nbytes == 4321
    assert plan.headroom_nbytes == 679
    plan.require_fit("x")
    with pytest.raises(DoesNotFitError):
        dataclasses.replace(plan, weights_nbytes=681).require_fit("x")
    bf16 = KVPool(spec(), KVChoice(FORMATS["bf16"], 0, "bf16"), 16, 4, 512)
    assert bf16.nbytes(10) == 160 * 2 * 30 * 3 * 64 * 2
    assert bf16.blocks_in(bf16.nbytes(10)) == 10
    assert bf16.blocks_in(bf16.nbytes(10) - 1) == 9


def test_workspace_grows_with_what_it_is_made_of():
    base = {"context": 1024, "max_batch_tokens": 512, "max_num_seqs": 4, "backend": "cpu"}
    small = workspace_nbytes(spec(), **base)
    assert workspace_nbytes(spec(), **{**base, "max_batch_tokens": 4096}) > small
    assert workspace_nbytes(spec(), **{**base, "max_num_seqs": 512}) > 512 * 49152 * 4
    assert workspace_nbytes(spec(), **{**base, "backend": "reference"}) > 2 * 49152 * 576 * 4


def test_planned_memory_by_purpose():
    found = choose(weights=100_000_000)
    assert found.memory == {
        "host": {
            "weights": 100_000_000,
            "kv": found.plan.kv_nbytes,
            "workspace": found.plan.workspace_nbytes,
        }
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"vram_budget_nbytes": 4 * 2**30}, "--vram-budget 4,295 MB needs a GPU"),
        ({"backend": "triton"}, "--backend triton needs a GPU"),
        (
            {"kv_tokens": 5, "context": 64},
            "--kv-tokens is 5, less than one sequence of --context 64",
        ),
        ({"kv_tokens": 0}, "--kv-tokens is 0"),
        ({"max_batch_tokens": 2, "max_num_seqs": 4}, "--max-batch-tokens is 2"),
        (
            {"ram_budget_nbytes": 64 * GB},
            "--ram-budget is 64,000 MB; this machine .* has 32,000 MB",
        ),
    ],
)
def test_what_is_wrong_is_called_by_its_flag(values, words):
    with pytest.raises(ConfigError, match=words):
        choose(config(**values))


def test_a_budget_that_is_too_small_is_what_to_raise():
    with pytest.raises(DoesNotFitError) as caught:
        choose(config(ram_budget_nbytes=10**6))
    assert "raise --ram-budget" in caught.value.hint
    with pytest.raises(DoesNotFitError) as caught:
        choose(on=machine(available=10**6))
    assert "free memory" in caught.value.hint
