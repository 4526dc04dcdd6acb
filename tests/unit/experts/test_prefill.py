"""The prefill crossover by hand and against a scan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.errors import ConfigError
from headrace.experts.prefill import (
    PrefillRates,
    expected_distinct,
    routed_seconds,
    streamed_seconds,
    streaming_crossover,
)

# The H200 machine and gpt-oss-120b's experts: 13.2 MB, 2 * 3 * 2880^2 flops a token.
H200 = PrefillRates(51.0, 73.0, 55.5, 2000.0, 13_219_200, 2 * 3 * 2880 * 2880)


def test_distinct_experts_by_hand() -> None:
    assert expected_distinct(1, 128, 4) == pytest.approx(4)
    # two tokens: 4 and, of the other 4, 124/128 are new: 7.875
    assert expected_distinct(2, 128, 4) == pytest.approx(7.875)
    assert expected_distinct(10_000, 128, 4) == pytest.approx(128)
    with pytest.raises(ConfigError, match="top-9 of 8"):
        expected_distinct(1, 8, 9)


def test_seconds_by_hand() -> None:
    # one token: 4 experts over 51 + 73 GB/s
    assert routed_seconds(1, 128, 4, 1.0, H200) == pytest.approx(4 * 13.2192e6 / 124e9)
    assert routed_seconds(1, 128, 4, 0.0, H200) == 0.0
    # a layer of 128 experts, a quarter resident: 96 * 13.2 MB at 55.5 GB/s
    assert streamed_seconds(128, 0.75, H200) == pytest.approx(96 * 13.2192e6 / 55.5e9)


@pytest.mark.parametrize("missing", [1.0, 0.6])
@pytest.mark.parametrize("cpu_gflops", [0.0, 300.0, 2000.0])
def test_the_crossover_is_where_a_scan_finds_it(missing: float, cpu_gflops: float) -> None:
    rates = replace(H200, cpu_gflops=cpu_gflops)
    at = streaming_crossover(128, 4, missing, rates)
    assert at is not None
    stream = streamed_seconds(128, missing, rates)
    scan = next(t for t in range(1, 10**6) if routed_seconds(t, 128, 4, missing, rates) > stream)
    assert at == scan
    # ten tokens of an agent's turn touch 35 of 128 experts: never streamed here
    assert at > 10


def test_a_link_that_streams_no_faster_than_it_gathers_never_streams() -> None:
    only_pcie = PrefillRates(50.0, 0.0, 50.0, 0.0, 10**6, 10**6)
    assert streaming_crossover(64, 4, 1.0, only_pcie) is None
    assert streaming_crossover(64, 4, 1.0, replace(only_pcie, stream_gbps=0.0)) is None
    # 10% faster in big copies: D(T) > 64 / 1.1 needs (60/64)^T < 1 - 1/1.1: T = 38 (37.2)
    assert streaming_crossover(64, 4, 1.0, replace(only_pcie, stream_gbps=55.0)) == 38


def test_a_share_out_of_range() -> None:
    with pytest.raises(ConfigError, match="missing_share"):
        streaming_crossover(64, 4, 1.2, H200)
