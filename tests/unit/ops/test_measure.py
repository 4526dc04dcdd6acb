"""Loads and probes that measure a machine do what they are timed for."""

from __future__ import annotations

import threading

import pytest
import torch

from headrace.core.errors import MachineError
from headrace.experts.measure import open_load
from headrace.machine.pages import HostBlock
from headrace.ops import measure, registry
from headrace.ops.measure import gpu_kernels, read_load
from tests.fixtures.triton_compile import cross_compile
from tests.fixtures.triton_interpreter import DEVICE, needs_triton, only_interpreted

needs_native = pytest.mark.skipif(
    registry.unavailable_reason("cpu") is not None, reason="the C++ kernels are not built"
)


@pytest.fixture
def block() -> HostBlock:
    block = HostBlock(8 << 20)
    block.bytes[:] = 1
    return block


@needs_native
def test_the_read_loop_reads(block: HostBlock) -> None:
    load = read_load(block)
    assert load(2, (0, 0), 0.01) > 0
    assert load(1, (), 0.01) > 0
    with pytest.raises(ValueError, match="too little"):
        load(64, (), 0.01)


def test_without_extension_numpy_reads(block: HostBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "unavailable_reason", lambda name: "not built")
    assert read_load(block)(1, (), 0.01) > 0


@needs_native
def test_flags_are_answered_until_nothing_comes() -> None:
    from headrace.ops.cpu import _native

    words = torch.zeros(64, dtype=torch.int32)
    seq, ack = words[0:1], words[32:33]
    answered: list[int] = []
    thread = threading.Thread(
        target=lambda: answered.append(_native.answer_flags(seq.data_ptr(), ack.data_ptr(), 5, 0.5))
    )
    thread.start()
    for value in (1, 2, 3):
        seq.fill_(value)
        while int(ack) != value:
            assert thread.is_alive()
    thread.join(10)  # the fourth never comes
    assert answered == [3]


@needs_native
@pytest.mark.parametrize("fmt", ["mxfp4", "bf16", "q4_k"])
def test_expert_loads_compute(fmt: str) -> None:
    with open_load(registry.cpu_experts(), fmt, 2, store_nbytes=1 << 20) as load:
        assert load(1, (0,), 0.001) > 0
        assert load(2, (), 0.001) > 0
    with open_load(registry.cpu_experts(), fmt, 2, store_nbytes=1 << 20, tokens=2) as load:
        assert load(2, (), 0.001) > 0


def test_experts_without_extension_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "unavailable_reason", lambda name: "not built")
    with pytest.raises(MachineError, match="not built"):
        registry.cpu_experts()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_probes_without_a_gpu() -> None:
    assert gpu_kernels() is None


@needs_triton
def test_probe_kernels() -> None:
    from headrace.ops.triton import probes

    words = torch.arange(5000, dtype=torch.int64, device=DEVICE)
    sums = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    probes.read_kernel[(3,)](words, sums, 5000, 1024)
    assert int(sums.sum()) == 5000 * 4999 // 2
    copy = torch.zeros_like(words)
    probes.gather_kernel[(3,)](words, copy, 5000, 1024)
    assert torch.equal(copy, words)
    word = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    probes.nothing_kernel[(1,)](word)
    assert int(word) == 1


@needs_triton
@only_interpreted
def test_a_ping_without_answer_ends() -> None:
    from headrace.ops.triton import probes

    seq, ack = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    probes.ping_kernel[(1,)](seq, ack, 3, 5)
    assert int(seq) == 3


@needs_triton
@pytest.mark.slow
def test_probe_kernels_compile_for_hopper() -> None:
    module = "headrace.ops.triton.probes:"
    words = {"source": "*i64", "sums": "*i64", "target": "*i64", "num_words": "i32"}
    flags = {"seq": "*i32", "ack": "*i32", "count": "i32", "most_looks": "i32", "word": "*i32"}
    specs = [
        {
            "kernel": module + name,
            "signature": words | flags,
            "constexprs": {"WORDS": 2048} if name in ("read_kernel", "gather_kernel") else {},
            "options": {"num_warps": 8},
        }
        for name in ("read_kernel", "gather_kernel", "nothing_kernel", "ping_kernel")
    ]
    for compiled in cross_compile(specs):
        assert "error" not in compiled, compiled
        assert compiled["spills"] == 0
