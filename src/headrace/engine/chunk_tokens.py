"""How long an engine's chunks are where experts are streamed: prices for ``experts.chunk_choice``.

Plain Python: rates by name in, records out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.core.model_spec import ModelSpec
from headrace.core.weight_shapes import num_parameters
from headrace.engine.expert_rates import StartingRates, automatic_placement, path_rates
from headrace.experts.chunk_choice import (
    CANDIDATES,
    MEAN_PAST,
    ChunkChoice,
    ChunkPrice,
    choose_chunk,
    reason_of,
    tokens_beside,
    with_slack,
)
from headrace.experts.prefill import (
    MAX_CPU_TOKENS,
    PrefillRates,
    both_paths_seconds,
    expected_distinct,
    prefill_rates,
    streaming_crossover,
)
from headrace.experts.slab import SlabLayout

# What prompts reach of a plain bfloat16 product's rate: products, and attention (H200, heads of 64).
PRODUCT_SHARE, ATTENTION_SHARE = 0.7, 0.3
# Experts' weights are unpacked for every tile of tokens, by the vector units: operations of theirs for each
# of the product's. H200, gpt-oss-120b's sizes: 200 TFLOP/s from MXFP4 beside 782 of a plain bfloat16 product
# and 51 of float32.
UNPACKING = 0.16
# Where nobody measured them, GFLOP/s: a small GPU's; and the share of it that float32 is.
GPU_GFLOPS, VECTOR_SHARE = 20_000.0, 0.5


@dataclass(frozen=True)
class StreamedModel:
    """What the prices are made from. mode: "hybrid" or "stream"."""

    spec: ModelSpec
    layout: SlabLayout
    mode: str
    known: StartingRates

    def token_seconds(self) -> float:
        """The GPU's, of a prompt's token: c."""
        spec, counts = self.spec, num_parameters(self.spec)
        rate = 1e9 * (self.known.first("gpu_flops_bf16") or GPU_GFLOPS)
        vector = 1e9 * (self.known.first("gpu_flops_f32") or 0.0) or VECTOR_SHARE * rate
        experts = 0.0
        if spec.moe is not None:
            experts = 2.0 * counts.experts * spec.moe.num_experts_per_token / spec.moe.num_experts
        products = 2.0 * (counts.attention + counts.dense_ffn) + experts
        seen = sum(min(layer.window or MEAN_PAST, MEAN_PAST) for layer in spec.layers)
        attention = 4.0 * spec.num_heads * spec.head_dim * seen
        tensor = products / PRODUCT_SHARE + attention / ATTENTION_SHARE
        return tensor / rate + UNPACKING * experts / vector

    def missing(self, slots_nbytes: int) -> int:
        """Bytes of experts that are not in slots."""
        assert self.spec.moe is not None
        mixtures = sum(layer.moe for layer in self.spec.layers)
        everything = mixtures * self.spec.moe.num_experts * self.layout.slab_nbytes
        return max(everything - max(slots_nbytes, 0), 0)

    def least_nbytes(self) -> int:
        """Bytes of slots that an engine has at least: of a token's experts."""
        return self._mixture()[1] * self.layout.slab_nbytes

    def stream_seconds(self, slots_nbytes: int) -> float | None:
        """What a chunk's experts need to cross PCIe: S."""
        gbps = self.known.first("pcie_h2d", "pcie_gather")
        return None if gbps is None else self.missing(slots_nbytes) / (gbps * 1e9)

    def decode_seconds(self, slots_nbytes: int) -> float | None:
        """A decoding step's, on experts: d."""
        choice = automatic_placement(self.spec, self.layout, slots_nbytes, self.known)
        if choice is None:
            return None
        return next((s for mode, s in choice.seconds.items() if mode == self.mode), None)

    def chunk_seconds(self, tokens: int, slots_nbytes: int) -> float | None:
        """A chunk's, streamed or on both paths, whichever is faster."""
        stream_s, rates = self.stream_seconds(slots_nbytes), self._prompt_rates()
        if stream_s is None or rates is None:
            return None
        chunk_s = max(stream_s, tokens * self.token_seconds())
        if self.mode == "hybrid":
            mixture = (*self._mixture(), self._missing_share(slots_nbytes), rates)
            layers = sum(layer.moe for layer in self.spec.layers)
            both_s = layers * both_paths_seconds(tokens, MAX_CPU_TOKENS, *mixture)
            chunk_s = min(chunk_s, both_s)
        return chunk_s

    def tail(self, slots_nbytes: int) -> int:
        """Tokens of a prompt's rest that take less time on both paths than another stream."""
        rates = self._prompt_rates()
        if rates is None:
            return 0
        experts, top_k = self._mixture()
        if self.mode == "stream":  # what is routed passes through the ring: less than all
            some = range(1, MAX_CPU_TOKENS)
            return sum(expected_distinct(t, experts, top_k) <= experts / 2 for t in some)
        share = self._missing_share(slots_nbytes)
        crossover = streaming_crossover(experts, top_k, share, rates, MAX_CPU_TOKENS)
        return MAX_CPU_TOKENS if crossover is None else max(crossover - 1, 0)

    def _mixture(self) -> tuple[int, int]:
        """Experts, and those of a token."""
        assert self.spec.moe is not None
        return self.spec.moe.num_experts, self.spec.moe.num_experts_per_token

    def _missing_share(self, slots_nbytes: int) -> float:
        whole = self.missing(0)
        return self.missing(slots_nbytes) / whole if whole else 0.0

    def _prompt_rates(self) -> PrefillRates | None:
        """Streams come by the copy engine, single experts by a kernel."""
        rates = path_rates(self.known, self.layout.format, self.layout.slice_nbytes)
        if rates is None:
            return None
        stream = self.known.first("pcie_h2d", "pcie_gather") or rates.pcie_gbps
        return replace(prefill_rates(rates, self.layout.num_slices), stream_gbps=stream)


def choose_chunk_tokens(
    of: StreamedModel,
    slots_nbytes: Callable[[int], int],
    workspace: Callable[[int], int],
    longest: int,
) -> ChunkChoice | None:
    """The chunks of an engine that streams experts; None where no rates are known, or where the workspace of
    none leaves room for slots.

    Args:
        slots_nbytes: what is left for slots, by the tokens that a step is planned for, negative where they do
            not fit; workspace: likewise.
        longest: tokens that a prompt can have.
    """
    prices: list[ChunkPrice] = []
    for tokens in CANDIDATES:
        planned = with_slack(tokens, longest)
        left = slots_nbytes(planned)
        if left < of.least_nbytes():
            break
        chunk_s, decode_s = of.chunk_seconds(tokens, left), of.decode_seconds(left)
        if chunk_s is None or decode_s is None:
            break
        prices.append(ChunkPrice(tokens, chunk_s, decode_s, workspace(planned)))
        if tokens >= longest:
            break
    if not prices:
        return None
    chosen = choose_chunk(prices)
    left = slots_nbytes(with_slack(chosen.tokens, longest))
    beside = with_slack(tokens_beside(prices, chosen), longest)
    reason = reason_of(prices, chosen)
    if beside < chosen.tokens:
        reason += f"; {beside:,} while others decode"
    return ChunkChoice(with_slack(chosen.tokens, longest), beside, of.tail(left), reason)
