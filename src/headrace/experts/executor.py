"""Computes mixtures whose experts lie in host memory, with a cache of slots on the GPU.

A decoding step of up to ``max_tokens`` tokens goes, layer by layer: on a side stream, beside attention,
guess the routing and prefetch; give x to all paths; plan; on a
side stream fetch what the plan wants fetched, while the hits are computed; compute the fetched; wait
for the CPU, which began with the plan; sum. All of it is recorded in the step's graph. Longer inputs
go through ``prefill``, a callable with the same arguments.

Placements (``placement.PLACEMENTS``): ``gpu``: everything has a slot; ``stream``: what misses is
fetched; ``cpu``: there are no slots; ``hybrid``: misses are split between PCIe and the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.core.errors import ConfigError
from headrace.experts.cache_policy import value_constants
from headrace.experts.kept_service import KeptService, ServiceFactory
from headrace.experts.paths import ExpertCounts, ExpertPaths
from headrace.experts.placement import Placement, most_fetched
from headrace.experts.plan_oracle import PlanShape
from headrace.experts.split import PathRates, split_table
from headrace.experts.store import HostStore
from headrace.experts.stream import StreamPrefill
from headrace.machine.device import Device
from headrace.ops.expert_records import ExpertService, RouterView, Rows

# Tokens of a step that is guessed: what was measured. The kernels take more.
FORESEEN_TOKENS = 1

Prefill = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExecutorShape:
    """Sizes of an executor.

    max_tokens: of a decoding step; top_k: experts of a token; num_slots: slices that the cache holds
    max_prefetch: slices prefetched for a layer at most, 0 or a power of two up to 16
    """

    placement: Placement
    max_tokens: int
    top_k: int
    num_slots: int
    max_prefetch: int = 0

    def plan_shape(self, store: HostStore) -> PlanShape:
        """The plan's sizes.

        Raises:
            ConfigError: ``gpu`` without a slot for every slice.
        """
        slices = store.layout.num_slices
        everything = store.num_layers * store.num_experts * slices
        if self.placement == "gpu" and self.num_slots < everything:
            raise ConfigError(
                f"experts on the GPU: {self.num_slots} slots for {everything} slices",
                hint="use --experts hybrid, or give a larger --vram-budget",
            )
        most = self.max_missing(store)
        fetch = most_fetched(self.placement, most)
        return PlanShape(
            num_layers=store.num_layers,
            num_experts=store.num_experts,
            num_slices=slices,
            num_slots=0 if self.placement == "cpu" else min(self.num_slots, everything),
            max_fetch=fetch,
            window=value_constants(store.num_layers, slices).window,
            max_prefetch=self.max_prefetch if fetch else 0,
        )

    def max_missing(self, store: HostStore) -> int:
        """Most slices that a layer of a step can miss."""
        uses = min(self.max_tokens * self.top_k, store.num_experts)
        return uses * store.layout.num_slices


@dataclass(frozen=True)
class PromptSlices:
    """Slices that prompts longer than a step used, by path."""

    hits: int = 0
    fetched: int = 0
    computed: int = 0


class HybridExecutor:
    """``layers.moe.MixtureExecutor``; ``live.LiveExperts`` drives it between steps.

    Args:
        paths: the steps of a layer, ``GpuPaths`` or ``HostPaths``.
        block: the request block by which ``paths`` ask a CPU service, uint8; None: they ask nobody.
        new_service: makes a service on it, again after a failure.
        prefill: what serves more than ``shape.max_tokens`` tokens.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        shape: ExecutorShape,
        paths: ExpertPaths,
        *,
        prefill: Prefill | None = None,
        block: torch.Tensor | None = None,
        new_service: ServiceFactory | None = None,
    ) -> None:
        self.paths, self.shape, self.store = paths, shape, store
        self.plan_shape = shape.plan_shape(store)
        self.device = device
        self.can_fetch = [
            device.reads_pageable or store.pinned(layer) for layer in range(store.num_layers)
        ]
        self.table: tuple[int, ...] = ()  # of layers that can be fetched
        self._prefill = prefill
        self._side = device.stream()
        self._fork, self._join = device.event(), device.event()
        # Whether a layer is guessed as soon as PCIe rests in the one before, or at its own begin.
        self.early = True
        self.foreseen_tokens = min(FORESEEN_TOKENS, shape.max_tokens)
        self._ahead, self._early_guess = device.event(), device.event()
        # A single token's x goes to the CPU and into halves while the router is asked.
        self.publishes = True
        self._beside = device.stream()
        self._normed, self._published = device.event(), device.event()
        self._given: tuple[int, torch.Tensor] | None = None
        self._guessed: torch.Tensor | None = None  # the layer's input, while a side stream reads it
        self._routers: dict[int, RouterView] = {}
        self._foreseen = -1  # the layer that was guessed early
        self._after: tuple[int, torch.Tensor, torch.Tensor | None] | None = None
        self._fetches = self.plan_shape.max_fetch > 0
        self._kept: KeptService | None = None
        if new_service is not None:
            assert block is not None
            self._kept = KeptService(device, block, new_service)

    def __call__(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``layers.moe.MixtureExecutor``."""
        return self._computed(layer, x, ids, weights, None)

    def with_residual(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See ``layers.moe.AddsResidual``."""
        return self._computed(layer, x, ids, weights, residual)

    def _computed(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens = x.shape[0]
        if tokens > self.shape.max_tokens:
            if self._prefill is None:
                raise ConfigError(
                    f"{tokens} tokens at once, this executor takes {self.shape.max_tokens}",
                    hint="give a smaller --max-batch-tokens",
                )
            out = self._prefill(layer, x, ids, weights)
            return out if residual is None else out.add_(residual)
        paths = self.paths
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        given, self._given = self._given, None
        published = given is not None and given[0] == layer and given[1] is x
        if not published:
            if layer == 0:
                paths.begin_step()
            paths.prepare(layer, x)
        paths.plan(layer, ids, weights)
        if self._fetches:
            self._fork.record()
            self._side.wait_event(self._fork)
            with self.device.use(self._side):
                paths.gather(layer)
                self._join.record()
        if published:
            self._published.wait()
        if self.plan_shape.num_slots:
            paths.hits(x)
        self._foresee_next(layer)
        if self._fetches:
            self._join.wait()
            self._guessed = None
            paths.fetched(x)
        paths.await_cpu()
        return paths.combine(tokens, None if residual is None else residual.contiguous())

    def add_to(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """See ``layers.moe.LongChunks``."""
        if ids.shape[0] > self.shape.max_tokens and isinstance(self._prefill, StreamPrefill):
            self._prefill.add_to(layer, x, ids, weights, out)
        else:
            out += self(layer, x(slice(0, ids.shape[0])), ids, weights)

    def foresee(
        self, layer: int, x: torch.Tensor, router: RouterView, valid: torch.Tensor | None
    ) -> None:
        """See ``layers.moe.Foresight``. What is guessed travels beside the layer's attention."""
        self._routers[layer] = router
        done, self._foreseen = self._foreseen == layer, -1
        if done or not self._can_foresee(layer, x):
            return
        self._guessed = x.contiguous()
        self._ahead.record()
        self._side.wait_event(self._ahead)
        with self.device.use(self._side):
            guessed = self.paths.guess(self._guessed, router)
            self.paths.prefetch(layer, guessed, router.top_k, valid)

    def normed(self, layer: int, x: torch.Tensor) -> None:
        """See ``layers.moe.Foresight``."""
        if not self.publishes or x.shape[0] != 1 or not x.is_contiguous():
            return
        if layer == 0:
            self.paths.begin_step()
        self._normed.record()
        self._beside.wait_event(self._normed)
        with self.device.use(self._beside):
            self.paths.publish(layer, x)
            self._published.record()
        self._given = (layer, x)

    def attended(self, layer: int, x: torch.Tensor, valid: torch.Tensor | None) -> None:
        """See ``layers.moe.Foresight``."""
        if self.early and self._can_foresee(layer + 1, x):
            self._after = (layer, x, valid)

    def _can_foresee(self, layer: int, x: torch.Tensor) -> bool:
        if not self.plan_shape.max_prefetch or x.shape[0] > self.foreseen_tokens:
            return False
        router = self._routers.get(layer)
        return router is not None and self.can_fetch[layer] and self.paths.can_foresee(router)

    def _foresee_next(self, layer: int) -> None:
        """Once this layer's fetches have arrived, send the next one's, guessed from the state that this
        layer's experts are given."""
        after, self._after = self._after, None
        if after is None or after[0] != layer:
            return
        _, x, valid = after
        following = layer + 1
        router = self._routers[following]
        guessed = self.paths.guess(x.contiguous(), router)
        self._early_guess.record()
        with self.device.use(self._side):
            self._side.wait_event(self._early_guess)
            self.paths.prefetch(following, guessed, router.top_k, valid)
        self._foreseen = following

    def set_rates(self, rates: PathRates | None) -> None:
        """Split misses by these rates; between steps. None: what the placement says alone.

        Layers that are not pinned cannot be fetched: the CPU takes all of them.
        """
        most = self.shape.max_missing(self.store)
        if self.shape.placement == "hybrid" and rates is not None:
            table = split_table(most, rates)
        elif self.shape.placement == "stream":
            table = tuple(range(most + 1))
        else:
            table = (0,) * (most + 1)
        self.set_table(table)
        self.set_prompt_rates(rates)

    def set_prompt_rates(self, rates: PathRates | None) -> None:
        """Choose by these rates how long prompts go; between steps. None: they are not known."""
        if isinstance(self._prefill, StreamPrefill):
            self._prefill.set_rates(rates)

    def set_table(self, table: tuple[int, ...]) -> None:
        """Fetch ``table[m]`` of m missing slices from now on; between steps. Captured graphs follow."""
        self.table = table
        none = (0,) * len(table)
        self.paths.set_split([table if able else none for able in self.can_fetch])

    def fill(self) -> None:
        """Fill the slots before the first step, expert by expert over all layers alike.

        Any expert is worth more than an empty slot; what is used first replaces one that never was.
        """
        s = self.plan_shape
        keys: list[int] = []
        for expert in range(s.num_experts):
            for layer in range(s.num_layers):
                if len(keys) + s.num_slices > s.num_slots:
                    break
                keys += [s.key(layer, expert, piece) for piece in range(s.num_slices)]
        self.paths.fill(keys)

    def post_counts(self) -> None:
        """Send the counters to the host as they are behind the work queued so far."""
        self.paths.post_counts()

    def posted_counts(self) -> ExpertCounts:
        """``counts`` at the oldest point that was posted; waits for that only. The CPU's own are today's."""
        return self._with_service(self.paths.posted_counts())

    def counts(self) -> ExpertCounts:
        """Slices by path so far; waits for the GPU."""
        return self._with_service(self.paths.counts())

    def _with_service(self, found: ExpertCounts) -> ExpertCounts:
        if self._kept is None:
            return found
        all_of_them = self._kept.stats()
        return replace(
            found,
            cpu_nbytes=found.cpu_nbytes + all_of_them.nbytes,
            compute_s=found.compute_s + all_of_them.busy_s,
            cpu_requests=all_of_them.requests,
            cpu_square_nbytes=all_of_them.square_nbytes,
            cpu_nbytes_s=all_of_them.nbytes_s,
        )

    def prompt_slices(self) -> PromptSlices:
        """What prompts longer than a step used so far."""
        if not isinstance(self._prefill, StreamPrefill):
            return PromptSlices()
        return PromptSlices(self._prefill.hit, self._prefill.fetched, self._prefill.on_cpu)

    @property
    def service(self) -> ExpertService | None:
        """The CPU's, if there is one."""
        return None if self._kept is None else self._kept.service

    @property
    def num_restarts(self) -> int:
        """Times that the CPU's service was started anew after a failure."""
        return 0 if self._kept is None else self._kept.num_restarts

    @property
    def service_works(self) -> bool:
        """Whether the next step can begin with the service as it is, or needs none."""
        return self._kept is None or self._kept.works

    def wake(self) -> None:
        """Wake the CPU's threads for a step behind one that has not ended yet."""
        if self._kept is not None:
            self._kept.wake()

    def step_begins(self, num_tokens: int) -> None:
        """Wake the CPU's threads; replace a service that failed.

        Raises:
            DeviceLostError: its threads hang, and with them the memory that graphs point to.
        """
        if isinstance(self._prefill, StreamPrefill):
            self._prefill.settle()
        if self._kept is not None:
            self._kept.begin()

    def step_ended(self) -> None:
        """Check that the CPU answered every request of the step.

        Raises:
            WorkerLostError: it did not; the step's results are not to be used.
        """
        if self._kept is not None:
            self._kept.check()

    def close(self) -> None:
        """End the service and give the store's memory back."""
        if self._kept is not None:
            self._kept.stop()
        self.store.close()
