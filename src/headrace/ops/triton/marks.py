"""Points in a GPU's work, and when it passed them: by a kernel that notes the GPU's clock.

A kernel and no event: its cost inside a captured graph is that of any small kernel.
"""

# ``kernel[grid](...)`` is Triton's launch syntax.
# pyright: basic, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import time
from itertools import pairwise

import torch

from headrace.core.errors import InternalError
from headrace.ops.triton.control import interpreted
from headrace.ops.triton.probes import stamp_kernel

NANO = 1e9
# A long chunk's layers call their operations once for each piece: 48 layers of 13 operations have 5,600
# points for 9 pieces (16,384 tokens and what is allowed for). Too few would fail the request that is watched.
MOST_POINTS = 1 << 17  # 1 MiB


class StampMarks:
    """See ``ops.measure.Marks``. In the interpreter the clock is the host's.

    Args:
        most: points between ``begin`` and the next one.
    """

    def __init__(self, device: torch.device, most: int = MOST_POINTS) -> None:
        self._times = torch.zeros(most, dtype=torch.int64, device=device)
        self._at = 0

    def begin(self) -> None:
        """The first point."""
        self._at = 0
        self.point()

    def point(self) -> None:
        """One more point, behind all that was launched so far."""
        if self._at >= self._times.numel():
            raise InternalError(f"more than {self._times.numel()} marks in a step")
        if interpreted():
            self._times[self._at] = time.perf_counter_ns()
        else:
            stamp_kernel[(1,)](self._times, self._at, num_warps=1)
        self._at += 1

    def stamps(self, count: int) -> torch.Tensor:
        """The GPU's clock at the first ``count`` + 1 points, int64 nanoseconds; on the GPU."""
        return self._times[: count + 1]

    def seconds(self, count: int) -> list[float]:
        """Seconds between the first ``count`` + 1 points; waits for the GPU."""
        times: list[int] = self.stamps(count).tolist()
        return [(after - before) / NANO for before, after in pairwise(times)]
