"""The prefix cache: what is a hit, what never is."""

import pytest

from headrace.core.errors import InternalError
from headrace.kv.prefix import CacheSpace, PrefixCache

SPACE = CacheSpace()


def fill(cache, tokens, space=SPACE, first_block=0):
    parent, nodes = space, []
    size = cache.block_tokens
    for i in range(len(tokens) // size):
        block = first_block + i
        node = cache.insert(parent, tuple(tokens[i * size : (i + 1) * size]), block)
        nodes.append(node)
        parent = node
    return nodes


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_full_blocks_are_found_at_every_block_size(size):
    cache = PrefixCache(size)
    tokens = list(range(4 * size + 5))
    fill(cache, tokens)
    assert [n.block for n in cache.match(tokens, SPACE, len(tokens) - 1)] == [0, 1, 2, 3]
    assert [n.block for n in cache.match(tokens, SPACE, 4 * size)] == [0, 1, 2, 3]
    # a prompt of exactly four blocks: the last token has to be computed, so three blocks count
    exact = tokens[: 4 * size]
    assert [n.block for n in cache.match(exact, SPACE, len(exact) - 1)] == [0, 1, 2]
    changed = [*tokens[: 2 * size], -1, *tokens[2 * size + 1 :]]
    assert [n.block for n in cache.match(changed, SPACE, len(changed))] == [0, 1]


def test_b097_a_constant_hash_never_makes_a_hit():
    cache = PrefixCache(2, hash_key=lambda key: 7)
    fill(cache, [1, 2, 3, 4])
    assert [n.block for n in cache.match([1, 2, 3, 4], SPACE, 4)] == [0, 1]
    assert cache.match([9, 9, 3, 4], SPACE, 4) == []
    assert [n.block for n in cache.match([1, 2, 9, 9], SPACE, 4)] == [0]
    # equal tokens after another parent are another block
    fill(cache, [5, 6, 3, 4], first_block=10)
    assert [n.block for n in cache.match([5, 6, 3, 4], SPACE, 4)] == [10, 11]
    cache.forget(1)
    assert [n.block for n in cache.match([1, 2, 3, 4], SPACE, 4)] == [0]
    assert [n.block for n in cache.match([5, 6, 3, 4], SPACE, 4)] == [10, 11]


def test_b098_salt_and_adapter_are_separate_names():
    cache = PrefixCache(2)
    fill(cache, [1, 2], CacheSpace(salt="X"))
    assert cache.match([1, 2], CacheSpace(salt="X"), 2)
    for other in (CacheSpace(adapter="X"), CacheSpace(), CacheSpace("X", "X"), CacheSpace("Y")):
        assert cache.match([1, 2], other, 2) == []


def test_equal_content_is_stored_once():
    cache = PrefixCache(2)
    (first,) = fill(cache, [1, 2], first_block=3)
    assert cache.insert(SPACE, (1, 2), 8) is first
    assert len(cache) == 1


def test_b102_a_recycled_block_is_no_longer_found():
    cache = PrefixCache(2)
    fill(cache, [1, 2, 3, 4])
    with pytest.raises(InternalError, match="children"):
        cache.forget(0)
    cache.forget(1)
    cache.forget(0)
    assert cache.match([1, 2, 3, 4], SPACE, 4) == []
    fill(cache, [7, 8])  # block 0 again, with other tokens
    assert cache.match([1, 2], SPACE, 2) == []
    assert [n.block for n in cache.match([7, 8], SPACE, 2)] == [0]
    assert len(cache) == 1


def test_misuse_is_an_error():
    cache = PrefixCache(2)
    fill(cache, [1, 2])
    with pytest.raises(InternalError, match="full blocks"):
        cache.insert(SPACE, (1,), 5)
    with pytest.raises(InternalError, match="already holds"):
        cache.insert(SPACE, (5, 6), 0)
