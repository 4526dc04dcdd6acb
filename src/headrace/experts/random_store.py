"""Stores full of random experts, made in place as fast as memory is written: for benchmarks.

Weights are valid in every format that is offered here: no NaN, and of the size that a trained model's
have (near 2^-7), so that activations neither vanish nor overflow over many layers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from headrace.core.block_planes import SCALES_AT, scale_bytes
from headrace.core.errors import UnsupportedModelError
from headrace.core.numeric import FORMATS
from headrace.experts.slab import SlabLayout, SlabPart
from headrace.experts.slab_load import Loader
from headrace.experts.store import HostStore
from headrace.machine.pages import HostBlock
from headrace.machine.pinned import Pinner, default_pinner

Bytes = npt.NDArray[np.uint8]
Fill = Callable[[Bytes, Bytes], None]  # random bytes, the part to fill: both [n]

# Random bytes that all slabs are cut from, at another place and with another key each. Longer than
# any part, and prime to what parts repeat by.
_POOL_NBYTES = (64 << 20) + 8 * 10007
_FACTORS = {"nvfp4": 2.0**-9, "fp8_e4m3": 2.0**-13}  # of codes up to 6, and up to 240
_BIAS = 2.0**-12  # a step of biases, which are int8 multiples: at most 2^-5

# Float bits: keep sign and mantissa, set the exponent to 2^-7.
_FLOAT_BITS = {
    "bf16": (np.uint16, 0x807F, 0x3C00),
    "f16": (np.uint16, 0x83FF, 0x2000),
    "f32": (np.uint32, 0x807FFFFF, 0x3C000000),
}
# Float16 scales of block types: where in a block they lie.
_HALVES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "q3_k": (108,),
    "q2_k": (80, 82),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
# Times codes of tens. q6_k has scales of 8 bits beside, iq4 codes up to 127: one power of two less.
_HALF_HIGH_BYTE = {fmt: 0x04 if fmt in ("q6_k", "iq4_nl", "iq4_xs") else 0x08 for fmt in _HALVES}


def random_store(
    layout: SlabLayout | Sequence[SlabLayout],
    num_layers: int,
    num_experts: int,
    *,
    seed: int,
    threads: int,
    pin: bool = False,
    pinner: Pinner | None = None,
) -> HostStore:
    """Make a store of random experts; the same seed gives the same bytes, whatever the threads.

    layout: of all layers, or of each.

    Raises:
        UnsupportedModelError: there is no recipe for the layout's formats.
    """
    layouts = (layout,) * num_layers if isinstance(layout, SlabLayout) else tuple(layout)
    fills = {one: _fills(one) for one in set(layouts)}
    longest = max(part.nbytes for one in layouts for part in one.parts)
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 1 << 64, _POOL_NBYTES // 8, np.uint64).view(np.uint8)
    keys = rng.integers(0, 1 << 63, (num_layers, num_experts, layouts[0].num_slices, 2), np.int64)
    store = HostStore(layouts, num_experts, (pinner or default_pinner()) if pin else None)
    loader = Loader(layouts, threads)
    own = threading.local()
    try:
        for layer in range(num_layers):
            store.add(HostBlock(store.layer_nbytes(layer)))

        def make(task: tuple[int, int, int]) -> None:
            layer, expert, piece = task
            if not hasattr(own, "scratch"):
                own.scratch = np.empty(longest + 8, np.uint8)
            place, key = (int(k) for k in keys[layer, expert, piece])
            out = store.slab(layer, expert)[piece].numpy()
            _fill_slice(out, fills[layouts[layer]], pool, (place, key), own.scratch)
            if piece and layouts[layer].has_bias:
                bias = layouts[layer].part("down_bias")
                out[bias.offset : bias.offset + bias.nbytes] = 0

        counts = (range(num_layers), range(num_experts), range(layouts[0].num_slices))
        with ThreadPoolExecutor(threads) as workers, loader.times.timing("random"):
            for _ in workers.map(make, itertools.product(*counts)):
                pass
        loader.times.count(sum(map(store.layer_nbytes, range(num_layers))))
        if pin:
            _pin_all(store, loader)
        store.times = loader.finish()
    except BaseException:
        store.close()
        raise
    return store


def _pin_all(store: HostStore, loader: Loader) -> None:
    for layer in range(store.num_layers):
        with loader.times.timing("pin"):
            refusal = store.pin(layer)
        if refusal is not None:
            store.notes.append(
                f"layers {layer} to {store.num_layers - 1} are not pinned: {refusal}"
            )
            return


def _fill_slice(
    out: Bytes,
    fills: list[tuple[SlabPart, Fill]],
    pool: Bytes,
    keys: tuple[int, int],
    scratch: Bytes,
) -> None:
    place, key = keys
    for part, fill in fills:
        padded = -(-part.nbytes // 8) * 8
        start = place % (len(pool) - padded) // 8 * 8
        place = place * 31 % (1 << 62) + 8  # the next part from elsewhere
        words = scratch[:padded].view(np.uint64)
        np.bitwise_xor(pool[start : start + padded].view(np.uint64), np.uint64(key), out=words)
        fill(scratch[: part.nbytes], out[part.offset : part.offset + part.nbytes])


def _fills(layout: SlabLayout) -> list[tuple[SlabPart, Fill]]:
    found: list[tuple[SlabPart, Fill]] = []
    for part in layout.parts:
        fmt = layout.down_format if part.name.startswith("down") else layout.format
        if part.name.endswith("_bias"):
            fill: Fill | None = _biases
        elif part.name.endswith("_factors"):
            fill = _factors(fmt)
        elif part.name.endswith("_scales"):
            fill = _scales(fmt)
        else:
            fill = _codes(fmt, part)
        if fill is None:
            raise UnsupportedModelError(
                f"there are no random experts in {fmt}",
                hint=f"benchmarks offer {', '.join(sorted({*_FLOAT_BITS, *_HALVES}))}, mxfp4, nvfp4, "
                "fp8_e4m3",
            )
        found.append((part, fill))
    return found


def _codes(fmt: str, part: SlabPart) -> Fill | None:
    if fmt in ("mxfp4", "nvfp4") or (fmt in SCALES_AT and fmt in _HALVES):
        return _copy
    if fmt == "fp8_e4m3":
        return _no_nan_e4m3
    if fmt in _FLOAT_BITS:
        dtype, keep, exponent = _FLOAT_BITS[fmt]

        def floats(random: Bytes, out: Bytes) -> None:
            to = out.view(dtype)
            np.bitwise_and(random.view(dtype), dtype(keep), out=to)
            np.bitwise_or(to, dtype(exponent), out=to)

        return floats
    if fmt in _HALVES:
        block = FORMATS[fmt].block_nbytes

        def blocks(random: Bytes, out: Bytes) -> None:
            out[:] = random
            rows = out.reshape(-1, block)
            for offset in _HALVES[fmt]:
                rows[:, offset + 1] = _HALF_HIGH_BYTE[fmt]

        return blocks
    return None


def _scales(fmt: str) -> Fill | None:
    """Of the part that holds scales apart."""
    if fmt == "mxfp4":
        return _e8m0_scales
    if fmt == "nvfp4":
        return _e4m3_scales
    if fmt not in _HALVES:
        return None
    first, last = scale_bytes(fmt)

    def fill(random: Bytes, out: Bytes) -> None:
        out[:] = random
        rows = out.reshape(-1, last - first)
        for offset in _HALVES[fmt]:
            rows[:, offset - first + 1] = _HALF_HIGH_BYTE[fmt]

    return fill


def _copy(random: Bytes, out: Bytes) -> None:
    out[:] = random


def _no_nan_e4m3(random: Bytes, out: Bytes) -> None:
    np.bitwise_and(random, np.uint8(0xF7), out=out)  # NaN has all four exponent bits


def _e8m0_scales(random: Bytes, out: Bytes) -> None:
    np.bitwise_and(random, np.uint8(3), out=out)
    np.add(out, np.uint8(127 - 9), out=out)  # 2^-9 to 2^-6, of codes up to 6


def _e4m3_scales(random: Bytes, out: Bytes) -> None:
    np.bitwise_and(random, np.uint8(7), out=out)
    np.add(out, np.uint8(0x38), out=out)  # 1 to 1.875


def _factors(fmt: str) -> Fill:
    def fill(random: Bytes, out: Bytes) -> None:
        out.view(np.float32)[:] = _FACTORS[fmt]

    return fill


def _biases(random: Bytes, out: Bytes) -> None:
    to = out.view(np.float32)
    np.multiply(random[: to.size].view(np.int8), np.float32(_BIAS), out=to)
