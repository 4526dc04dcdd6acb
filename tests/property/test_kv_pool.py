"""The block pool against a naive model, under random operations (B110)."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.kv.block_pool import BlockPool

NUM_BLOCKS = 16


class PoolMachine(RuleBasedStateMachine):
    """Sequences hold lists of blocks; the model is those lists and a set of known blocks."""

    def __init__(self):
        super().__init__()
        self.evicted = []
        self.pool = BlockPool(NUM_BLOCKS, on_evict=self.evicted.append)
        self.held = []  # one list per holder
        self.known = set()

    def owners(self):
        return Counter(b for blocks in self.held for b in blocks)

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count):
        owned = set(self.owners())
        self.evicted.clear()
        blocks = self.pool.allocate(count)
        if count > NUM_BLOCKS - len(owned):
            assert blocks is None
            assert not self.evicted
            return
        assert len(set(blocks)) == count
        assert not owned & set(blocks)
        assert set(self.evicted) == self.known & set(blocks)
        self.known -= set(blocks)
        self.held.append(blocks)

    @rule(data=st.data())
    def share(self, data):
        candidates = sorted(set(self.owners()) | self.known)
        if candidates:
            blocks = data.draw(st.lists(st.sampled_from(candidates), max_size=4, unique=True))
            self.pool.share(blocks)
            self.held.append(blocks)

    @rule(data=st.data())
    def keep(self, data):
        owned = sorted(self.owners())
        if owned:
            block = data.draw(st.sampled_from(owned))
            self.pool.keep(block)
            self.known.add(block)

    @rule(data=st.data())
    def free_everything_of_some(self, data):
        if self.held:
            count = data.draw(st.integers(1, min(3, len(self.held))))
            gone, self.held = self.held[:count], self.held[count:]
            self.pool.free([b for blocks in gone for b in blocks])

    @rule()
    def drop_cached(self):
        owned = set(self.owners())
        self.evicted.clear()
        assert self.pool.drop_cached() == len(self.known - owned)
        assert set(self.evicted) == self.known - owned
        self.known &= owned

    @invariant()
    def matches(self):
        self.pool.check()
        owners = self.owners()
        for block in range(NUM_BLOCKS):
            assert self.pool.references(block) == owners[block]
            assert self.pool.is_kept(block) == (block in self.known)
        assert self.pool.num_available == NUM_BLOCKS - len(owners)
        assert self.pool.num_cached == len(self.known - set(owners))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
