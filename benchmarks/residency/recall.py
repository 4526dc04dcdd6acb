"""How well a layer's routing is guessed before it is known.

    python -m benchmarks.residency.recall --model tiny --text README.md

Two guesses of layer l: its own router on its input before attention (``own``, what the engine does), and,
a whole layer earlier, on what the router of layer l - 1 chose by (``early``). Share of the k chosen experts
that are among the guess's k, and of the guess's first and first two that are among the chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.residency import geometry as geo
from headrace.core.step import ScheduledChunk
from headrace.engine.batch import build_batch
from headrace.experts.foresight import guess, surest
from headrace.kv.storage import allocate_kv
from headrace.layers.moe import Mixture
from headrace.models.decoder import Decoder
from headrace.ops.expert_records import RouterView
from headrace.ops.records import AttentionBatch, LayerKV

BLOCK_TOKENS = 16


class Watched:
    """A decoder layer, and what would have been guessed before it."""

    def __init__(self, layer: Any, guesses: dict[str, list[torch.Tensor]]) -> None:
        self._layer, self._guesses = layer, guesses
        self.view: RouterView = layer.feed_forward._router.view(layer._feed_forward_norm)
        self._norm = layer._feed_forward_norm
        layer._feed_forward_norm = self._normed
        self.next: Watched | None = None

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """The norm before the router; x, after attention, is what the next layer is guessed from."""
        if self.next is not None:
            self._guesses["early"].append(surest(guess(x, self.next.view), self.view.top_k))
        return self._norm(x)

    def __call__(self, x: torch.Tensor, batch: AttentionBatch, cache: LayerKV) -> torch.Tensor:
        self._guesses["own"].append(surest(guess(x, self.view), self.view.top_k))
        return self._layer(x, batch, cache)

    def restore(self) -> Any:
        self._layer._feed_forward_norm = self._norm
        return self._layer


@torch.inference_mode()
def recall(
    decoder: Decoder, kv: Sequence[LayerKV], tokens: Sequence[int], device: torch.device
) -> dict[str, Any]:
    """Route one chunk of tokens and compare; figures over all layers that have the guess."""
    blocks = tuple(range(-(-len(tokens) // BLOCK_TOKENS)))
    ids, batch = build_batch(
        [ScheduledChunk(0, tuple(tokens), 0, blocks, True)], BLOCK_TOKENS, device
    )
    chosen: list[torch.Tensor] = []
    guesses: dict[str, list[torch.Tensor]] = {"own": [], "early": []}
    plain = decoder._layers
    layers = [Watched(x, guesses) if isinstance(x.feed_forward, Mixture) else x for x in plain]
    watched = [x for x in layers if isinstance(x, Watched)]
    for one, following in itertools.pairwise(watched):
        one.next = following
    decoder.on_routing = lambda _, found: chosen.append(found.clone())
    decoder._layers = tuple(layers)
    try:
        decoder.forward(ids, batch, kv)
    finally:
        decoder._layers = tuple(x.restore() if isinstance(x, Watched) else x for x in layers)
        decoder.on_routing = None
    return {
        name: _compared(found, chosen[len(chosen) - len(found) :])
        for name, found in guesses.items()
    }


def _compared(found: Sequence[torch.Tensor], chosen: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Shares: of the chosen that were guessed; of first and first two guesses that were chosen."""
    right = [(g[:, :, None] == c[:, None, :]).any(2).float() for g, c in zip(found, chosen)]
    stacked = torch.stack(right)
    return {
        "recall": float(stacked.mean()),
        "first": float(stacked[:, :, 0].mean()),
        "first_two": float(stacked[:, :, :2].mean()),
        "by_layer": [round(float(layer.mean()), 3) for layer in right],
    }


def main() -> None:
    from headrace.checkpoint.open import open_checkpoint
    from headrace.machine.device import HostDevice
    from headrace.models.loader import load_model
    from headrace.ops.registry import resolve
    from headrace.text.tokenizer import load_tokenizer

    parser = geo.parser(__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--text", default="README.md")
    parser.add_argument("--tokens", type=int, default=768)
    options = parser.parse_args()
    device = HostDevice()
    checkpoint = open_checkpoint(options.model)
    decoder = load_model(checkpoint, resolve(("reference",)), device)
    tokenizer = load_tokenizer(checkpoint.text)
    tokens = tokenizer.encode(Path(options.text).read_text())[: options.tokens]
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    kv = allocate_kv(decoder.spec, blocks, BLOCK_TOKENS, "f32", device.torch_device)
    figures = {"model": options.model, "tokens": len(tokens)}
    geo.report(
        "residency/recall", figures | recall(decoder, kv, tokens, device.torch_device), options.out
    )


if __name__ == "__main__":
    main()
