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

Keys = npt.NDArray[np.int32]
Answer = Callable[[int, torch.Tensor], None]  # request's number, the sum

POLL_S = 20e-6
TIMEOUT_S = 10.0


def work_of(
    ids: torch.Tensor, weights: torch.Tensor, keys: Sequence[int] | Keys, num_slices: int
) -> Items:
    """The items of these slices (expert * slices + slice, ascending) with all pairs of the chunk."""
    chosen_ids: npt.NDArray[np.int32] = ids.numpy()
    ordered = np.sort(chosen_ids, 1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        return _merged_work(ids, weights, keys, num_slices)
    # The CPU waits for this: without the general case's searches it takes a quarter of the time.
    flat = chosen_ids.ravel()
    order = np.argsort(flat, kind="stable")
    order = order[np.count_nonzero(flat < 0) :]
    counts = np.bincount(flat[order])
    starts = np.cumsum(counts) - counts
    wanted = np.asarray(keys)
    expert = wanted // num_slices
    items = np.stack([expert, wanted % num_slices, starts[expert], counts[expert]], 1)
    pair_weight: npt.NDArray[np.float32] = weights.numpy().ravel()[order]
    tensor = torch.from_numpy  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Items(
        tensor(items.astype(np.int32)),
        tensor((order // ids.shape[1]).astype(np.int32)),
        tensor(pair_weight),
    )


def _merged_work(
    ids: torch.Tensor, weights: torch.Tensor, keys: Sequence[int] | Keys, num_slices: int
) -> Items:
    """The same where rows name an expert twice."""
    everything = items_of(ids, weights, num_slices)
    items: npt.NDArray[np.int32] = everything.items.numpy()
    index = items[:, 0] * num_slices + items[:, 1]
    chosen = torch.from_numpy(items[np.isin(index, np.asarray(keys))])  # pyright: ignore[reportUnknownMemberType]
    return Items(chosen, everything.pair_token, everything.pair_weight)


class ServiceShare:
    """``stream.CpuShare`` through the running service's block.

    Args:
        block: uint8, the request block; abort: reads why the service gave up, 0 if it did not.
        answer: adds the answer to a request to a sum on the device without the host's waiting; None:
            the host waits.
        busy_s: the service's seconds of computing.
    """

    def __init__(
        self,
        block: torch.Tensor,
        fields: RequestBlock,
        num_slices: int,
        abort: Callable[[], int],
        answer: Answer | None = None,
        busy_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.max_tokens = fields.max_tokens
        self._fields, self._num_slices, self._abort = fields, num_slices, abort
        self._block, self._answer, self.busy_s = block, answer, busy_s
        self._bytes: npt.NDArray[np.uint8] = block.numpy()
        self._seq = 0
        self._tokens = 0

    def _ints(self, at: int, count: int) -> npt.NDArray[Any]:
        return self._bytes[at : at + 4 * count].view(np.int32)

    def _floats(self, at: int, count: int) -> npt.NDArray[Any]:
        return self._bytes[at : at + 4 * count].view(np.float32)

    def _rows(self, at: int, num_tokens: int) -> torch.Tensor:
        hidden = self._fields.hidden
        own = self._block[at : at + 4 * num_tokens * hidden]
        return own.view(torch.float32).view(num_tokens, hidden)

    def rows(self, num_tokens: int) -> torch.Tensor:
        """In the block, which nobody reads between two requests."""
        return self._rows(self._fields.x, num_tokens)

    def begin(
        self, layer: int, ids: torch.Tensor, weights: torch.Tensor, keys: Sequence[int] | Keys
    ) -> None:
        f, work = self._fields, work_of(ids, weights, keys, self._num_slices)
        items, pairs = len(work.items), len(work.pair_token)
        self._tokens = ids.shape[0]
        self._ints(f.header, 5)[:] = (layer, self._tokens, items, pairs, 0)
        self._ints(f.items, 4 * items)[:] = work.items.numpy().ravel()
        self._ints(f.pair_token, pairs)[:] = work.pair_token.numpy()
        self._floats(f.pair_weight, pairs)[:] = work.pair_weight.numpy()
        self._seq -= 1
        self._ints(f.seq, 1)[0] = self._seq

    def add_to(self, out: torch.Tensor) -> None:
        """Add the answer.

        Raises:
            WorkerLostError: none came, and the host waited for it. Where the device waits, the end of
                the step finds that out.
        """
        if self._answer is not None:
            self._answer(self._seq, out)
            return
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
        out += self._rows(f.out, self._tokens).to(out.device)


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
        self._x = self._out = torch.zeros(0)

    def rows(self, num_tokens: int) -> torch.Tensor:
        self._x = torch.empty(num_tokens, self._layouts[0].hidden)
        return self._x

    def begin(
        self, layer: int, ids: torch.Tensor, weights: torch.Tensor, keys: Sequence[int] | Keys
    ) -> None:
        layout = self._layouts[layer]
        work = work_of(ids, weights, keys, layout.num_slices)
        self._out = self._kernels.run_now(
            layout,
            self._bases[layer],
            self._num_experts,
            self._act,
            self._x,
            work.items,
            work.pair_token,
            work.pair_weight,
        )

    def add_to(self, out: torch.Tensor) -> None:
        out += self._out.to(out.device)

    def busy_s(self) -> float:
        return 0.0
