"""Experts in host memory as the engine resolves it: limits, threads, and flags that would do nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, DoesNotFitError
from headrace.core.model_sizes import ModelSizes
from headrace.core.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.engine.expert_host import load_host_store
from headrace.engine.resolve import GpuSupport, Resolved, resolve
from headrace.formats.base import PackedTensor
from headrace.machine.cgroup import Cgroup
from headrace.machine.probe import CpuInfo, GpuInfo, LogicalCpu, Machine, MemoryInfo
from headrace.ops.records import ExpertWeights

GB = 10**9


def machine(threads: int | None = None, total: int = 64 * GB) -> Machine:
    cpus = tuple(LogicalCpu(i, i, 0, True) for i in range(16))
    return Machine(
        system="Linux",
        wsl=False,
        cpu=CpuInfo("made up", "x86_64", ("avx2",), cpus, tuple(range(16))),
        memory=MemoryInfo(total, total - 4 * GB),
        cgroup=Cgroup(),
        python="3.12",
        gpus=(GpuInfo(0, "NVIDIA H200", 24 * GB, 23 * GB, "580"),),
        measured_threads=threads,
    )


SPEC = ModelSpec(
    family="mixtral",
    hidden=2048,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    vocab=32000,
    intermediate=768,
    norm_eps=1e-5,
    rope=RopeSpec(theta=1e5, dim=128),
    max_context=4096,
    tie_embeddings=True,
    layers=(LayerSpec(None, True),) * 48,
    moe=MoeSpec(128, 8, 768, "softmax_topk", True),
)
SIZES = ModelSizes(31 * GB, 30 * GB, frozenset({"q8_0"}), frozenset({"bf16"}))


def choose(on: Machine | None = None, **values: object) -> Resolved:
    return resolve(
        EngineConfig("m", **{"experts": "hybrid", **values}),  # type: ignore[arg-type]
        SPEC,
        on or machine(),
        SIZES.total_nbytes,
        sizes=SIZES,
        gpu=GpuSupport(None, frozenset({"q8_0"})),
    )


def test_b134_a_core_is_left_for_the_host_loop_beside_a_gpu() -> None:
    assert choose().threads == 15
    assert choose(machine(threads=12)).threads == 12
    assert choose(machine(threads=12), threads=16).threads == 16


def test_slabs_get_what_the_host_budget_leaves() -> None:
    made = choose(ram_budget_nbytes=40 * GB)
    assert made.slots
    assert 38 * GB < made.expert_ram_nbytes < 40 * GB


def test_with_a_disk_the_experts_need_not_fit_the_memory() -> None:
    small = machine(total=24 * GB)
    with pytest.raises(DoesNotFitError) as caught:
        choose(small, device="cuda")
    assert "--expert-disk" in (caught.value.hint or "")
    made = choose(small, device="cuda", expert_disk="/x")
    assert made.expert_disk == "/x"
    assert made.expert_ram_nbytes < 30 * GB


@pytest.mark.parametrize("flag", ["pin_budget_nbytes", "expert_disk"])
def test_flags_about_host_experts_are_refused_where_there_are_none(flag: str) -> None:
    value = GB if flag == "pin_budget_nbytes" else "/x"
    with pytest.raises(ConfigError, match="no experts are kept in host memory") as caught:
        choose(device="cpu", experts="auto", **{flag: value})
    assert caught.value.param == f"--{flag.removesuffix('_nbytes').replace('_', '-')}"


def test_the_experts_threads_have_cpus_of_their_own_where_they_fill_the_machine() -> None:
    made = choose()
    assert (made.threads, made.expert_cpus) == (15, tuple(range(1, 16)))
    assert choose(machine(12)).expert_cpus == tuple(range(1, 13))
    assert choose(threads=4).expert_cpus is None
    assert choose(threads=16).expert_cpus is None, "none would be left for the host loop"


class FakePinner:
    def __init__(self) -> None:
        self.pinned: list[int] = []

    def pin(self, address: int, nbytes: int) -> str | None:
        self.pinned.append(address)
        return None

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


def layers(count: int) -> list[ExpertWeights]:
    def matrix(rows: int, cols: int) -> PackedTensor:
        data = torch.randn(rows, cols, dtype=torch.float32).to(torch.bfloat16)
        return PackedTensor("bf16", (rows, cols), {"data": data})

    return [
        ExpertWeights(
            [matrix(32, 64) for _ in range(2)],
            [matrix(32, 64) for _ in range(2)],
            [matrix(64, 32) for _ in range(2)],
        )
        for _ in range(count)
    ]


def test_b140_the_pin_budget_of_the_user_holds() -> None:
    made = dataclasses.replace(choose(), threads=2)
    pinner = FakePinner()
    store = load_host_store(made, layers(3), pinner=pinner)
    assert len(pinner.pinned) == 3
    nbytes = store.layer_nbytes(0)
    store.close()
    assert pinner.pinned == []
    tight = dataclasses.replace(made, pin_budget_nbytes=2 * nbytes)
    store = load_host_store(tight, layers(3), pinner=pinner)
    assert [store.pinned(i) for i in range(3)] == [True, True, False]
    store.close()


def test_the_disk_holds_what_the_budget_does_not(tmp_path: Path) -> None:
    made = dataclasses.replace(choose(), threads=2, expert_ram_nbytes=0, expert_disk=str(tmp_path))
    store = load_host_store(made, layers(2), pinner=FakePinner())
    assert store.account().mapped_nbytes == 2 * store.layer_nbytes(0)
    assert len(list(tmp_path.glob("*.slabs"))) == 1
    store.close()
