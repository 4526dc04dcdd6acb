"""What the CPU's expert kernels and their service take and give: records and the shapes of others'.

The layouts themselves live a layer above (``experts.slab``, ``experts.request_block``); here is what
the kernels need to see of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from headrace.formats.base import PackedTensor
from headrace.ops.records import Activation

# Rows of a long chunk, float32 [n, hidden], made when they are asked for.
Rows = Callable[[slice], torch.Tensor]


@dataclass(frozen=True)
class RouterView:
    """What a layer's routing can be guessed with: its router behind the norm before it.

    weight: [E, D] as stored; bias: float32 [E] or None; scale: float32 [D], the norm's weight
    """

    weight: PackedTensor
    bias: torch.Tensor | None
    scale: torch.Tensor
    eps: float
    top_k: int


class SlicePart(Protocol):
    """A part of a slice: bytes from its start, and between two of its rows."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def row_nbytes(self) -> int: ...


class SliceLayout(Protocol):
    """How an expert is cut into slices: ``experts.slab.SlabLayout``."""

    @property
    def format(self) -> str: ...
    @property
    def down_format(self) -> str: ...
    @property
    def block_factors(self) -> bool: ...
    @property
    def hidden(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def num_slices(self) -> int: ...
    @property
    def slice_nbytes(self) -> int: ...
    @property
    def parts(self) -> Sequence[SlicePart]: ...


class BlockFields(Protocol):
    """Sizes of a request block and the offsets of its fields: ``experts.request_block.RequestBlock``."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def max_items(self) -> int: ...
    @property
    def max_pairs(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def ack(self) -> int: ...
    @property
    def abort(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def ready_parts(self) -> int: ...
    @property
    def header(self) -> int: ...
    @property
    def items(self) -> int: ...
    @property
    def pair_token(self) -> int: ...
    @property
    def pair_weight(self) -> int: ...
    @property
    def x(self) -> int: ...
    @property
    def out(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class ExpertFault(IntEnum):
    """Why a request was not answered: what ``abort`` holds. enum class ExpertFault, native."""

    NONE = 0
    HOST = 1  # written by whoever gave up waiting
    LAYER = 2
    TOKENS = 3
    ITEMS = 4
    PAIRS = 5
    EXPERT = 6
    SLICE = 7
    ORDER = 8
    RANGE = 9
    TOKEN = 10
    TOO_MANY = 11
    WORKER = 12
    STALLED = 13
    STOPPED = 14

    @property
    def meaning(self) -> str:
        """One clause for people."""
        return _MEANINGS[self]


_MEANINGS = {
    ExpertFault.NONE: "no fault",
    ExpertFault.HOST: "the host gave up",
    ExpertFault.LAYER: "the layer is out of range",
    ExpertFault.TOKENS: "the number of tokens is not 1 to the block's most",
    ExpertFault.ITEMS: "the number of items is beyond the block's",
    ExpertFault.PAIRS: "the number of pairs is beyond the block's",
    ExpertFault.EXPERT: "an item's expert is out of range",
    ExpertFault.SLICE: "an item's slice is out of range",
    ExpertFault.ORDER: "items or an item's tokens do not ascend",
    ExpertFault.RANGE: "an item's pairs lie beyond the request's",
    ExpertFault.TOKEN: "a pair's token is out of range",
    ExpertFault.TOO_MANY: "the items share more pairs than experts can have",
    ExpertFault.WORKER: "a thread failed",
    ExpertFault.STALLED: "a thread did not finish in time",
    ExpertFault.STOPPED: "the service was stopped before it answered",
}


class ServiceFault(IntEnum):
    """What a test makes one thread do when the next request comes."""

    NONE = 0
    DIE = 1
    HANG = 2
    FAIL = 3
    LATE = 4  # wait until the others have answered


@dataclass(frozen=True)
class ServiceStats:
    """Counted since the start, sums over requests. ``busy_s``: from seeing a request to its last row.

    square_nbytes, nbytes_s: of bytes squared, and of bytes times busy seconds: with them what a request
    takes beside its bytes can be told from what its bytes take.
    """

    requests: int
    refused: int
    nbytes: int  # of slices that were computed
    busy_s: float
    square_nbytes: float = 0.0
    nbytes_s: float = 0.0

    def __add__(self, other: ServiceStats) -> ServiceStats:
        return ServiceStats(
            self.requests + other.requests,
            self.refused + other.refused,
            self.nbytes + other.nbytes,
            self.busy_s + other.busy_s,
            self.square_nbytes + other.square_nbytes,
            self.nbytes_s + other.nbytes_s,
        )


@dataclass(frozen=True)
class ServiceOptions:
    """
    threads: that compute, the polling one included.
    cpus: one CPU for each thread, or None: where the system puts them.
    apart: keep the process's other Python threads off ``cpus``. Not for whoever asks from one thread while
        another spins: both would share what is left.
    idle_s: how long threads spin for the next request before they sleep. A decode step is 5 to 20 ms.
    stall_s: a request that takes longer is given up, and the service with it. The largest request, 128
        experts of 13 MB, takes 20 ms at 85 GB/s and under a second on a laptop.
    """

    threads: int
    cpus: tuple[int, ...] | None = None
    apart: bool = True
    idle_s: float = 0.05
    stall_s: float = 10.0


class ExpertService(Protocol):
    """Threads that answer the requests of one block; see ``ops.cpu.expert_service``."""

    def start(self) -> None: ...
    def stop(self, timeout_s: float = 2.0) -> None: ...
    def running(self) -> bool: ...
    def wake(self) -> None: ...
    def heartbeat(self) -> int: ...
    def stats(self) -> ServiceStats: ...
    def fault(self) -> ExpertFault: ...
    def request(self, timeout_s: float) -> float: ...
    def inject(self, fault: ServiceFault, thread: int) -> None: ...


class CpuExperts(Protocol):
    """The module ``ops.cpu.expert_service``, as ``ops.registry.cpu_experts`` returns it."""

    def expert_service(
        self,
        layouts: Sequence[SliceLayout],
        bases: Sequence[int],
        num_experts: int,
        act: Activation,
        block: torch.Tensor,
        fields: BlockFields,
        options: ServiceOptions,
    ) -> ExpertService: ...

    def run_now(
        self,
        layout: SliceLayout,
        base: int,
        num_experts: int,
        act: Activation,
        x: torch.Tensor,
        items: torch.Tensor,
        pair_token: torch.Tensor,
        pair_weight: torch.Tensor,
        threads: int | None = None,
    ) -> torch.Tensor: ...
