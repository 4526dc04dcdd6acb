"""Promotion against cases worked by hand."""

from __future__ import annotations

import pytest

from headrace.experts.promotion import (
    IDLE_SHARE,
    Promotion,
    PromotionQueue,
    Valued,
    choose_promotions,
    idle_nbytes,
)
from headrace.experts.split import PathRates


def test_free_places_first_then_the_coldest_residents() -> None:
    found = choose_promotions(
        [Valued(1, 30.0), Valued(2, 90.0), Valued(3, 50.0)],
        [Valued(10, 2.0), Valued(11, 4.0)],
        num_free=1,
        limit=8,
    )
    # 2 into the free place, 3 (50) over 10 (2); 1 (30) is not worth 8 times 11 (4)
    assert found == (Promotion(2, None), Promotion(3, 10))


def test_the_limit_and_worthless_candidates() -> None:
    many = [Valued(k, 1.0) for k in range(5)]
    assert choose_promotions(many, [], num_free=9, limit=2) == (
        Promotion(0, None),
        Promotion(1, None),
    )
    assert choose_promotions([Valued(0, 0.0)], [], num_free=9, limit=2) == ()
    assert choose_promotions(many, [], num_free=9, limit=0) == ()


def test_hysteresis_stops_where_nothing_would_improve() -> None:
    residents = [Valued(10, 4.0)]
    assert choose_promotions([Valued(1, 32.0)], residents, num_free=0, limit=1) == ()
    found = choose_promotions([Valued(1, 32.1)], residents, num_free=0, limit=1)
    assert found == (Promotion(1, 10),)
    # and the one that left does not come back: 4.0 is not 8 times 32.1
    assert choose_promotions([Valued(10, 4.0)], [Valued(1, 32.1)], num_free=0, limit=1) == ()
    with pytest.raises(ValueError, match="gain"):
        choose_promotions([], [], num_free=0, limit=1, gain=0.5)


def test_idle_bytes_are_what_demand_leaves() -> None:
    rates = PathRates(10.0, 20.0, 10**6)
    # 1 ms is 10 MB; 4 slices of 1 MB are 0.4 ms of it
    assert idle_nbytes(1e-3, 0, rates) == pytest.approx(IDLE_SHARE * 10e6, abs=1)
    assert idle_nbytes(1e-3, 4, rates) == pytest.approx(IDLE_SHARE * 6e6, abs=1)
    assert idle_nbytes(1e-3, 40, rates) == 0
    assert idle_nbytes(1e-3, 0, PathRates(0.0, 20.0, 10**6)) == 0


def test_a_copy_in_pieces_counts_when_its_last_piece_is_there() -> None:
    queue = PromotionQueue(100)
    queue.offer([Promotion(7, None), Promotion(8, 3)])
    assert [(p.promotion.key, p.offset, p.nbytes, p.last) for p in queue.advance(60)] == [
        (7, 0, 60, False)
    ]
    assert [(p.promotion.key, p.offset, p.nbytes, p.last) for p in queue.advance(60)] == [
        (7, 60, 40, True),
        (8, 0, 20, False),
    ]
    assert queue.keys == {8}
    with pytest.raises(ValueError, match="under way"):
        queue.offer([])
    asked: list[int] = []

    def refuse(promotion: Promotion) -> bool:
        asked.append(promotion.key)
        return False

    assert [p.offset for p in queue.advance(30, refuse)] == [20]  # it has begun: nobody is asked
    assert asked == []
    queue.drop(8)
    assert queue.idle
    assert queue.advance(60) == []
    queue.offer([Promotion(9, 1)])
    assert queue.advance(60, refuse) == []
    assert (asked, queue.idle) == ([9], True)
