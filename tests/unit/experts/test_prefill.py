"""The prefill crossover by hand, against a scan, and as the engine asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.experts.prefill import (
    PrefillRates,
    both_paths_seconds,
    expected_distinct,
    pieces,
    prefill_rates,
    routed_seconds,
    streamed_seconds,
    streaming_crossover,
)
from headrace.experts.split import PathRates

# The H200 machine and gpt-oss-120b's experts of 13.2 MB; the same beside PCIe 4.0 x4 and twelve channels.
H200 = PrefillRates(45.0, 75.0, 45.0, 13_219_200, tokens_of_a_read=2.6)
SLOW_LINK = PrefillRates(7.0, 345.0, 7.0, 13_219_200, tokens_of_a_read=2.6)
MOST = 128


def test_distinct_experts_by_hand() -> None:
    assert expected_distinct(1, 128, 4) == pytest.approx(4)
    # two tokens: 4 and, of the other 4, 124/128 are new: 7.875
    assert expected_distinct(2, 128, 4) == pytest.approx(7.875)
    assert expected_distinct(10_000, 128, 4) == pytest.approx(128)
    with pytest.raises(ConfigError, match="top-9 of 8"):
        expected_distinct(1, 8, 9)


def test_seconds_of_a_piece_by_hand() -> None:
    # one token: 4 experts over 45 + 75 GB/s
    assert routed_seconds(1, 128, 4, 1.0, H200) == pytest.approx(4 * 13.2192e6 / 120e9)
    assert routed_seconds(1, 128, 4, 0.0, H200) == 0.0
    assert routed_seconds(1, 128, 4, 0.0, replace(H200, piece_latency_s=1e-3)) == 1e-3
    # 128 tokens: (31/32)^128 is 0.01718, so 125.801 experts of 512/125.801 = 4.0699 tokens, for which
    # the CPU needs 4.0699/2.6 = 1.56535 reads: 75/1.56535 = 47.913 GB/s
    seconds = 125.801 * 13.2192e6 / (45e9 + 47.913e9)
    assert routed_seconds(128, 128, 4, 1.0, H200) == pytest.approx(seconds, rel=1e-4)
    # a layer of 128 experts, a quarter resident: 96 * 13.2 MB at 45 GB/s
    assert streamed_seconds(128, 0.75, H200) == pytest.approx(96 * 13.2192e6 / 45e9)


def test_a_chunk_goes_in_pieces() -> None:
    assert pieces(300, 128) == [128, 128, 44]
    assert pieces(256, 128) == [128, 128]
    assert pieces(7, 128) == [7]
    mixture = 128, 4, 0.5, H200
    assert both_paths_seconds(300, 128, *mixture) == pytest.approx(
        2 * routed_seconds(128, *mixture) + routed_seconds(44, *mixture)
    )


def test_a_fast_link_streams_a_long_chunk_and_splits_a_short_one() -> None:
    # 64 tokens: (31/32)^64 is 0.13109: 111.22 experts of 2.302 tokens at 120 GB/s, 0.0122 s against
    # 128 at 45: 0.0376 s. 2,048 tokens: 16 pieces of 0.0179 s, 0.286 s.
    assert both_paths_seconds(64, MOST, 128, 4, 1.0, H200) == pytest.approx(0.01225, rel=1e-3)
    assert streamed_seconds(128, 1.0, H200) == pytest.approx(0.03760, rel=1e-3)
    assert both_paths_seconds(2048, MOST, 128, 4, 1.0, H200) == pytest.approx(0.28637, rel=1e-3)
    at = streaming_crossover(128, 4, 1.0, H200, MOST)
    assert at is not None
    assert 64 < at < 2048


def test_a_slow_link_beside_fast_memory_splits_a_long_chunk() -> None:
    # 345/1.56535 = 220.40 GB/s: a piece takes 125.801 * 13.2192e6 / 227.40e9 = 7.313 ms, 16 of them 117 ms;
    # streaming 128 * 13.2192e6 / 7e9 = 241.7 ms. So up to 33 pieces (241.3 ms), then a token more or less.
    assert both_paths_seconds(2048, MOST, 128, 4, 1.0, SLOW_LINK) == pytest.approx(
        0.11701, rel=1e-3
    )
    assert streamed_seconds(128, 1.0, SLOW_LINK) == pytest.approx(0.24172, rel=1e-3)
    at = streaming_crossover(128, 4, 1.0, SLOW_LINK, MOST)
    assert at is not None
    assert 33 * 128 < at < 33 * 128 + 4


RATE = st.floats(0.5, 500.0)


@settings(max_examples=200, deadline=None)
@given(
    pcie=RATE,
    cpu=st.just(0.0) | RATE,
    stream=RATE,
    latency_s=st.just(0.0) | st.floats(1e-6, 1e-3),
    missing=st.floats(0.01, 1.0),
    mixture=st.sampled_from([(128, 4), (64, 8), (256, 8), (8, 2)]),
    most=st.integers(1, 256),
    tokens=st.integers(1, 20_000),
)
def test_the_choice_is_the_smaller_time(
    pcie, cpu, stream, latency_s, missing, mixture, most, tokens
) -> None:
    rates = PrefillRates(pcie, cpu, stream, 10**6, piece_latency_s=latency_s)
    at = streaming_crossover(*mixture, missing, rates, most)
    both_s = both_paths_seconds(tokens, most, *mixture, missing, rates)
    stream_s = streamed_seconds(mixture[0], missing, rates)
    if at is None or tokens < at:
        assert both_s <= stream_s * (1 + 1e-9)
    else:
        assert stream_s <= both_s * (1 + 1e-9)


@pytest.mark.parametrize("missing", [1.0, 0.6])
@pytest.mark.parametrize("rates", [H200, SLOW_LINK, replace(H200, cpu_gbps=0.0, stream_gbps=50.0)])
def test_the_crossover_is_where_a_scan_finds_it(missing: float, rates: PrefillRates) -> None:
    at = streaming_crossover(128, 4, missing, rates, MOST)
    assert at is not None
    stream = streamed_seconds(128, missing, rates)
    scan = next(
        t for t in range(1, 10**4) if both_paths_seconds(t, MOST, 128, 4, missing, rates) > stream
    )
    assert at == scan
    # ten tokens of an agent's turn touch 35 of 128 experts: never streamed here
    assert at > 10


def test_a_link_that_cannot_stream_never_does() -> None:
    assert streaming_crossover(64, 4, 1.0, replace(H200, stream_gbps=0.0), MOST) is None
    # 10% faster in big copies: D(T) > 64 / 1.1 needs (60/64)^T < 1 - 1/1.1: T = 38 (37.2)
    only_pcie = PrefillRates(50.0, 0.0, 55.0, 10**6)
    assert streaming_crossover(64, 4, 1.0, only_pcie, MOST) == 38


def test_what_is_all_resident_streams_for_nothing() -> None:
    assert streaming_crossover(64, 4, 0.0, replace(H200, piece_latency_s=1e-6), MOST) == 1


def test_rates_are_the_trackers() -> None:
    # four slices of 3 MB; streaming has the link alone, pieces pay both latencies
    paths = PathRates(45.0, 75.0, 3 * 10**6, 20e-6, 8e-6, pcie_alone_gbps=50.0, cpu_alone_gbps=80.0)
    found = prefill_rates(paths, 4)
    assert found == PrefillRates(45.0, 75.0, 50.0, 12 * 10**6, piece_latency_s=pytest.approx(28e-6))
    alike = replace(paths, pcie_alone_gbps=None)
    assert prefill_rates(alike, 4).stream_gbps == 45.0


def test_what_is_out_of_range() -> None:
    with pytest.raises(ConfigError, match="missing_share"):
        streaming_crossover(64, 4, 1.2, H200, MOST)
    with pytest.raises(ConfigError, match="0 tokens at a time"):
        streaming_crossover(64, 4, 1.0, H200, 0)
