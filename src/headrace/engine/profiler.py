"""Seconds of a step by class: every operation is timed and filed under the catalogue's name for it.

Off, nothing is in the way: the operations are the kernels themselves. On, a call costs two readings of a
clock: a decoding step of SmolLM2 makes 63, since its layers' halves are one operation each, which add up
the times of their parts themselves. Those are read once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from headrace.core.errors import InternalError
from headrace.core.kv_formats import FORMATS
from headrace.core.model_spec import ModelSpec
from headrace.core.step import ClassStats, MovedBytes, ScheduledChunk, StepPlan
from headrace.explain import leaf
from headrace.explain.cost import Work
from headrace.explain.running_cost import (
    RunningModel,
    StepRows,
    Stored,
    attention_cost,
    classes_of,
    running_cost,
)
from headrace.formats.base import PackedTensor
from headrace.ops.registry import BLOCKS, OpSet, OpTimes

OP_CLASSES = {
    "embed": leaf.EMBED,
    "rmsnorm": leaf.RMSNORM,
    "linear_group": leaf.QKV,
    "gated_linear": leaf.DENSE_FFN,
    "rope": leaf.ROPE,
    "kv_append": leaf.KV_APPEND,
    "attention_prefill": leaf.ATTENTION_PREFILL,
    "attention_decode": leaf.ATTENTION_DECODE,
    "sealed_append": leaf.KV_APPEND,
    "sealed_attention_prefill": leaf.ATTENTION_PREFILL,
    "sealed_attention_decode": leaf.ATTENTION_DECODE,
    "router_topk": leaf.ROUTER,
    "route": leaf.ROUTER,
    "moe": leaf.EXPERTS_GPU,
    "sample": leaf.SAMPLING,
}
# A block's plain product is its last part.
BLOCK_PRODUCTS = {
    "attention_block": leaf.O_PROJECTION,
    "dense_block": leaf.DENSE_FFN,
    "route": leaf.ROUTER,
}
# The engine's own ranges that are classes, too.
RANGE_CLASSES = {
    "sampler": leaf.SAMPLING,
    "schedule": leaf.SCHEDULE,
    "experts": leaf.SCHEDULE,  # counting what they did, and moving them between steps
    "batch": leaf.SCHEDULE,
    "commit": leaf.SCHEDULE,
    "text": leaf.DETOKENIZE,
}


@runtime_checkable
class Profilable(Protocol):
    """A decoder whose operations can be watched: ``models.decoder.Decoder``."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def ops(self) -> OpSet: ...
    def watch_mixtures(self, observer: Callable[[], None] | None) -> None: ...
    def matrices(self) -> Iterator[tuple[str, PackedTensor]]: ...


def running_model(decoder: Profilable, kv_format: str, block_tokens: int) -> RunningModel:
    """The loaded model as numbers."""
    kinds: dict[str, list[PackedTensor]] = {}
    for kind, weight in decoder.matrices():
        kinds.setdefault(kind, []).append(weight)
    matrices = {
        kind: Stored(
            count=len(weights),
            elements=sum(_elements(w) for w in weights),
            nbytes=sum(w.nbytes for w in weights),
            format=weights[0].format,
            rows=weights[0].rows,
            cols=weights[0].cols,
        )
        for kind, weights in kinds.items()
    }
    spec = decoder.spec
    page = FORMATS[kv_format].page_nbytes(block_tokens, spec.head_dim)
    gpu = any(part.is_cuda for _, weight in decoder.matrices() for part in weight.parts.values())
    return RunningModel(
        spec, matrices, page / (2 * block_tokens * spec.head_dim), kv_format, gpu, block_tokens
    )


def _elements(weight: PackedTensor) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count


class StepProfiler:
    """Watches a decoder's operations; ``take`` gives what was seen since the last time."""

    def __init__(self, decoder: object, kv_format: str, block_tokens: int) -> None:
        if not isinstance(decoder, Profilable):
            raise InternalError(f"{type(decoder).__name__} has no operations to watch")
        self.model = running_model(decoder, kv_format, block_tokens)
        self.decoder = decoder
        self.ops = decoder.ops
        names = classes_of([kind for kind, _ in decoder.matrices()])
        self._products = {id(w): names[k] for k, w in decoder.matrices() if k != "embed"}
        self._block_classes = {
            block: tuple(OP_CLASSES.get(part, BLOCK_PRODUCTS[block]) for part in parts)
            for block, parts in BLOCKS.items()
        }
        self._seen: dict[str, list[float]] = {}
        self._times: Mapping[str, OpTimes] = {}
        self._alike: tuple[int, int, bool] | None = None
        self._works: dict[str, tuple[int, MovedBytes]] = {}
        self.rows = StepRows((), 0)  # of the step that was taken last
        # Whether that step was slowed down by what watched it, and is not to be counted as a step.
        self.slowed = False
        # Whether steps can say what their classes took only now and then: those that are slowed.
        self.samples = False

    def start(self) -> None:
        """Watch from now on."""
        self._times = self.ops.watch(self._called)

    def stop(self) -> None:
        """Leave the operations alone."""
        self._times = self.ops.watch(None)

    def can_launch(self, chunks: Sequence[ScheduledChunk], *, ahead: bool) -> bool:
        """Whether the next step can be watched without waiting for it, behind another one if ``ahead``."""
        return False

    def begins(self, chunks: Sequence[ScheduledChunk]) -> None:
        """A step is about to be computed or launched."""

    def launched(self) -> None:
        """The step is queued on the device; ``take_launched`` follows once it has ended."""

    def _called(self, name: str, args: tuple[Any, ...], seconds: float) -> None:
        self._add(self.class_of(name, args, None), 1, seconds)

    def classes(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds by class since the last time that somebody asked."""
        for name, times in self._times.items():
            calls, seconds, parts = times.take()
            if not calls:
                continue
            if not parts:
                self._add(self.class_of(name, (), None), calls, seconds)
                continue
            for ident, part in zip(self._block_classes[name], parts, strict=True):
                self._add(ident, calls, part)
            self._add(leaf.LAUNCHES, calls, max(seconds - sum(parts), 0.0))
        seen, self._seen = self._seen, {}
        return {ident: (int(calls), seconds) for ident, (calls, seconds) in seen.items()}

    def class_of(self, name: str, args: tuple[Any, ...], part: int | None) -> str:
        """The class of an operation's call, or of a block's part."""
        if part is not None:
            return self._block_classes[name][part]
        if name == "linear":
            return self._products.get(id(args[1]), leaf.O_PROJECTION)
        return OP_CLASSES.get(
            name, name
        )  # blocks that do not time their parts are called themselves

    def _add(self, ident: str, calls: int, seconds: float) -> None:
        found = self._seen.get(ident)
        if found is None:
            self._seen[ident] = [calls, seconds]
        else:
            found[0] += calls
            found[1] += seconds

    def take(self, plan: StepPlan, ranges: dict[str, float]) -> tuple[ClassStats, ...]:
        """The classes of the step that has just run, with the work that each was."""
        for name, seconds in ranges.items():
            if name in RANGE_CLASSES:
                self._add(RANGE_CLASSES[name], 1, seconds)
        self.rows = rows_of(plan)
        works = self._works_of(self.rows)
        nothing = 0, MovedBytes()
        return tuple(
            ClassStats(ident, calls, *works.get(ident, nothing), seconds)
            for ident, (calls, seconds) in self.classes().items()
        )

    def take_launched(
        self, plan: StepPlan, ranges: dict[str, float], elapsed_s: float
    ) -> tuple[ClassStats, ...]:
        """``take`` for the oldest launched step, ``elapsed_s`` after the one before it had ended: of the
        host's ranges, what the device did not hide."""
        raise InternalError("a step was launched, and nothing watched it")

    def _works_of(self, rows: StepRows) -> dict[str, tuple[int, MovedBytes]]:
        """FLOPs and bytes by class. Of one decoding step and the next only attention differs, and
        working out all of them took as long as watching 60 calls."""
        alike = rows.tokens, rows.sampled, rows.decode
        if alike != self._alike:
            self._alike = alike
            self._works = {i: _counts(c.work) for i, c in running_cost(self.model, rows).items()}
            return self._works
        ident, attention = attention_cost(self.model, rows)
        self._works[ident] = _counts(attention.work)
        return self._works


def rows_of(plan: StepPlan) -> StepRows:
    """A plan's rows, as the cost formulas count them."""
    return StepRows(
        tuple((len(chunk.token_ids), chunk.start) for chunk in plan.chunks),
        sum(chunk.sample for chunk in plan.chunks),
    )


def _counts(work: Work) -> tuple[int, MovedBytes]:
    moved = MovedBytes(round(work.hbm_nbytes), round(work.pcie_nbytes), round(work.dram_nbytes))
    return round(work.flops), moved
