"""What a finished model does on held-out text: perplexity, expert load, and routes.

    python -m training.evaluate --model DIR --ids IDS --out OUT [--texts TEXTS.json.xz]

``OUT/held_out.json`` has perplexity by domain and each layer's share of choices per expert over all
held-out tokens. ``OUT/routes.<kind>.<part>.xz`` are the chosen experts of the given texts, uint8
[layers, tokens, chosen] in the router's order; ``training.traces`` makes traces of them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.load import load_exported
from training.model import MixtureModel
from training.train import read_ids

ROWS = 8  # contexts at a time: attention is spelt out, heads x context^2 floats a row


class Routes:
    """Collects the experts that each layer chooses, through hooks on the routers."""

    def __init__(self, model: MixtureModel) -> None:
        self.chosen = model.shape.chosen
        self.found: list[Tensor] = []
        for layer in model.layers:
            layer.moe.router.register_forward_hook(self._keep)  # type: ignore[union-attr]

    def _keep(self, module: object, inputs: object, logits: Tensor) -> None:
        self.found.append(logits.float().topk(self.chosen, -1).indices.to(torch.uint8))

    def take(self) -> Tensor:
        """[layers, tokens, chosen] since the last call."""
        out = torch.stack(self.found)
        self.found.clear()
        return out


def precision(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


@torch.no_grad()
def held_out(model: MixtureModel, routes: Routes, ids: np.ndarray) -> tuple[float, Tensor, int]:
    """Sum of losses in nats, choices per [layer, expert], and tokens; contexts in sequence."""
    device, n = model.embed.weight.device, model.shape.context
    count = (len(ids) - 1) // n
    data = torch.from_numpy(ids[: count * n + 1].astype(np.int64))
    total = 0.0
    load = torch.zeros(model.shape.layers, model.shape.experts, device=device)
    for at in range(0, count, ROWS):
        r = min(ROWS, count - at)
        x = data[at * n : (at + r) * n].view(r, n).to(device)
        y = data[at * n + 1 : (at + r) * n + 1].view(r, n).to(device)
        with precision(device.type):
            total += float(model.loss(x, y, (None, None))[0]) * r * n
        chosen = routes.take().flatten(1).long()
        load.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=load.dtype))
    return total, load, count * n


@torch.no_grad()
def routes_of(model: MixtureModel, routes: Routes, texts: list[list[int]]) -> np.ndarray:
    """uint8 [layers, tokens, chosen]: each text alone, from its first token."""
    device = model.embed.weight.device
    parts = []
    for text in texts:
        with precision(device.type):
            model(torch.tensor([text[: model.shape.context]], device=device), (None, None))
        parts.append(routes.take().cpu())
    return torch.cat(parts, 1).numpy()


def evaluate(model: MixtureModel, ids_folder: Path, texts: Path | None, out: Path) -> None:
    """Write what the module's first lines promise."""
    out.mkdir(parents=True, exist_ok=True)
    routes = Routes(model)
    if texts is not None:
        for kind, parts in json.loads(lzma.decompress(texts.read_bytes())).items():
            for part, chosen in parts.items():
                found = routes_of(model, routes, [t["ids"] for t in chosen])
                path = out / f"routes.{kind}.{part}.xz"
                path.write_bytes(lzma.compress(np.ascontiguousarray(found).tobytes()))
    perplexity, tokens = {}, {}
    load = torch.zeros(())
    for path in sorted(ids_folder.glob("held.*.bin.xz")):
        domain = path.name.split(".")[1]
        total, choices, tokens[domain] = held_out(model, routes, read_ids(path))
        perplexity[domain] = round(math.exp(total / tokens[domain]), 4)
        load = load + choices.cpu()
    share = load / load.sum(1, keepdim=True)
    result = {
        "tokens": tokens,
        "perplexity": perplexity,
        "min_share": round(float(share.min()), 6),
        "max_share": round(float(share.max()), 6),
        "share": [[round(float(v), 6) for v in row] for row in share],
    }
    (out / "held_out.json").write_text(json.dumps(result) + "\n")
    del result["share"]
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load_exported(args.model).to("cuda" if torch.cuda.is_available() else "cpu")
    evaluate(model, args.ids, args.texts, args.out)


if __name__ == "__main__":
    main()
