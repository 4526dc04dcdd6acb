"""The length of prompts' chunks, worked out by hand."""

from __future__ import annotations

import pytest

from headrace.experts.chunk_choice import (
    ChunkPrice,
    choose_chunk,
    next_chunk,
    reason_of,
    tokens_beside,
    with_slack,
)

MIB = 1 << 20


def _prices(stream_s: float, token_s: float, slot_s: float = 0.0) -> list[ChunkPrice]:
    """A chunk takes max(S, c T); a decoding step 10 ms and ``slot_s`` more with each doubling."""
    sizes = (2048, 4096, 8192, 16_384)
    return [
        ChunkPrice(t, max(stream_s, token_s * t), 0.010 + slot_s * i, 700 * MIB + t * 24 * 1024)
        for i, t in enumerate(sizes)
    ]


def test_a_stream_of_a_second_is_worth_long_chunks() -> None:
    """8 prompt tokens: 4.0, 2.0, 1.0 and 0.5 ms beside 10 of a step: 14, 12, 11 and 10.5 ms."""
    prices = _prices(1.024, 50e-6)
    assert [round(1e3 * p.seconds, 3) for p in prices] == [14.0, 12.0, 11.0, 10.5]
    assert choose_chunk(prices).tokens == 16_384
    # Slots of 0.6 ms a doubling: 14, 12.6, 12.2, 12.3. The last one costs more than it gains.
    assert choose_chunk(_prices(1.024, 50e-6, 6e-4)).tokens == 8192
    # At 115 us a token 8,192 take 1.024 s, and 16,384 1.88 s: a token 125 and 115 us, 8 % less.
    assert choose_chunk(_prices(1.024, 115e-6)).tokens == 8192
    assert choose_chunk(_prices(1.024, 110e-6)).tokens == 16_384


def test_a_gpu_that_is_slower_than_the_link_needs_no_long_chunks() -> None:
    """At 1 ms a token 2,048 take 2 s and PCIe waits already."""
    prices = _prices(1.024, 1e-3)
    assert [p.seconds for p in prices] == pytest.approx([0.018] * 4)
    assert choose_chunk(prices).tokens == 2048


def test_beside_others_a_chunk_takes_hardly_longer_than_the_shortest() -> None:
    """S = 1 s and 100 us a token: 1, 1, 1 and 1.64 s."""
    prices = _prices(1.0, 1e-4)
    assert [p.chunk_s for p in prices] == pytest.approx([1.0, 1.0, 1.0, 1.6384])
    assert tokens_beside(prices, prices[3]) == 8192
    assert tokens_beside(prices, prices[1]) == 4096
    # 70 us: 1.147 s, within a quarter of a second.
    assert tokens_beside(_prices(1.0, 7e-5), prices[3]) == 16_384


def test_the_reason_says_what_is_gained_and_what_it_costs() -> None:
    prices = _prices(1.024, 50e-6)
    said = reason_of(prices, prices[2])
    assert "1.02 s" in said
    assert "2,000 tok/s in 2,048, 4,000 tok/s in 4,096, 8,000 tok/s in 8,192" in said
    assert "+0.14 GiB" in said  # 6,144 tokens of 24 KiB: 144 MiB
    assert "GiB" not in reason_of(prices, prices[0])
    assert with_slack(8192, 131_072) == 9216
    assert with_slack(8192, 9000) == 9000
    assert with_slack(2048, 1000) == 2048


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (8192, [8192]),
        (8200, [8192, 8]),  # 8 tokens take only the experts that they are routed to
        (8430, [8192, 238]),
        (8431, [4216, 4215]),  # streamed again, for whatever number of tokens
        (8492, [4246, 4246]),
        (24_576, [8192, 8192, 8192]),
        (24_676, [8192, 8192, 8192, 100]),
        (25_000, [6250, 6250, 6250, 6250]),
    ],
)
def test_a_prompt_is_divided_into_as_few_and_equal_chunks(prompt: int, chunks: list[int]) -> None:
    found: list[int] = []
    while prompt:
        found.append(next_chunk(prompt, 8192, 238))
        prompt -= found[-1]
    assert found == chunks


def test_equal_chunks_never_take_longer_than_long_ones_and_a_rest() -> None:
    """S = 1.15 s, c = 150 us: 8,192 tokens take 1.23 s. 8,492 tokens are 1.2288 + 1.15 s or 2 x 1.15; 40,000
    are 4 x 1.2288 + 1.15 (7,232 tokens: 1.0848 < S) or 5 x 1.2 s."""

    def seconds(chunks: list[int]) -> float:
        return sum(max(1.15, 150e-6 * tokens) for tokens in chunks)

    for prompt, apart, equal in ((8492, 2.3788, 2.3), (40_000, 6.0652, 6.0)):
        whole, rest = divmod(prompt, 8192)
        assert seconds([8192] * whole + [rest]) == pytest.approx(apart)
        found, left = list[int](), prompt
        while left:
            found.append(next_chunk(left, 8192, 0))
            left -= found[-1]
        assert seconds(found) == pytest.approx(equal)
