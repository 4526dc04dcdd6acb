"""Make routing traces of the routes that ``training.evaluate`` found.

    python -m training.traces ROUTES TEXTS.json.xz CONFIG.json OUT --model small

A trace a kind and part (see ``training.texts``), ``OUT/<kind>.<part>.npz``. A trace's documents
follow each other; each was routed alone, from its first token.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.trace import RoutingTrace, RoutingTraceMeta

WHAT = {
    "prose": "held-out speeches and manuals",
    "code": "held-out Python sources",
    "dialogue": "synthetic dialogue (training/synthetic.py)",
    "tables": "synthetic lists and tables (training/synthetic.py)",
    "agent": "synthetic agent transcripts (training/synthetic.py)",
}


def trace_of(
    routes: np.ndarray, texts: list[dict[str, Any]], name: tuple[str, str, str], experts: int
) -> RoutingTrace:
    """One trace. routes: uint8 [layers, tokens, chosen]; name: model, kind, part."""
    model, kind, part = name
    lengths = tuple(len(t["ids"]) for t in texts)
    if sum(lengths) != routes.shape[1]:
        raise ValueError(f"{kind}.{part}: {routes.shape[1]} routed tokens, {sum(lengths)} of text")
    meta = RoutingTraceMeta(
        model=model,
        text=f"{kind}, {part} part: {WHAT[kind]}",
        licence="; ".join(sorted({t["licence"] for t in texts})),
        num_experts=experts,
        layers=tuple(range(routes.shape[0])),
        documents=lengths,
    )
    return RoutingTrace(routes.astype(np.int16), meta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("routes", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="its name in the traces")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    layers, chosen = config["num_hidden_layers"], config["num_experts_per_tok"]
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, parts in json.loads(lzma.decompress(args.texts.read_bytes())).items():
        for part, texts in parts.items():
            raw = lzma.decompress((args.routes / f"routes.{kind}.{part}.xz").read_bytes())
            routes = np.frombuffer(raw, np.uint8).reshape(layers, -1, chosen)
            trace = trace_of(routes, texts, (args.model, kind, part), config["num_local_experts"])
            path = args.out / f"{kind}.{part}.npz"
            trace.save(path)
            print(f"{path.name}: {routes.shape[1]} tokens, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
