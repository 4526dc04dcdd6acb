"""The block pool: conservation, all-or-nothing allocation, order of eviction."""

import pytest

from headrace.core.errors import InternalError
from headrace.kv.block_pool import BlockPool


def test_b112_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first is not None
    assert sorted(first) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    pool.check()
    assert pool.allocate(1) == [3]
    assert pool.allocate(0) == []


def test_b111_a_block_named_twice_drops_two_references_and_is_queued_once():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block, block])
    assert pool.references(block) == 0
    assert pool.num_available == 2
    pool.check()
    taken = pool.allocate(2)
    assert sorted(taken) == [0, 1]


def test_b111_a_double_free_in_one_call_is_refused_and_changes_nothing():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    with pytest.raises(InternalError, match="freed 2 times, but it has 1"):
        pool.free([b, a, a])
    assert (pool.references(a), pool.references(b)) == (1, 1)
    assert pool.num_available == 1
    pool.check()


def test_free_and_share_of_a_free_block_are_refused():
    pool = BlockPool(2)
    with pytest.raises(InternalError):
        pool.free([0])
    with pytest.raises(InternalError):
        pool.share([0])
    with pytest.raises(InternalError):
        pool.keep(0)


def test_cached_blocks_are_evicted_in_order_of_release_and_only_when_needed():
    evicted = []
    pool = BlockPool(4, on_evict=evicted.append)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.keep(block)
    pool.free([c, b])  # deepest first
    pool.free([a])
    assert pool.num_cached == 3
    (d,) = pool.allocate(1)
    assert evicted == []  # the free block went first
    pool.share([b])  # a hit takes b out of the queue
    assert pool.allocate(2) == [c, a]
    assert evicted == [c, a]
    assert not pool.is_kept(c)
    assert pool.allocate(1) is None
    pool.free([b, d])
    pool.check()
    assert pool.drop_cached() == 1
    assert evicted == [c, a, b]
    pool.check()


def test_released_blocks_are_reused_first():
    """Pages are touched on first use: a small load must not walk through the whole pool."""
    pool = BlockPool(100)
    for _ in range(50):
        blocks = pool.allocate(2)
        assert set(blocks) <= {0, 1}
        pool.free(blocks)


def test_b110_check_finds_a_block_in_two_places():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool._free_first.append(block)
    with pytest.raises(InternalError, match="in 2 places"):
        pool.check()
