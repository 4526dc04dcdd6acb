"""Which tokens the next step computes: integers in, records out.

A step first gives every decoding sequence its token, then fills the rest of the token budget with
prefill chunks, oldest request first, then admits waiting sequences while real blocks are there.

    submit -> waiting --place--> running --commit--> finished
                 ^                  |
                 +---- preempt -----+     (blocks released, recomputed later)

Progress is guaranteed: blocks are only taken from newer sequences, so the oldest running one always
gets what it needs, and no request is accepted that could not run alone in the whole pool.

Nobody writes to a block that another sequence refers to or that the prefix cache knows: the writer
gets a copy first (``StepPlan.block_copies``). That is all there is to sharing a prompt among the
``n`` sequences of a request.
"""

from __future__ import annotations

from bisect import insort

from headrace.core.errors import InternalError, RequestError
from headrace.core.request import FinishReason, GenerationRequest
from headrace.core.step import UNKNOWN, ScheduledChunk, StepOutput, StepPlan
from headrace.engine.block_tables import BlockTables
from headrace.engine.scheduler_records import Finished, SchedulerConfig, SchedulerCounters
from headrace.engine.sequence import Group, Sequence
from headrace.engine.validate import validate_length
from headrace.experts.chunk_choice import next_chunk
from headrace.kv.prefix import CacheSpace, PrefixCache


class Scheduler:
    """Continuous batching over one block pool."""

    def __init__(self, config: SchedulerConfig, prefix: PrefixCache | None = None) -> None:
        if config.max_batch_tokens < config.max_num_seqs:
            raise InternalError(
                f"a step of {config.max_batch_tokens} tokens cannot hold one token of each of "
                f"{config.max_num_seqs} sequences"
            )
        self.config = config
        if prefix is None:
            prefix = PrefixCache(config.block_tokens)
        self.tables = BlockTables(
            config.num_blocks,
            prefix,
            config.prefix_cache,
            sealed=config.sealed,
            num_first=config.num_first,
        )
        self.counters = SchedulerCounters()
        self._groups: dict[str, Group] = {}
        self._running: dict[int, Sequence] = {}  # in order of arrival
        self._waiting: list[Sequence] = []  # in order of arrival
        # Whom the last plan had no room for, and the blocks that it could have had.
        self._refused: tuple[Sequence, int] | None = None
        self._plans: list[StepPlan] = []  # not committed yet: one, and one on top of it at most
        self._next_seq_id = 0

    # ---- requests -------------------------------------------------------------------------------

    @property
    def sequence_limit(self) -> int:
        """Tokens that one sequence may hold: the context, or the whole pool if that is smaller.

        The last token of a sequence is never fed back, so it needs no place in the pool.
        """
        return min(self.config.context, self.config.num_blocks * self.config.block_tokens + 1)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._groups)

    def is_active(self, request_id: str) -> bool:
        return request_id in self._groups

    def sequences(self, request_id: str) -> list[int]:
        """The ids of a request's unfinished sequences."""
        return [s.seq_id for s in self._groups[request_id].sequences]

    def cached_tokens(self, request_id: str) -> int:
        """Prompt tokens of an active request that were found in the prefix cache."""
        return self._groups[request_id].cached_tokens

    def submit(self, request: GenerationRequest) -> list[int]:
        """Queue a request; return the ids of its ``n`` sequences, in the order of their index.

        Raises:
            ContextLengthError: the prompt leaves no room for one token of answer.
            RequestError: the id is in use.
        """
        if request.request_id in self._groups:
            raise RequestError(
                f"request id {request.request_id!r} is already being served", param="request_id"
            )
        num_prompt = len(request.prompt_token_ids)
        limit = self.sequence_limit
        validate_length(num_prompt, limit, self.config.context)
        group = Group(request, CacheSpace(salt=request.cache_salt, kv=self.config.kv_key))
        self._groups[request.request_id] = group
        wanted = request.sampling.max_tokens
        total = limit if wanted is None else min(limit, num_prompt + wanted)
        for index in range(request.sampling.n):
            seq = Sequence(self._next_seq_id, group, index, tuple(request.prompt_token_ids), total)
            self._next_seq_id += 1
            group.sequences.append(seq)
            self._waiting.append(seq)
        return [s.seq_id for s in group.sequences]

    def abort(self, request_id: str) -> bool:
        """Drop a request in any phase and release all its blocks; False if it is not there."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        for seq in group.sequences:
            if self._running.pop(seq.seq_id, None) is not None:
                self.tables.release(seq)
            else:
                self._waiting.remove(seq)
        return True

    # ---- one step -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to do."""
        if not self._groups:
            return None
        copies: list[tuple[int, int]] = []
        chunks: list[ScheduledChunk] = []
        preempted, self._refused = self.counters.preemptions, None
        for seq in [s for s in self._running.values() if s.num_remaining == 1]:
            if seq.seq_id in self._running and self._make_room(seq, 1, copies):
                chunks.append(self._chunk(seq, 1))
        beside = self.config.beside_tokens if chunks else None
        budget = max((beside or self.config.max_batch_tokens) - len(chunks), 0)
        for seq in [s for s in self._running.values() if s.num_remaining > 1]:
            count = self._count(seq, budget, chunks)
            if count and seq.seq_id in self._running and self._make_room(seq, count, copies):
                chunks.append(self._chunk(seq, count))
                budget -= count
        if self.counters.preemptions == preempted or not chunks:
            self._admit(budget, chunks, copies)
        if not chunks:
            raise InternalError(
                f"no progress: {len(self._running)} running, {len(self._waiting)} waiting, "
                f"{self.tables.pool.num_available} blocks available"
            )
        plan = StepPlan(self.counters.steps, tuple(chunks), tuple(copies))
        self._plans = [plan]
        return plan

    def schedule_ahead(self) -> StepPlan | None:
        """Plan the step behind the one that is being computed, as if that one ended nobody.

        Its tokens are those that the device will have chosen, row by row in the same order: the host
        does not know them (``UNKNOWN``). A sequence that ends meanwhile has a row for nothing.

        None where what comes next is not certain beforehand: somebody might be admitted, a prompt is
        not computed yet, a sequence reaches its limit or was aborted, siblings wait for their prompt, or
        a position has no block that could be written to without taking one from somebody.
        """
        if len(self._plans) != 1 or len(self._plans[0].chunks) != len(self._running):
            return None
        if self._could_admit():
            return None
        plan, rows = self._plans[0], list[Sequence]()
        for chunk in plan.chunks:
            seq = self._running.get(chunk.seq_id)
            if seq is None or not chunk.sample or len(chunk.token_ids) != 1:
                return None
            if len(seq.tokens) + 1 >= seq.max_tokens_total:
                return None
            if seq.num_generated == 0 and len(seq.group.sequences) > 1:
                return None
            rows.append(seq)
        if not self.tables.extend_ahead(rows):
            return None
        chunks = (
            ScheduledChunk(seq.seq_id, (UNKNOWN,), seq.num_computed + 1, tuple(seq.blocks), True)
            for seq in rows
        )
        self._plans.append(StepPlan(plan.step + 1, tuple(chunks), ahead=True))
        return self._plans[-1]

    def _could_admit(self) -> bool:
        """Whether the next plan might admit somebody, as far as that can be told without trying."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return False
        # Who is refused holds up all who came later; and there is no more room than there was.
        if self._refused is None or self._refused[0] not in self._waiting:
            return True
        return self.tables.pool.num_available > self._refused[1]

    def concerns(self, plan: StepPlan) -> bool:
        """Whether a sequence of the plan is still served."""
        return any(chunk.seq_id in self._running for chunk in plan.chunks)

    def drop_ahead(self) -> None:
        """Forget what ``schedule_ahead`` planned last: it was not begun."""
        self._plans = self._plans[:1]

    def commit(self, output: StepOutput) -> list[Finished]:
        """Take in what the step computed, and return the sequences that it ended.

        Sequences that were aborted since the step was planned are passed over.
        """
        plan = self._plans[0] if self._plans else None
        if plan is None or plan.step != output.step:
            raise InternalError(f"step {output.step} was not planned")
        del self._plans[0]
        self.counters.steps += 1
        tokens = {s.seq_id: s.token_id for s in output.sampled}
        finished: list[Finished] = []
        for chunk in plan.chunks:
            seq = self._running.get(chunk.seq_id)
            if seq is None:
                continue
            seq.num_computed = chunk.start + len(chunk.token_ids)
            self.tables.publish(seq)
            if not chunk.sample:
                continue
            if seq.num_generated == 0:
                self._fork_siblings(seq)
            seq.take(tokens[seq.seq_id])
            self.counters.generation_tokens += 1
            if seq.seq_id in output.stopped:
                finished.append(self._finish(seq, FinishReason.STOP))
            elif len(seq.tokens) >= seq.max_tokens_total:
                finished.append(self._finish(seq, FinishReason.LENGTH))
        return finished

    def check(self) -> None:
        """Verify that blocks are conserved and that every reference has an owner.

        Raises:
            InternalError: an invariant does not hold.
        """
        self.tables.check(self._running.values())
        for seq in self._waiting:
            if seq.blocks:
                raise InternalError(
                    f"sequence {seq.seq_id} waits and holds {len(seq.blocks)} blocks"
                )

    # ---- blocks ---------------------------------------------------------------------------------

    def _make_room(self, seq: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Get blocks for the next ``count`` positions, preempting newer sequences if need be.

        Returns False if ``seq`` itself had to be preempted.
        """
        while not self.tables.extend(seq, count, copies):
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq.seq_id]
        self.tables.release(seq)
        insort(self._waiting, seq, key=lambda s: s.seq_id)
        self.counters.preemptions += 1

    # ---- admission ------------------------------------------------------------------------------

    def _admit(
        self, budget: int, chunks: list[ScheduledChunk], copies: list[tuple[int, int]]
    ) -> None:
        position = 0
        while (
            budget > 0
            and position < len(self._waiting)
            and len(self._running) < self.config.max_num_seqs
        ):
            seq = self._waiting[position]
            if self._waits_for_sibling(seq):
                position += 1
                continue
            if not self._place(seq, copies):
                self._refused = seq, self.tables.pool.num_available
                return
            del self._waiting[position]
            self._run(seq)
            count = self._count(seq, budget, chunks)
            chunks.append(self._chunk(seq, count))
            budget -= count

    def _waits_for_sibling(self, seq: Sequence) -> bool:
        """Whether a sibling is computing the prompt that ``seq`` will share."""
        running = [s for s in seq.group.sequences if s.seq_id in self._running]
        return any(s.num_computed < s.group.num_prompt for s in running) and not any(
            s.num_computed >= s.group.num_prompt for s in running
        )

    def _place(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Give a waiting sequence the blocks of all its tokens, or none.

        While others run, one block for each of them stays free: without it a newcomer would be
        preempted again as soon as one of them crosses into its next block.
        """
        source = next(
            (
                s
                for s in seq.group.sequences
                if s.seq_id in self._running and s.num_computed >= s.group.num_prompt
            ),
            None,
        )
        if source is not None:
            self.tables.share_prompt(seq, source)
        else:
            self.tables.share_cached(seq)
        headroom = len(self._running)
        needed = self.tables.num_missing(seq) + headroom
        fits = headroom == 0 or self.tables.pool.num_available >= needed
        if not fits or not self.tables.extend(seq, seq.num_remaining, copies):
            self.tables.release(seq)
            return False
        if not seq.group.placed:
            seq.group.placed = True
            self._count_first_placement(seq)
        return True

    def _fork_siblings(self, source: Sequence) -> None:
        """Start the siblings of a sequence that has just computed their prompt.

        Each computes the last prompt token again, in its own copy of the last block, and samples
        its own first token from it. Those for which there is no room now are placed later.
        """
        for seq in source.group.sequences:
            if seq.seq_id in self._running or seq.num_generated:
                continue
            room = self.tables.pool.num_available > len(self._running)
            if not room or len(self._running) >= self.config.max_num_seqs:
                return
            self.tables.share_prompt(seq, source)
            self._waiting.remove(seq)
            self._run(seq)

    def _run(self, seq: Sequence) -> None:
        """Add to the running ones, in order of arrival: victims are taken from the end."""
        newest = next(reversed(self._running), -1)
        self._running[seq.seq_id] = seq
        if seq.seq_id < newest:
            self._running = dict(sorted(self._running.items()))

    def _count_first_placement(self, seq: Sequence) -> None:
        """Count prompt and hit tokens once for each request: what is recomputed is no hit."""
        self.counters.prompt_tokens += seq.group.num_prompt
        if self.config.prefix_cache:
            seq.group.cached_tokens = seq.num_computed
            self.counters.prefix_query_tokens += seq.group.num_prompt
            self.counters.prefix_hit_tokens += seq.num_computed

    def _count(self, seq: Sequence, budget: int, chunks: list[ScheduledChunk]) -> int:
        """Tokens of a prompt's next chunk; the prompts behind the first of a step fill what it leaves."""
        tail = self.config.tail_tokens
        if tail is None or not budget or any(len(chunk.token_ids) > 1 for chunk in chunks):
            return min(budget, seq.num_remaining)
        return next_chunk(seq.num_remaining, budget, tail)

    # ---- ends -----------------------------------------------------------------------------------

    def _chunk(self, seq: Sequence, count: int) -> ScheduledChunk:
        start = seq.num_computed
        return ScheduledChunk(
            seq_id=seq.seq_id,
            token_ids=tuple(seq.tokens[start : start + count]),
            start=start,
            block_ids=tuple(seq.blocks),
            sample=start + count == len(seq.tokens),
        )

    def _finish(self, seq: Sequence, reason: FinishReason) -> Finished:
        del self._running[seq.seq_id]
        self.tables.release(seq)
        group = seq.group
        group.sequences.remove(seq)
        if not group.sequences:
            del self._groups[group.request.request_id]
        return Finished(seq.seq_id, reason, last=not group.sequences)
