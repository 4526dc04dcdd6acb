"""The decoder of every family: what differs between them is data in ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from headrace.core.errors import InternalError
from headrace.core.model_spec import ModelSpec
from headrace.formats.base import PackedTensor
from headrace.layers.attention import Attention
from headrace.layers.dense import DenseFeedForward
from headrace.layers.linear import Linear
from headrace.layers.moe import Mixture, RoutingObserver
from headrace.layers.norm import Norm
from headrace.ops.records import AttentionBatch, LayerCache, LayerKV, SealedKV
from headrace.ops.registry import OpSet


class DecoderLayer:
    """x + attention(norm(x)), then + feed-forward(norm(x)); both residuals are added in the ops.

    A decoding step takes each half as one operation, since there the calls themselves count.
    """

    __slots__ = (
        "_attention",
        "_attention_block",
        "_attention_norm",
        "_dense_block",
        "_feed_forward_norm",
        "_foresee",
        "_fused_caches",
        "_ops",
        "feed_forward",
    )

    def __init__(
        self,
        ops: OpSet,
        attention_norm: Norm,
        attention: Attention,
        feed_forward_norm: Norm,
        feed_forward: DenseFeedForward | Mixture,
    ) -> None:
        self._ops = ops
        self._attention_block = None
        self._fused_caches: tuple[type[LayerCache], ...] = ()
        if ops.has("attention_block") and attention.is_block:
            self._attention_block = attention.block(attention_norm)
            sealed = ops.chosen["attention_block"].takes_sealed
            self._fused_caches = (LayerKV, SealedKV) if sealed else (LayerKV,)
        self._dense_block = None
        dense = feed_forward if isinstance(feed_forward, DenseFeedForward) else None
        if ops.has("dense_block") and dense is not None and dense.is_block:
            self._dense_block = dense.block(feed_forward_norm)
        self._attention_norm = attention_norm
        self._attention = attention
        self._feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        mixture = feed_forward if isinstance(feed_forward, Mixture) else None
        self._foresee = None if mixture is None else mixture.foresight(feed_forward_norm)

    def matrices(self) -> Iterator[tuple[str, PackedTensor]]:
        """See ``Decoder.matrices``."""
        yield from zip(("q", "k", "v", "o"), self._attention.weights)
        if isinstance(self.feed_forward, DenseFeedForward):
            yield from zip(("gate", "up", "down"), self.feed_forward.weights)
            return
        yield "router", self.feed_forward.router_weight
        experts = self.feed_forward.experts
        if experts is not None:
            for stack in (experts.gate, experts.up, experts.down):
                for weight in stack:
                    yield "expert", weight

    def __call__(self, x: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """x: float32 [T, D] -> float32 [T, D], x itself where the batch has pieces."""
        if batch.pieces:
            return self._in_pieces(x, batch, cache)
        if batch.decode and self._foresee is not None:
            self._foresee(x, batch.valid)
        block = self._attention_block
        if block is not None and batch.decode and isinstance(cache, self._fused_caches):
            x = self._ops.attention_block(x, block, cache, batch)
        else:
            x = self._attention(self._attention_norm(x), x, batch, cache)
        if batch.decode and self._dense_block is not None:
            return self._ops.dense_block(x, self._dense_block)
        normed = self._feed_forward_norm(x)
        if isinstance(self.feed_forward, Mixture):
            return self.feed_forward(normed, x, batch.valid)
        return self.feed_forward(normed, x)

    def _in_pieces(self, x: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """A long chunk, in place: all that is as long as the chunk is x and what a mixture needs."""
        rows = _rows(batch.pieces)
        for piece, some in zip(batch.pieces, rows):
            own = x[some]
            own.copy_(self._attention(self._attention_norm(own), own, piece, cache))
        norm, feed_forward = self._feed_forward_norm, self.feed_forward
        if isinstance(feed_forward, Mixture):
            feed_forward.add_to(x, norm, rows)
            return x
        for some in rows:
            x[some] = feed_forward(norm(x[some]), x[some])
        return x


def _rows(pieces: Sequence[AttentionBatch]) -> list[slice]:
    """The rows of each piece in the whole batch."""
    found: list[slice] = []
    start = 0
    for piece in pieces:
        found.append(slice(start, start + piece.positions.shape[0]))
        start = found[-1].stop
    return found


class Decoder:
    """A loaded model.

    Its results are inference tensors: callers that change them in place do so under
    ``torch.inference_mode()``, too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: OpSet,
        embed: PackedTensor,
        layers: Sequence[DecoderLayer],
        final_norm: Norm,
        lm_head: PackedTensor,
        max_positions: int,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.max_positions = max_positions  # rows of the rotary table
        self._embed = embed
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._lm_head = Linear(ops, lm_head)

    @property
    def on_routing(self) -> RoutingObserver | None:
        """Called with (layer, expert ids int32 [T, k]) at every mixture; None to switch it off."""
        for layer in self._layers:
            if isinstance(layer.feed_forward, Mixture):
                return layer.feed_forward.on_routing
        return None

    @on_routing.setter
    def on_routing(self, observer: RoutingObserver | None) -> None:
        for layer in self._layers:
            if isinstance(layer.feed_forward, Mixture):
                layer.feed_forward.on_routing = observer

    def watch_mixtures(self, observer: Callable[[], None] | None) -> None:
        """Call ``observer`` behind every mixture, once all of its work is launched; None: stop."""
        for layer in self._layers:
            if isinstance(layer.feed_forward, Mixture):
                layer.feed_forward.on_computed = observer

    def matrices(self) -> Iterator[tuple[str, PackedTensor]]:
        """Every matrix as (name of its kind, as stored): "embed", "q", "k", "v", "o", "gate", "up",
        "down", "router", "expert", "lm_head". A tied head comes twice. Experts that an executor
        keeps do not come.
        """
        yield "embed", self._embed
        for layer in self._layers:
            yield from layer.matrices()
        yield "lm_head", self._lm_head.weight

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, kv: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Run one step and append its keys and values.

        token_ids: int64 [T], the rows of ``batch``; kv: one cache for each layer.
        Returns float32 [T, D], the final norm applied.
        """
        if len(kv) != len(self._layers):
            raise InternalError(f"{len(kv)} layer caches for {len(self._layers)} layers")
        x = self.ops.embed(self._embed, token_ids)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        for layer, cache in zip(self._layers, kv):
            x = layer(x, batch, cache)
        if not batch.pieces:
            return self._final_norm(x)
        for rows in _rows(batch.pieces):
            x[rows] = self._final_norm(x[rows])
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: float32 [R, D], rows of what ``forward`` returned. Returns float32 [R, V]."""
        return self._lm_head(hidden)
