"""The engine: requests in, text out, one iteration at a time.

submit -> scheduler.schedule -> StepPlan -> runner -> StepOutput -> text -> scheduler.commit
                                                                     |
                                                     OutputDelta <---+
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.core.config import EngineConfig
from headrace.core.errors import DeviceLostError, EngineDeadError, WorkerLostError
from headrace.core.request import (
    FinishReason,
    GenerationRequest,
    OutputDelta,
    RequestFailed,
)
from headrace.core.status import EngineSnapshot
from headrace.core.step import ClassStats, ScheduledChunk, StepOutput, StepPlan, StepStats
from headrace.engine.expert_stats import expert_classes
from headrace.engine.parts import EngineParts
from headrace.engine.profiler import StepProfiler
from headrace.engine.profilers import make_profiler
from headrace.engine.requests import LiveRequest, LiveSequence, failure
from headrace.engine.runner import Ranges, Runner
from headrace.engine.sampler import SamplingState
from headrace.engine.scheduler import Finished, Scheduler
from headrace.engine.text_stream import Piece, TextStream
from headrace.engine.validate import validate_request
from headrace.kv.storage import is_out_of_memory
from headrace.layers.moe import RoutingObserver

log = logging.getLogger(__name__)

Output = OutputDelta | RequestFailed


class Engine:
    """Serves requests with one model. Not thread-safe: one caller submits, cancels and steps.

    Attributes:
        info: what was loaded, and every resolved choice with its reason.
        observe: called with the ``StepStats`` of every step; None to switch it off.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.info = parts.info
        self.observe: Callable[[StepStats], None] | None = None
        self._tokenizer = parts.tokenizer
        self._vocab = parts.decoder.spec.vocab
        self._decoder = parts.decoder
        self._profiler: StepProfiler | None = None
        self._scheduler = Scheduler(parts.scheduler)
        pool = self._scheduler.tables.pool
        self._device = parts.device
        self._experts = parts.experts
        self._runner = Runner(
            parts.decoder,
            parts.kv,
            parts.scheduler.max_num_seqs,
            parts.device.torch_device,
            parts.graphs,
            is_owned=lambda block: pool.references(block) > 0,
        )
        self._requests: dict[str, LiveRequest] = {}
        self._sequences: dict[int, LiveSequence] = {}
        self._states: dict[int, SamplingState] = {}
        self._pending: list[Output] = []  # deltas of cancelled requests, given out by step()
        self._finished: Counter[str] = Counter()
        self._aborted = 0
        self._step_seconds = 0.0
        self._dead: BaseException | None = None

    @staticmethod
    def load(config: EngineConfig, progress: Callable[[str, float], None] | None = None) -> Engine:
        """Load a model.

        Args:
            config: what the user chose.
            progress: called with (stage, fraction of it) while files are fetched and read.

        Raises:
            HeadraceError: there is no such model, it is damaged or unsupported, it does not fit, or
                a choice cannot be met here.
        """
        from headrace.engine.loading import load_parts

        return Engine(load_parts(config, progress))

    # ---- requests -------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request, or refuse it at once if it is malformed or can never be served.

        Raises:
            RequestError, ContextLengthError: it is refused; nothing has changed.
            EngineDeadError: the engine has met a fatal error.
        """
        self._require_alive()
        validate_request(request, self._vocab)
        seq_ids = self._scheduler.submit(request)
        live = LiveRequest(request)
        params = request.sampling
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for index, seq_id in enumerate(seq_ids):
            state = SamplingState(params, seed, index, request.prompt_token_ids)
            text = TextStream(self._tokenizer, params, request.prompt_token_ids)
            live.sequences[seq_id] = LiveSequence(live, index, state, text)
            self._states[seq_id] = state
        self._sequences.update(live.sequences)
        self._requests[request.request_id] = live

    def cancel(self, request_id: str) -> None:
        """End a request in any phase and free what it holds, now. Unknown ids are ignored.

        Its last deltas, with finish reason "cancelled", come with the next step.
        """
        if self._scheduler.abort(request_id):
            self._aborted += 1
            live = self._requests[request_id]
            self._pending.extend(live.cancelled())
            self._forget(live)

    def has_work(self) -> bool:
        """Whether ``step`` would return or compute something."""
        return bool(self._pending) or self._scheduler.has_work()

    def watch_routing(self, observer: RoutingObserver | None) -> None:
        """Call ``observer(layer, expert ids int32 [tokens, k])`` at every mixture; None: stop.

        The rows of a step are its tokens in the order of its plan. Dense models call nobody.
        """
        self._decoder.on_routing = observer

    def watch_classes(self, on: bool) -> StepProfiler | None:
        """Time every operation by FLOP class from now on, for the ``StepStats`` that ``observe`` gets.

        Returns what watches, which also knows the model's bytes; None when switched off.

        Raises:
            InternalError: the model's operations cannot be watched.
        """
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if on:
            self._profiler = make_profiler(self._parts)
            self._profiler.start()
        return self._profiler

    @property
    def parts(self) -> EngineParts:
        """What it was made of; for measurements."""
        return self._parts

    # ---- steps ----------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run one iteration and return what it produced; [] when there is nothing to do.

        Raises:
            EngineDeadError: a fault that is not one request's; every request is lost.
        """
        self._require_alive()
        outputs, self._pending = self._pending, []
        try:
            start = time.perf_counter()
            plan = self._scheduler.schedule()
            if plan is not None:
                outputs.extend(self._run(plan, start))
                if not self._scheduler.has_work():
                    self._scheduler.check()
        except Exception as error:
            self._dead = error
            raise EngineDeadError(
                f"the engine met a fatal error: {type(error).__name__}: {error}",
                hint="restart it; the log has the traceback",
            ) from error
        return outputs

    def snapshot(self) -> EngineSnapshot:
        """Gauges and counters of this moment."""
        counters, pool = self._scheduler.counters, self._scheduler.tables.pool
        return EngineSnapshot(
            step=counters.steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_owned,
            kv_blocks_cached=pool.num_cached,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            prefix_query_tokens_total=counters.prefix_query_tokens,
            prefix_hit_tokens_total=counters.prefix_hit_tokens,
            requests_finished=dict(self._finished),
            requests_aborted_total=self._aborted,
            preemptions_total=counters.preemptions,
            steps_total=counters.steps,
            step_seconds_total=self._step_seconds,
            experts=None if self._experts is None else self._experts.snapshot(),
        )

    def close(self) -> None:
        """Drop every request; the engine accepts nothing any more."""
        for live in list(self._requests.values()):
            self._scheduler.abort(live.request.request_id)
            self._forget(live)
        self._pending.clear()
        if self._experts is not None:
            self._experts.close()
        self._dead = self._dead or EngineDeadError("the engine has been closed")

    def _run(self, plan: StepPlan, start: float) -> list[Output]:
        ranges = Ranges()
        ranges.seconds["schedule"] = time.perf_counter() - start
        self._runner.copy_blocks(plan.block_copies)
        output, outputs = self._compute(plan, ranges)
        for scores in output.prompt_logprobs:
            self._sequences[scores.seq_id].live.take_scores(scores)
        pieces: dict[int, Piece] = {}
        for item in output.sampled:
            live = self._sequences[item.seq_id]
            live.sampling.record(item.token_id)
            live.live.completion_tokens += 1
            request_id = live.live.request.request_id
            live.live.cached_tokens = self._scheduler.cached_tokens(request_id)
            with ranges.timed("text"):
                pieces[item.seq_id] = live.text.push(item.token_id)
        stopped = frozenset(s for s, piece in pieces.items() if piece.stopped)
        with ranges.timed("commit"):
            ends = {f.seq_id: f for f in self._scheduler.commit(replace(output, stopped=stopped))}
        for item in output.sampled:
            piece, end = pieces[item.seq_id], ends.get(item.seq_id)
            live = self._sequences[item.seq_id]
            text = piece.text
            if end is not None and end.reason is FinishReason.LENGTH:
                text += live.text.finish()
            delta = live.live.delta(item.seq_id, item, piece, text)
            outputs.append(delta if end is None else self._end(live, end, delta))
        classes = () if self.observe is None else self._classes(plan, ranges)
        seconds = (
            time.perf_counter() - start
        )  # with what watching takes, which whoever waits pays, too
        self._step_seconds += seconds
        if self.observe is not None:
            self.observe(_stats(plan, seconds, classes))
        return outputs

    def _classes(self, plan: StepPlan, ranges: Ranges) -> tuple[ClassStats, ...]:
        """Coarse ranges, or classes while they are watched."""
        if self._profiler is None:
            return ranges.stats()
        seen = self._profiler.take(plan, ranges.seconds)
        last = None if self._experts is None else self._experts.last
        if last is None:
            return seen
        return seen + expert_classes(last, timed=not self._profiler.samples)

    def _end(self, live: LiveSequence, end: Finished, delta: OutputDelta) -> OutputDelta:
        request = live.live
        self._drop_sequence(end.seq_id)
        del request.sequences[end.seq_id]
        if not end.last:
            return replace(delta, finish_reason=end.reason)
        del self._requests[request.request.request_id]
        self._finished[end.reason.value] += 1
        return replace(delta, finish_reason=end.reason, usage=request.usage)

    def _compute(self, plan: StepPlan, ranges: Ranges) -> tuple[StepOutput, list[Output]]:
        """Run the plan's chunks; where that fails, find out whose fault it is.

        The chunks are then computed one by one, which gives the same values. Those that fail alone,
        too, fail their request and nobody else's. Lost threads are different: they fail every request
        of the step, since finding out may take as long as the watchdog's patience for each of them,
        and everybody else would wait.
        """
        try:
            return self._compute_chunks(plan.step, plan.chunks, ranges), []
        except DeviceLostError:
            raise
        except WorkerLostError as error:
            return StepOutput(plan.step), [
                self._fail(chunk, error)
                for chunk in plan.chunks
                if chunk.seq_id in self._sequences  # a sibling has failed the request
            ]
        except Exception:
            log.exception("step %d failed; computing its chunks one by one", plan.step)
        self._device.release_cached()
        output, failed = StepOutput(plan.step), list[Output]()
        for chunk in plan.chunks:
            if chunk.seq_id not in self._sequences:  # a sibling has failed the request
                continue
            try:
                part = self._compute_chunks(plan.step, [chunk], ranges)
            except DeviceLostError:
                raise
            except Exception as error:
                failed.append(self._fail(chunk, error))
            else:
                output = StepOutput(
                    plan.step,
                    output.sampled + part.sampled,
                    output.prompt_logprobs + part.prompt_logprobs,
                )
        alive = self._sequences
        return StepOutput(
            plan.step,
            tuple(s for s in output.sampled if s.seq_id in alive),
            tuple(s for s in output.prompt_logprobs if s.seq_id in alive),
        ), failed

    def _compute_chunks(
        self, step: int, chunks: Sequence[ScheduledChunk], ranges: Ranges
    ) -> StepOutput:
        """Run chunks on the device.

        Raises:
            DeviceLostError: nothing more can be computed there.
        """
        try:
            if self._experts is not None:
                with ranges.timed("experts"):
                    self._experts.step_begins(sum(len(c.token_ids) for c in chunks))
            if self._profiler is not None:
                self._profiler.begins(chunks)
            output = self._runner.compute(step, chunks, self._states, ranges)
            if self._experts is not None:
                with ranges.timed("experts"):
                    self._experts.step_ended()
        except Exception as error:
            if self._device.is_lost(error):
                raise DeviceLostError(
                    f"{self._device.name}: {str(error).splitlines()[0]}",
                    hint="restart the engine; if it happens again, check the driver's log (dmesg)",
                ) from error
            raise
        return output

    def _fail(self, chunk: ScheduledChunk, error: Exception) -> RequestFailed:
        live = self._sequences[chunk.seq_id].live
        request_id = live.request.request_id
        log.error("request %s failed: %s: %s", request_id, type(error).__name__, error)
        self._scheduler.abort(request_id)
        self._forget(live)
        self._finished[FinishReason.ERROR.value] += 1
        return failure(request_id, error, is_out_of_memory(error))

    def _forget(self, live: LiveRequest) -> None:
        for seq_id in live.sequences:
            self._drop_sequence(seq_id)
        del self._requests[live.request.request_id]

    def _drop_sequence(self, seq_id: int) -> None:
        del self._sequences[seq_id]
        del self._states[seq_id]

    def _require_alive(self) -> None:
        if self._dead is not None:
            reason = getattr(self._dead, "message", str(self._dead))
            raise EngineDeadError(f"the engine has ended: {reason}", hint="load the model again")


def _stats(plan: StepPlan, seconds: float, classes: tuple[ClassStats, ...]) -> StepStats:
    decoding = sum(len(c.token_ids) == 1 for c in plan.chunks)
    if decoding == len(plan.chunks):
        phase = "decode"
    else:
        phase = "mixed" if decoding else "prefill"
    return StepStats(
        step=plan.step,
        phase=phase,
        batch=len(plan.chunks),
        tokens=plan.num_tokens,
        seconds=seconds,
        classes=classes,
    )
