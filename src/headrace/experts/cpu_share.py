"""The CPU's part of a prompt chunk: requests to the expert service, written by the host.

Decoding steps number their requests from 1 up on the GPU; the host counts down from -1, so that a new
number always differs from the last one, whoever asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.errors import WorkerLostError
from headrace.experts.items import Items, items_of
from headrace.experts.request_block import RequestBlock
from headrace.experts.slab import SlabLayout
from headrace.ops.expert_records import CpuExperts
from headrace.ops.records import Activation

POLL_S = 20e-6
TIMEOUT_S = 10.0


def work_of(
    ids: torch.Tensor, weights: torch.Tensor, keys: Sequence[int], num_slices: int
) -> Items:
    """The items of these slices (expert * slices + slice, ascending) with all pairs of the chunk."""
    everything = items_of(ids, weights, num_slices)
    index = everything.items[:, 0].long() * num_slices + everything.items[:, 1].long()
    chosen = torch.isin(index, torch.tensor(list(keys)))
    return Items(everything.items[chosen], everything.pair_token, everything.pair_weight)


class ServiceShare:
    """``stream.CpuShare`` through the running service's block.

    Args:
        block: uint8, the request block; abort: reads why the service gave up, 0 if it did not.
    """

    def __init__(
        self, block: torch.Tensor, fields: RequestBlock, num_slices: int, abort: Callable[[], int]
    ) -> None:
        self.max_tokens = fields.max_tokens
        self._fields, self._num_slices, self._abort = fields, num_slices, abort
        self._bytes: npt.NDArray[np.uint8] = block.numpy()
        self._seq = 0
        self._tokens = 0

    def _ints(self, at: int, count: int) -> npt.NDArray[Any]:
        return self._bytes[at : at + 4 * count].view(np.int32)

    def _floats(self, at: int, count: int) -> npt.NDArray[Any]:
        return self._bytes[at : at + 4 * count].view(np.float32)

    def begin(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        keys: Sequence[int],
    ) -> None:
        f, work = self._fields, work_of(ids, weights, keys, self._num_slices)
        items, pairs = len(work.items), len(work.pair_token)
        self._tokens = x.shape[0]
        self._ints(f.header, 4)[:] = (layer, self._tokens, items, pairs)
        self._ints(f.items, 4 * items)[:] = work.items.numpy().ravel()
        self._ints(f.pair_token, pairs)[:] = work.pair_token.numpy()
        self._floats(f.pair_weight, pairs)[:] = work.pair_weight.numpy()
        self._floats(f.x, x.numel())[:] = x.numpy().ravel()
        self._seq -= 1
        self._ints(f.seq, 1)[0] = self._seq

    def finish(self) -> torch.Tensor:
        """Wait for the answer.

        Raises:
            WorkerLostError: none came.
        """
        f = self._fields
        ack, end = self._ints(f.ack, 1), time.monotonic() + TIMEOUT_S
        while int(ack[0]) != self._seq:
            if self._abort() or time.monotonic() > end:
                self._ints(f.abort, 1)[0] = self._abort() or 1
                raise WorkerLostError(
                    "experts on the CPU: no answer to a prompt chunk",
                    hint="the request can be sent again; the CPU's threads are started anew",
                )
            time.sleep(POLL_S)
        out = torch.empty(self._tokens, f.hidden)
        out.numpy()[...] = self._floats(f.out, out.numel()).reshape(self._tokens, -1)
        return out


class DirectShare:
    """``stream.CpuShare`` on the calling thread, for hosts without a service."""

    def __init__(
        self,
        kernels: CpuExperts,
        layouts: Sequence[SlabLayout],
        bases: Sequence[int],
        num_experts: int,
        act: Activation,
    ) -> None:
        self.max_tokens = 1 << 30
        self._kernels, self._layouts, self._bases = kernels, tuple(layouts), tuple(bases)
        self._num_experts, self._act = num_experts, act
        self._out = torch.zeros(0)

    def begin(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        keys: Sequence[int],
    ) -> None:
        layout = self._layouts[layer]
        work = work_of(ids, weights, keys, layout.num_slices)
        self._out = self._kernels.run_now(
            layout,
            self._bases[layer],
            self._num_experts,
            self._act,
            x,
            work.items,
            work.pair_token,
            work.pair_weight,
        )

    def finish(self) -> torch.Tensor:
        return self._out
