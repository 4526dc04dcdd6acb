"""What an executor's steps show: rates and the split that follows, idle time for promotion, counters.

After every decoding step the counters' growth is one sample of each path: bytes over the seconds in
which that path was busy. The split table is written anew only when a rate has moved
(``rates.WORTH_A_TABLE``), and not more often than every ``TABLE_STEPS`` steps. It lies in device memory
that the plan reads, so captured graphs follow it without being captured again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

from headrace.core.status import ExpertSnapshot
from headrace.experts.executor import HybridExecutor
from headrace.experts.hit_rate import predict_hit_rate
from headrace.experts.paths import ExpertCounts
from headrace.experts.promoter import Promoter
from headrace.experts.promotion import idle_nbytes
from headrace.experts.rates import LayerTimes, RateTracker, RequestSums
from headrace.experts.step_record import ExpertStep

# Steps between two looks at whether the split should change. A changed machine shows after five samples
# (rates.WINDOW), and a table of a full batch, 257 entries, takes the host some milliseconds to work out,
# which must not come with every step of 5 to 20 ms.
TABLE_STEPS = 5


@dataclass(frozen=True)
class _Step:
    """A step that has begun: how many tokens, and when."""

    tokens: int
    began_s: float


class LiveExperts:
    """``engine.parts.ExpertRuntime`` of an executor.

    Args:
        tracker: of the paths' rates; None where they are not known, or need not be.
        clock: seconds, for the idle time.
    """

    def __init__(
        self,
        executor: HybridExecutor,
        tracker: RateTracker | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor, self.tracker = executor, tracker
        self._clock = clock
        self._step = _Step(0, 0.0)  # that has begun last
        self._launched: deque[_Step] = deque()  # and has not ended, the oldest first
        self._ended_s = 0.0
        self._idle_nbytes = 0
        self._before = executor.counts()
        self._steps = 0
        self.num_tables = 0  # split tables written since the start
        self.last: ExpertStep | None = None
        self._promoter = self._new_promoter()
        if tracker is not None:
            tracker.new_table(self._most)  # the one that the executor was made with

    @property
    def _most(self) -> int:
        return self.executor.shape.max_missing(self.executor.store)

    def _new_promoter(self) -> Promoter | None:
        """Only a split can leave a cold cache cold: ``stream`` fetches whatever misses."""
        x = self.executor
        if x.shape.placement != "hybrid" or self.tracker is None or not x.plan_shape.num_slots:
            return None
        return Promoter(x.device, x.store, x.paths, x.plan_shape, x.can_fetch)

    @property
    def can_run_ahead(self) -> bool:
        """See ``engine.parts.ExpertRuntime``."""
        waits = self._promoter is not None and self._promoter.waits(self._idle_nbytes)
        return self.executor.service_works and not waits

    def step_begins(self, num_tokens: int, *, ahead: bool = False) -> None:
        """See ``engine.parts.ExpertRuntime``."""
        if ahead:
            self.executor.wake()
        else:
            self.executor.step_begins(num_tokens)
        self._step = _Step(num_tokens, self._clock())
        if self.tracker is not None and num_tokens > self.executor.shape.max_tokens:
            self.executor.set_prompt_rates(self.tracker.rates)
        if self._promoter is not None:
            self._promoter.advance(self._idle_nbytes if self._decodes(self._step) else 0)
        self._idle_nbytes = 0

    def step_launched(self) -> None:
        """See ``engine.parts.ExpertRuntime``."""
        self.executor.post_counts()
        self._launched.append(self._step)

    def step_ended(self) -> None:
        """See ``engine.parts.ExpertRuntime``."""
        if self._launched:
            step, now = self._launched.popleft(), self.executor.posted_counts()
            self.executor.step_ended()
        else:
            self.executor.step_ended()
            step, now = self._step, self.executor.counts()
        # One that ran ahead began to be computed when the one before it ended.
        began_s, self._ended_s = max(step.began_s, self._ended_s), self._clock()
        seconds = self._ended_s - began_s
        grown = _difference(now, self._before)
        self._before = now
        decodes = self._decodes(step)
        self.last = self._record(grown, step.tokens) if decodes else None
        if not decodes or self.tracker is None:
            return
        slices = self.executor.store.mean_slice_nbytes
        base = self.tracker.base
        # The estimates take off a latency that these seconds, in which a path was busy, do not hold.
        self.tracker.observe(
            LayerTimes(
                grown.fetched * slices - grown.ahead_nbytes,
                grown.fetch_s + base.fetch_latency_s if grown.fetched else 0.0,
                grown.cpu_nbytes,
                grown.compute_s + base.cpu_latency_s if grown.cpu_nbytes else 0.0,
                RequestSums(
                    grown.cpu_requests,
                    grown.cpu_nbytes,
                    grown.compute_s,
                    grown.cpu_square_nbytes,
                    grown.cpu_nbytes_s,
                ),
            )
        )
        if not grown.fetched:
            self._idle_nbytes = idle_nbytes(seconds, 0, self.tracker.rates)
        self._steps += 1
        if self.executor.shape.placement == "hybrid" and self._steps % TABLE_STEPS == 0:
            table = self.tracker.new_table(self._most)
            if table is not None:
                self.executor.set_table(table)
                self.num_tables += 1

    def _decodes(self, step: _Step) -> bool:
        return 0 < step.tokens <= self.executor.shape.max_tokens

    def _record(self, grown: ExpertCounts, tokens: int) -> ExpertStep:
        layout, shape = self.executor.store.layout, self.executor.shape
        uses = tokens * shape.top_k * self.executor.store.num_layers * layout.num_slices
        return ExpertStep(
            grown.hits,
            grown.fetched,
            grown.computed,
            grown.fetch_s,
            grown.compute_s,
            self.executor.store.num_layers,
            uses,
            2 * 3 * layout.hidden * layout.width,
            self.executor.store.mean_slice_nbytes,
        )

    @property
    def misses_of_twice_the_slots(self) -> float | None:
        """The share of the misses that twice the slots would leave, as predicted; None where slots are
        not what is short."""
        s, top_k = self.executor.plan_shape, self.executor.shape.top_k
        resident = s.num_slots / (s.num_layers * s.num_experts * s.num_slices)
        if not 0 < resident < 1:
            return None
        now, then = (
            1 - predict_hit_rate(s.num_experts, top_k, share)
            for share in (resident, min(2 * resident, 1.0))
        )
        return then / now if now > 0 else None

    def snapshot(self) -> ExpertSnapshot:
        """See ``engine.parts.ExpertRuntime``."""
        x, counts = self.executor, self.executor.counts()
        nbytes, account = x.store.mean_slice_nbytes, x.store.account()
        prompt = x.prompt_slices()
        promoter, rates = self._promoter, None if self.tracker is None else self.tracker.rates
        return ExpertSnapshot(
            slots_total=x.plan_shape.num_slots,
            slots_used=x.paths.slots_used(),
            slot_nbytes=x.store.layout.slice_nbytes,
            pinned_nbytes=account.pinned_nbytes,
            pageable_nbytes=account.pageable_nbytes,
            mapped_nbytes=account.mapped_nbytes,
            lookups_total=counts.looked_up,
            hits_total=counts.hits,
            bytes_total={
                "resident": (counts.hits + prompt.hits) * nbytes,
                "fetched": counts.fetched * nbytes,
                "computed": (counts.computed + prompt.computed) * nbytes,
                "promoted": 0 if promoter is None else promoter.nbytes,
                "streamed": prompt.fetched * nbytes,
            },
            split=x.table,
            rates_gbps={} if rates is None else {"pcie": rates.pcie_gbps, "cpu": rates.cpu_gbps},
            stalls_total=counts.stalls,
            stall_seconds_total=counts.stall_s,
            restarts_total=x.num_restarts,
        )

    def close(self) -> None:
        """See ``engine.parts.ExpertRuntime``."""
        self.executor.close()


def _difference(now: ExpertCounts, before: ExpertCounts) -> ExpertCounts:
    return ExpertCounts(
        **{f.name: getattr(now, f.name) - getattr(before, f.name) for f in fields(ExpertCounts)}
    )
