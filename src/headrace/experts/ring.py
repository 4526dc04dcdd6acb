"""Slots that the copy engine fills with chunks of slices, ahead of what is computed.

The ring knows the slices of more than one layer if it is told of them early: then it runs ahead by its
size, over layers' ends, while attention runs. Neighbours in host memory travel as one copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.experts.store import HostStore
from headrace.machine.device import Device, Event

Keys = npt.NDArray[np.int32]  # of a layer: expert * slices + slice


@dataclass(frozen=True)
class RingChunk:
    """Slices of one layer that arrive together, in slots ``first``, ``first + 1``, ..."""

    layer: int
    keys: Keys
    place: int
    first: int


def places_of(num_slots: int, num_slices: int) -> tuple[int, int]:
    """(places, slots of a place): two experts where there is room for two such places, that is 0.48 ms
    of PCIe 5, several times what the launches of a place take the host."""
    size = max(1, min(2 * num_slices, num_slots // 2))
    return num_slots // size, size


class ChunkRing:
    """Transit slots in places of equal size."""

    def __init__(self, device: Device, store: HostStore) -> None:
        self._device, self._store = device, store
        self._slots, self._first = torch.zeros(0), 0
        self._copies = device.stream()
        self._start = device.event()
        self._began, self._ended = device.event(), device.event()  # the copies of one ``add``
        self._arrived: list[Event] = []
        self._computed: list[Event] = []
        self._waiting: deque[tuple[int, Keys]] = deque()  # chunks not yet on their way
        self._coming: deque[RingChunk] = deque()
        self.reset(self._slots, 0)

    def reset(self, slots: torch.Tensor, first: int) -> None:
        """Forget what was asked for, and use these slots. Copies wait for all work so far: others
        used the slots.

        slots: uint8 [n, slice_nbytes], neighbouring slots; first: the number of the first one.
        """
        self._slots, self._first = slots, first
        self.places, self.size = places_of(len(slots), self._store.layout.num_slices)
        while len(self._arrived) < self.places:
            self._arrived.append(self._device.event())
            self._computed.append(self._device.event())
        self._waiting.clear()
        self._coming.clear()
        self._sent = 0
        self._used = [False] * self.places  # by this prompt: ``computed`` says when it ended
        self._start.record()
        self._copies.wait_event(self._start)

    def settle(self) -> None:
        """Let what follows on the current stream wait for copies that nobody waited for."""
        if self._coming:
            self._arrived[self._coming[-1].place].wait()
            self._coming.clear()
            self._waiting.clear()

    def add(self, layer: int, keys: Keys) -> None:
        """Ask for slices of a layer, in this order."""
        if not self._waiting and not self._coming:
            self._began.record(self._copies)
        for start in range(0, len(keys), self.size):
            self._waiting.append((layer, keys[start : start + self.size]))
        self._send()

    def take(self, layer: int) -> tuple[Keys, Keys, list[int]]:
        """Of the slices of a layer that are on their way or waiting, which must be the next ones: keys,
        slots, and where in these lists each chunk ends."""
        chunks = [chunk.keys for chunk in self._coming if chunk.layer == layer]
        chunks += [keys for at, keys in self._waiting if at == layer]
        sizes = [len(keys) for keys in chunks]
        keys = np.concatenate([np.zeros(0, np.int32), *chunks])
        chunk = np.repeat(np.arange(len(chunks)), sizes)
        ends = np.cumsum(sizes, dtype=np.int32)
        place = (self._sent - len(self._coming) + chunk) % self.places if len(keys) else chunk
        inside = np.arange(len(keys)) - (ends[chunk] - np.array(sizes, np.int32)[chunk])
        slots = self._first + place * self.size + inside
        return keys, slots.astype(np.int32), ends.tolist()

    def chunks(self, count: int) -> Generator[RingChunk, None, None]:
        """The next chunks in order; one is valid on the current stream until the next is asked for."""
        for _ in range(count):
            chunk = self._coming.popleft()
            self._arrived[chunk.place].wait()
            yield chunk
            self._computed[chunk.place].record()
            self._used[chunk.place] = True
            self._send()

    def _send(self) -> None:
        while self._waiting and len(self._coming) < self.places:
            layer, keys = self._waiting.popleft()
            place = self._sent % self.places
            chunk = RingChunk(layer, keys, place, self._first + place * self.size)
            if self._used[place]:
                self._copies.wait_event(self._computed[place])
            with self._device.use(self._copies):
                self._copy(chunk)
                self._arrived[place].record()
            self._coming.append(chunk)
            self._sent += 1
            if not self._waiting:
                self._ended.record(self._copies)

    def seconds(self) -> float:
        """How long what was asked for last took to arrive, once it was computed; 0 if nobody knows."""
        return self._began.elapsed_time(self._ended) * 1e-3

    def _copy(self, chunk: RingChunk) -> None:
        source = self._store.tensor(chunk.layer).flatten(0, 1)
        target = self._slots[chunk.place * self.size :]
        for at, key, count in runs(chunk.keys):
            to = target[at : at + count, : source.shape[1]]  # slots may be longer than the slices
            to.copy_(source[key : key + count], non_blocking=True)


def runs(keys: Sequence[int] | Keys) -> list[tuple[int, int, int]]:
    """(index, first key, count) of each run of keys that follow each other."""
    numbers = np.asarray(keys)
    if not len(numbers):
        return []
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    ends = np.append(starts[1:], len(numbers))
    return [(int(a), int(numbers[a]), int(b - a)) for a, b in zip(starts, ends)]
