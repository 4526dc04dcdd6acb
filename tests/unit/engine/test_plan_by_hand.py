"""Speeds of plans from bytes and rates by hand: all in VRAM, experts in host memory, all on the CPU.

Shares are those of ``explain/engines.toml``: reads get 0.834 of VRAM's peak and its kernels 0.822 of that, a
copy 0.88 of the link's, the CPU's reads 0.75 of the channels' and its kernels 0.85 of that.
"""

from __future__ import annotations

import pytest

from headrace.core.config_library import bundled_model
from headrace.engine.plan import make_plan
from headrace.engine.plan_memory import Workload
from headrace.machine.known import known_machine

KERNEL_S = 1.5e-6  # of a graph's kernels: ten a layer, eight more with a mixture


def planned(model: str, machine: str, work: Workload):
    found = make_plan(bundled_model(model).spec(), known_machine(machine), work)
    assert found.speed is not None
    return found


def test_all_in_vram():
    found = planned("llama-3-8b", "rtx-4090", Workload(8192))
    linear = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    nbytes = 2 * (linear + 4096 * 128256) + 32 * 8 * 128 * 2 * 2 * 4096  # half of the context
    wanted = nbytes / (1008e9 * 0.834 * 0.822) + 32 * 10 * KERNEL_S
    assert 1 / found.speed.tokens_s.expected == pytest.approx(wanted, rel=0.01)
    # a prompt of 2,048: two FLOPs a weight, four a pair and element of the heads
    flops = 2048 * 2 * linear + 4 * 4096 * 32 * 2048 * 2049 / 2
    assert found.speed.ttft_s.expected == pytest.approx(flops / (165.2e12 * 0.776 * 0.9), rel=0.03)


def test_experts_in_host_memory():
    found = planned("gpt-oss-120b", "rtx-5090", Workload(8192))
    expert = 3 * 2880 * 2880 * 17 / 32 + 2 * (2 * 2880 + 2880)  # biases in bfloat16
    speed = found.speed
    missed = 36 * 4 * expert * (1 - speed.hit_rate.expected)
    rest = 2 * (36 * (2880 * 5120 + 4096 * 2880 + 2880 * 128) + 2880 * 201088)
    cache = 2 * 8 * 64 * 2 * (18 * 4096 + 18 * 128)
    dense_s = (rest + cache) / (1792e9 * 0.834 * 0.822) + 36 * 18 * KERNEL_S + 36 * 3.7e-6
    link_s = missed * speed.fetch_share / (63.02e9 * 0.88)
    cpu_s = missed * (1 - speed.fetch_share) / (89.6e9 * 0.75 * 0.85)
    channels_s = missed * speed.fetch_share / (89.6e9 * 0.75) + cpu_s * 0.85
    wanted = dense_s + max(link_s, cpu_s, channels_s)
    assert 1 / speed.tokens_s.expected == pytest.approx(wanted, rel=0.02)
    # a prompt waits for the experts that are not resident
    streamed = 36 * 128 * expert * (1 - found.layout.resident) / (63.02e9 * 0.88)
    assert speed.ttft_s.expected == pytest.approx(streamed, rel=0.03)


def test_all_on_the_cpu():
    found = planned("gpt-oss-20b", "ddr5-6000-dual", Workload(8192, kv_format="f32"))
    expert = 3 * 2880 * 2880 * 17 / 32 + 2 * (2 * 2880 + 2880)
    weights = 24 * 4 * expert + 2 * (24 * (2880 * 5120 + 4096 * 2880) + 2880 * 201088)
    cache = 2 * 8 * 64 * 4 * (12 * 4096 + 12 * 128)
    reads = 96e9 * 0.75
    wanted = weights / (reads * 0.85) + cache / (reads * 0.44)  # attention's own share
    assert 1 / found.speed.tokens_s.expected == pytest.approx(wanted, rel=0.02)
