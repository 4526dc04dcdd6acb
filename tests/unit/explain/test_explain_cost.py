"""Prices against sums by hand."""

import pytest

from headrace.core.errors import MachineError
from headrace.explain.cost import Work, price, total
from headrace.machine.profile import GpuProfile, HostProfile, MachineProfile, Rate


def machine(gpu: bool = True, **rates: float) -> MachineProfile:
    def unit(name: str) -> str:
        return "GFLOP/s" if "flops" in name else "s" if name in SECONDS else "GB/s"

    return MachineProfile(
        name="by hand",
        origin="catalogued",
        host=HostProfile(cpu="c", cores=2, memory_nbytes=1),
        gpu=GpuProfile(name="g", memory_nbytes=1) if gpu else None,
        rates={n: Rate(v, unit(n), "alone", "by hand") for n, v in rates.items()},  # type: ignore[arg-type]
    )


SECONDS = ("kernel_launch", "thread_wake")


def test_bytes_are_divided_by_the_rate_in_gigabytes():
    priced = price(Work(hbm_nbytes=3e9, pcie_nbytes=1e9), machine(hbm_read=1000, pcie_h2d=50))
    assert priced.seconds == pytest.approx({"hbm": 3e-3, "pcie": 2e-2})
    assert priced.bound == "pcie"
    assert priced.floor_s == pytest.approx(2e-2)


def test_the_same_work_binds_elsewhere_on_another_machine():
    work = Work(tensor_flops={"bf16": 1e12}, hbm_nbytes=1e10)
    fast = price(work, machine(gpu_flops_bf16=1e6, hbm_read=1000))  # 1 ms and 10 ms
    slow = price(work, machine(gpu_flops_bf16=1e4, hbm_read=1000))  # 100 ms and 10 ms
    assert (fast.bound, slow.bound) == ("hbm", "tensor")
    assert fast.intensity == slow.intensity == pytest.approx(100)


def test_launches_and_the_host_come_on_top():
    work = Work(hbm_nbytes=1e9, host_s=1e-3, launches=100)
    priced = price(work, machine(hbm_read=1000, kernel_launch=2e-6))
    assert priced.floor_s == pytest.approx(1e-3 + 1e-3 + 2e-4)
    wakes = price(Work(launches=10), machine(gpu=False, thread_wake=5e-6))
    assert wakes.floor_s == pytest.approx(5e-5)


def test_dtypes_add_up_one_after_the_other():
    work = Work(tensor_flops={"bf16": 1e9, "fp8": 4e9})
    priced = price(work, machine(gpu_flops_bf16=1000, gpu_flops_fp8=2000))
    assert priced.floor_s == pytest.approx(1e-3 + 2e-3)
    assert priced.intensity == float("inf")


def test_a_format_without_a_tensor_rate_multiplies_as_the_wider_one():
    assert price(
        Work(tensor_flops={"fp4": 1e9}), machine(gpu_flops_bf16=1000)
    ).floor_s == pytest.approx(1e-3)
    assert price(Work(special_ops=1e9), machine(gpu_flops_f32=16000)).floor_s == pytest.approx(1e-3)


def test_a_missing_rate_is_named():
    with pytest.raises(MachineError, match="no rate 'pcie_h2d'"):
        price(Work(pcie_nbytes=1), machine(hbm_read=1))


def test_efficiency_stretches_a_resource():
    priced = price(Work(hbm_nbytes=1e9), machine(hbm_read=1000), {"hbm": 0.5})
    assert priced.floor_s == pytest.approx(2e-3)


def test_works_add_and_scale():
    a = Work(
        tensor_flops={"bf16": 1}, cpu_flops={"f32": 2}, vector_flops=3, dram_nbytes=4, launches=1
    )
    b = Work(tensor_flops={"bf16": 10, "fp8": 5}, disk_nbytes=7)
    both = total([a, b])
    assert both.tensor_flops == {"bf16": 11, "fp8": 5}
    assert both == a + b
    assert both.scale(2).flops == 2 * (11 + 5 + 2 + 3)
    assert both.nbytes == 11
    assert price(Work(), machine()).bound == ""
