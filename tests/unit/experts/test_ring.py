"""Places of the ring, runs of neighbours, and what is on its way, by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.experts.random_store import random_store
from headrace.experts.ring import ChunkRing, places_of, runs
from headrace.experts.slab import slab_layout
from headrace.experts.store import HostStore
from headrace.machine.device import HostDevice


@pytest.fixture(scope="module")
def store() -> Iterator[HostStore]:
    layout = slab_layout("mxfp4", 64, 64, has_bias=True, num_slices=2)
    made = random_store(layout, 2, 6, seed=4, threads=1)
    yield made
    made.close()


def _keys(*values: int):
    return np.array(values, np.int32)


def test_places_hold_two_experts_where_two_such_places_fit() -> None:
    assert places_of(20, 5) == (2, 10)
    assert places_of(143, 5) == (14, 10)
    assert places_of(7, 2) == (2, 3)
    assert places_of(1, 5) == (1, 1)
    assert places_of(0, 5) == (0, 1)


def test_neighbours_travel_together() -> None:
    assert runs(_keys(3, 4, 5, 9, 11, 12)) == [(0, 3, 3), (3, 9, 1), (4, 11, 2)]
    assert runs(_keys(0)) == [(0, 0, 1)]
    assert runs(_keys()) == []


def test_chunks_arrive_in_order_over_the_ends_of_layers(store: HostStore) -> None:
    slots = torch.zeros(7, store.layout.slice_nbytes, dtype=torch.uint8)
    ring = ChunkRing(HostDevice(), store)
    ring.reset(slots, 100)  # two places of three
    wanted = {0: _keys(1, 2, 3, 7), 1: _keys(0, 5, 6, 9, 10, 11)}
    for layer, keys in wanted.items():
        ring.add(layer, keys)
    for layer in (0, 1):
        keys, places, ends = ring.take(layer)
        assert keys.tolist() == wanted[layer].tolist()
        assert ends == [3, 4] if layer == 0 else [3, 6]
        # Chunks alternate between the places, also from layer to layer.
        assert places.tolist() == (
            [100, 101, 102, 103] if layer == 0 else [100, 101, 102, 103, 104, 105]
        )
        at = 0
        for chunk in ring.chunks(len(ends)):
            for key, slot in zip(chunk.keys, places[at : at + len(chunk.keys)]):
                want = store.tensor(layer).flatten(0, 1)[int(key)]
                assert torch.equal(slots[int(slot) - 100], want)
            at += len(chunk.keys)
    assert ring.take(0)[2] == []


def test_what_was_not_taken_is_forgotten(store: HostStore) -> None:
    ring = ChunkRing(HostDevice(), store)
    ring.reset(torch.zeros(4, store.layout.slice_nbytes, dtype=torch.uint8), 0)
    ring.add(0, _keys(*range(12)))
    ring.settle()
    assert ring.take(0)[2] == []
