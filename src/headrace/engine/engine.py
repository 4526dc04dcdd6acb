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
from collections.abc import Callable
from dataclasses import replace

from headrace.core.config import EngineConfig
from headrace.core.errors import (
    DeviceLostError,
    EngineDeadError,
    InternalError,
    WorkerLostError,
)
from headrace.core.request import (
    FinishReason,
    GenerationRequest,
    OutputDelta,
    RequestFailed,
)
from headrace.core.status import EngineSnapshot
from headrace.core.step import (
    SampledToken,
    ScheduledChunk,
    StepOutput,
    StepPlan,
    StepStats,
)
from headrace.engine.computing import Computing, Flight
from headrace.engine.flights import Flights
from headrace.engine.parts import EngineParts
from headrace.engine.profiler import StepProfiler
from headrace.engine.profilers import make_profiler
from headrace.engine.requests import LiveRequest, LiveSequence, failure
from headrace.engine.runner import Ranges, Runner
from headrace.engine.sampler import SamplingState
from headrace.engine.scheduler import Scheduler
from headrace.engine.scheduler_records import Finished
from headrace.engine.scheduler_snapshot import scheduler_snapshot
from headrace.engine.step_stats import stats_of
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
        self._computing = Computing(self._runner, parts.device, parts.experts, self._states)
        self._flights = Flights(self._scheduler, self._computing)
        self._pending: list[Output] = []  # deltas of cancelled requests, given out by step()
        self._finished: Counter[str] = Counter()
        self._aborted = 0
        self._step_seconds = 0.0
        self._ended_s = 0.0  # the last step
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
        """Whether ``step`` would return or compute something, or wait for a step that nobody needs."""
        return bool(self._pending) or self._scheduler.has_work() or len(self._flights) > 0

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
        watching = self._computing
        if watching.profiler is not None:
            watching.profiler.stop()
            watching.profiler = None
        if on:
            profiler = make_profiler(self._parts)
            profiler.start()  # may find no memory: then nobody watches
            watching.profiler = profiler
        return watching.profiler

    def run_ahead(self, on: bool) -> None:
        """Whether decoding steps run ahead of each other where they can, as from the start."""
        self._computing.queues = on and self._device.queues

    @property
    def parts(self) -> EngineParts:
        """What it was made of; for measurements."""
        return self._parts

    # ---- steps ----------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Run one iteration and return what it produced; [] when nothing is left to compute.

        The call behind the one that gave the last answer waits for the step that was launched ahead of
        it, if there is one, so that an idle engine has none on its way.

        Raises:
            EngineDeadError: a fault that is not one request's; every request is lost.
        """
        self._require_alive()
        outputs, self._pending = self._pending, []
        try:
            worked = self._scheduler.has_work()
            self._advance(outputs)
            if worked and not self._scheduler.has_work():
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
        return replace(
            scheduler_snapshot(self._scheduler),
            requests_finished=dict(self._finished),
            requests_aborted_total=self._aborted,
            step_seconds_total=self._step_seconds,
            experts=None if self._experts is None else self._experts.snapshot(),
        )

    def close(self) -> None:
        """Drop every request; the engine accepts nothing any more."""
        for live in list(self._requests.values()):
            self._scheduler.abort(live.request.request_id)
            self._forget(live)
        self._pending.clear()
        self._flights.abandon()
        if self._experts is not None:
            self._experts.close()
        self._dead = self._dead or EngineDeadError("the engine has been closed")

    def _advance(self, outputs: list[Output]) -> None:
        """Handle the step on its way, with the next one behind it if that is certain; or one at once."""
        if not self._scheduler.has_work():
            # Answers do not wait for a step behind them: the next call does, and so ends the work.
            if not outputs:
                self._flights.settle()
            return
        self._flights.settle()
        if not self._flights:
            start, ranges = time.perf_counter(), Ranges()
            plan = self._scheduler.schedule()
            if plan is None:
                return
            ranges.seconds["schedule"] = time.perf_counter() - start
            self._computing.begin(plan)
            flight = Flight(plan, start, self._computing.profiler, ranges)
            if not self._flights.launch(flight):
                output, failed = self._compute(plan, ranges)
                outputs += failed + self._take(flight, output)
                return
        self._flights.run_ahead()
        flight = self._flights.next()
        output, failed = self._land(flight)
        outputs += failed + self._take(flight, output)

    def _land(self, flight: Flight) -> tuple[StepOutput, list[Output]]:
        """Wait for a step. What fails is the sequence whose logits are not finite, or all of them."""
        plan, failed = flight.plan, list[Output]()
        try:
            found = self._computing.land(flight)
        except DeviceLostError:
            raise
        except Exception as error:
            failed += self._fail_all(plan, error)
            return StepOutput(plan.step), failed
        for chunk, item in zip(plan.chunks, found, strict=True):
            # Sequences may have ended since, and a sibling may have failed the request.
            if isinstance(item, InternalError) and chunk.seq_id in self._sequences:
                failed.append(self._fail(chunk, item))
        sampled = (item for item in found if isinstance(item, SampledToken))
        return StepOutput(
            plan.step, tuple(item for item in sampled if item.seq_id in self._sequences)
        ), failed

    def _take(self, flight: Flight, output: StepOutput) -> list[Output]:
        """Turn what a step gave into text, commit it and say what came of it."""
        plan, ranges = flight.plan, flight.ranges
        start = max(flight.begun_s, self._ended_s)  # one that ran ahead began where the other ended
        outputs: list[Output] = []
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
        classes = self._computing.classes(flight, start, wanted=self.observe is not None)
        # With what watching takes, which whoever waits pays, too.
        self._ended_s = time.perf_counter()
        seconds = self._ended_s - start
        self._step_seconds += seconds
        # Somebody may have begun to watch, or stopped, while the step was on its way.
        if self.observe is not None and flight.profiler is self._computing.profiler:
            self.observe(stats_of(plan, seconds, classes))
        return outputs

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
            return self._computing.compute(plan.step, plan.chunks, ranges), []
        except DeviceLostError:
            raise
        except WorkerLostError as error:
            return StepOutput(plan.step), self._fail_all(plan, error)
        except Exception:
            log.exception("step %d failed; computing its chunks one by one", plan.step)
        self._device.release_cached()
        output, failed = StepOutput(plan.step), list[Output]()
        for chunk in plan.chunks:
            if chunk.seq_id not in self._sequences:  # a sibling has failed the request
                continue
            try:
                part = self._computing.compute(plan.step, [chunk], ranges)
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

    def _fail_all(self, plan: StepPlan, error: Exception) -> list[Output]:
        return [
            self._fail(chunk, error)
            for chunk in plan.chunks
            if chunk.seq_id in self._sequences  # a sibling has failed the request
        ]

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
