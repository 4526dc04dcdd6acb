"""Slices of experts on the CPU: computed now, or by threads that answer requests in a block.

MXFP4 and Q4_K multiply with activations of two int8 terms for each block of 32 (15 bits and a sign,
finer than bfloat16), other formats with float32 activations. Both give the same bits on every
instruction set, for any number of threads, and for a token alone or among others in requests of up to 16
tokens; in larger ones experts of several tokens use matrix tiles where the CPU has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from headrace.core.errors import ConfigError, InternalError, MachineError
from headrace.machine.reserved_cpus import CpuReservation
from headrace.ops.cpu import _native
from headrace.ops.cpu.arguments import checked
from headrace.ops.cpu.control import num_threads
from headrace.ops.cpu.linear import activation_number
from headrace.ops.cpu.matrix import SLAB_FORMAT_NUMBERS
from headrace.ops.expert_records import (
    BlockFields,
    ExpertFault,
    ServiceFault,
    ServiceOptions,
    ServiceStats,
    SliceLayout,
)
from headrace.ops.records import Activation

# The order of the parts in native/expert_slab.h.
_PARTS = (
    *("gate_up", "gate_up_scales", "gate_up_factors"),
    *("down", "down_scales", "down_factors", "gate_up_bias", "down_bias"),
)

# Largest |difference| / largest |value| of an expert's output to float64, MXFP4 and Q4_K: rounding the
# activations errs by 2.3e-5 of a sum of normal numbers (tests/parity/test_cpu_vnni.py), in two products
# in a row, and the activation between them may double it.
TERMS_TOLERANCE = 2e-4
# Other formats: float32 sums, as ops.cpu.table has it, twice.
FLOAT_TOLERANCE = 4e-5


_TERMS = frozenset({"mxfp4", "q4_k"})


def tolerance(layout: SliceLayout) -> float:
    """Largest |difference| / largest |value| of an expert's output to the float64 reference."""
    terms = _TERMS.intersection((layout.format, layout.down_format))
    return TERMS_TOLERANCE if terms else FLOAT_TOLERANCE


def isa() -> str:
    """The instruction set of the products with two terms."""
    return _native.expert_isa()


def run_now(
    layout: SliceLayout,
    base: int,
    num_experts: int,
    act: Activation,
    x: torch.Tensor,
    items: torch.Tensor,
    pair_token: torch.Tensor,
    pair_weight: torch.Tensor,
    threads: int | None = None,
) -> torch.Tensor:
    """The sum over items of weight * partial output, computed before this returns.

    base: address of the layer's first slab, ``num_experts`` of them; x: float32 [T, hidden]; items:
    int32 [M, 4], strictly ascending by (expert, slice): expert, slice, first pair, pairs; pair_token:
    int32 [P], ascending within an item; pair_weight: float32 [P]. ``threads``: shares of the work (all
    threads of the CPU operations by default). Returns float32 [T, hidden].

    Raises:
        InternalError: an index is out of range or out of order.
    """
    x = checked(x, torch.float32, (x.shape[0], layout.hidden), "x")
    items = checked(items, torch.int32, (items.shape[0], 4), "items")
    pairs = pair_token.numel()
    pair_token = checked(pair_token, torch.int32, (pairs,), "pair_token")
    pair_weight = checked(pair_weight, torch.float32, (pairs,), "pair_weight")
    out = torch.empty_like(x)
    if x.shape[0] == 0:
        return out
    fault = ExpertFault(
        _native.run_experts(
            _native_layout(layout),
            base,
            num_experts,
            activation_number(act),
            act.alpha,
            act.limit,
            [x.shape[0], items.shape[0], pairs],
            [t.data_ptr() for t in (items, pair_token, pair_weight, x, out)],
            num_threads() if threads is None else threads,
        )
    )
    if fault is not ExpertFault.NONE:
        raise InternalError(f"items for {num_experts} experts: {fault.meaning}")
    return out


class NativeExpertService:
    """Threads that answer the requests of one block (``experts.request_block``), one at a time.

    ``layouts`` and ``bases``: of each layer, which may differ in formats and not in dimensions.

    Words that matter outside: ``seq`` (a new value asks), ``ack`` (the answer is complete), ``abort``
    (``ExpertFault``; while it is not zero, requests are passed over). A request that is wrong, a thread
    that fails and one that does not finish in ``stall_s`` set ``abort``; after the last two the service
    is over, and a new one on a zeroed block takes its place.
    """

    def __init__(
        self,
        layouts: Sequence[SliceLayout],
        bases: Sequence[int],
        num_experts: int,
        act: Activation,
        block: torch.Tensor,
        fields: BlockFields,
        options: ServiceOptions,
    ) -> None:
        _check_block(layouts[0], block, fields)
        _check_options(options)
        self.threads = options.threads
        self._reservation = CpuReservation(options.cpus or () if options.apart else ())
        self._released = weakref.finalize(self, self._reservation.release)
        self._released.atexit = False
        self._block = block
        # As an array: every step looks at it several times, and a tensor's item takes microseconds.
        self._abort = block[fields.abort : fields.abort + 4].view(torch.int32).numpy()
        self._native = _native.ExpertService(
            [_native_layout(layout) for layout in layouts],
            list(bases),
            num_experts,
            activation_number(act),
            act.alpha,
            act.limit,
            block.data_ptr(),
            [
                *(fields.max_tokens, fields.max_items, fields.max_pairs),
                *(fields.seq, fields.ack, fields.abort, fields.ready, fields.ready_parts),
                *(fields.header, fields.items),
                *(fields.pair_token, fields.pair_weight, fields.x, fields.out),
            ],
            options.threads,
            list(options.cpus or ()),
            options.idle_s,
            options.stall_s,
        )

    def start(self) -> None:
        """Start the threads; a request that is there already is answered. Once only.

        Threads with CPUs of their own (``ServiceOptions.cpus``, ``apart``) keep them for themselves until
        ``stop``: see ``machine.reserved_cpus``.
        """
        self._reservation.take()
        self._native.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the threads. Whoever waits for an answer finds ``abort`` set.

        Raises:
            MachineError: a thread did not end in time. Its memory, the block among it, is kept for ever.
        """
        ended = self._native.stop(timeout_s)
        self._released()
        if ended:
            return
        _native.keep_forever(self._block)
        raise MachineError(
            f"a thread of the CPU experts did not end within {timeout_s:g} s",
            hint="the machine is overloaded or a disk does not answer; restart the server",
        )

    def running(self) -> bool:
        """Whether all threads are there and none has failed."""
        return self._native.running()

    def wake(self) -> None:
        """Say that a request will come soon: sleeping threads get up and spin."""
        self._native.wake()

    def heartbeat(self) -> int:
        """Grows while the service waits and with every answer; stands still once a thread is lost."""
        return self._native.heartbeat()

    def awake(self) -> int:
        """Threads, without the polling one, that spin or work."""
        return self._native.awake()

    def stats(self) -> ServiceStats:
        """What was done since the start."""
        return ServiceStats(*self._native.stats())

    def fault(self) -> ExpertFault:
        """What ``abort`` holds."""
        return ExpertFault(int(self._abort[0]))

    def request(self, timeout_s: float) -> float:
        """Ask from the host: publish the block as it is, wait, and return the seconds it took.

        Raises:
            InternalError: the request is wrong.
            MachineError: no answer came.
        """
        took = self._native.request(timeout_s)
        if took >= 0.0:
            return took
        fault = self.fault()
        if ExpertFault.LAYER <= fault <= ExpertFault.TOO_MANY:
            raise InternalError(f"request to the CPU experts: {fault.meaning}")
        reason = fault.meaning if fault else f"no answer within {timeout_s:g} s"
        raise MachineError(f"CPU experts: {reason}", hint="restart the engine")

    def inject(self, fault: ServiceFault, thread: int) -> None:
        """Make one thread fail at the next request. For tests of what watches the service."""
        self._native.inject(int(fault), thread)

    def tune(self, *, rows: int, near_nbytes: int, far_nbytes: int) -> None:
        """Change how rows are read: rows at once, prefetch distances (0: no second). For benchmarks."""
        self._native.set_reading(rows, near_nbytes, far_nbytes)

    def tune_tiles(self, *, tokens: int, pairs: int, narrow_pairs: int, block_pairs: int) -> None:
        """Which items use matrix tiles. For benchmarks.

        Requests of fewer than ``tokens`` tokens use exact blocks for items of ``block_pairs`` pairs and more,
        larger ones narrow products from ``narrow_pairs`` on and whole tiles from ``pairs`` on.
        """
        self._native.set_tile_use(tokens, pairs, narrow_pairs, block_pairs)

    def share_work(self, *, help_others: bool, yield_waiting: bool) -> None:
        """Whether threads take over others' work, and offer their CPU while they wait. For benchmarks."""
        self._native.set_helping(help_others)
        self._native.set_yielding(yield_waiting)

    def log_rounds(self, rounds: int) -> torch.Tensor:
        """Note the times of the newest rounds from now on; for benchmarks.

        Returns int64 [rounds, 3 + 6 * threads], rewritten while the service runs; native/round_log.h
        says what the columns are. Row n % rounds is the n-th round's.
        """
        self._log = torch.zeros(rounds, 3 + 6 * self.threads, dtype=torch.int64)
        self._native.start_log(self._log.data_ptr(), rounds)
        return self._log

    def read_only(self, on: bool) -> None:
        """Read the items' bytes instead of computing: the yardstick of benchmarks."""
        self._native.set_read_only(on)


expert_service = NativeExpertService


def _native_layout(layout: SliceLayout) -> _native.SlabLayout:
    parts = {p.name: (p.offset, p.row_nbytes) for p in layout.parts}
    unknown = set(parts) - set(_PARTS)
    if unknown:
        raise InternalError(f"the expert kernels do not know the parts {sorted(unknown)}")
    return _native.make_slab_layout(
        SLAB_FORMAT_NUMBERS[layout.format],
        SLAB_FORMAT_NUMBERS[layout.down_format],
        [layout.hidden, layout.width, layout.num_slices, layout.slice_nbytes],
        layout.block_factors,
        [parts.get(name, (-1, 0)) for name in _PARTS],
    )


def _check_block(layout: SliceLayout, block: torch.Tensor, fields: BlockFields) -> None:
    ok = block.dtype is torch.uint8 and block.dim() == 1 and block.is_contiguous() and block.is_cpu
    if not ok or block.numel() < fields.nbytes or block.data_ptr() % 64:
        raise InternalError(
            f"request block: found {block.dtype} {list(block.shape)} on {block.device}, expected at "
            f"least {fields.nbytes} contiguous bytes on the CPU, aligned to 64"
        )
    if fields.hidden != layout.hidden:
        raise InternalError(f"request block of {fields.hidden} columns, experts of {layout.hidden}")


def _check_options(options: ServiceOptions) -> None:
    if options.threads < 1:
        raise ConfigError(
            f"CPU expert threads: found {options.threads}, expected at least 1",
            hint="leave the number of threads out to have it chosen",
        )
    if options.cpus is not None and len(options.cpus) != options.threads:
        raise InternalError(f"{options.threads} threads of CPU experts on CPUs {options.cpus}")
