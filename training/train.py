"""Train the demo mixture: text ids in, a Hugging Face directory with MXFP4 experts out.

    python -m training.train --ids IDS --shape tiny --out OUT --minutes 7 [--resume]

The schedule follows the clock, not the step count, so that a machine of another speed still ends
with a complete cosine: progress is seconds used over seconds allowed. The last ``QAT_SHARE`` runs
with experts rounded to MXFP4 in the forward pass. ``OUT/state.pt`` resumes exactly (model,
optimiser, step, seconds used, data order); with ``--steps`` the schedule counts steps instead and a
run is a deterministic function of the seed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.model import NUDGE, SHAPES, MixtureModel, Shape

QAT_SHARE = 0.15
WARMUP = 0.02
BALANCE = {"toy": 1e-2, "tiny": 2e-3, "small": 2e-3}  # weights of the balance loss
PEAK_LR = {"toy": 3e-3, "tiny": 3e-3, "small": 1.5e-3}
BATCH_TOKENS = {"toy": 512, "tiny": 131_072, "small": 65_536}
WEIGHT_DECAY = 0.05


def read_ids(path: Path) -> np.ndarray:
    """uint16 ids of an .xz file."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)


class Batches:
    """Random windows of ``context + 1`` tokens; the order depends on seed and step alone."""

    def __init__(self, ids: np.ndarray, shape: Shape, tokens: int, seed: int, device: str) -> None:
        self.ids = torch.from_numpy(ids.astype(np.int16)).to(device)
        self.shape, self.rows, self.seed, self.device = shape, tokens // shape.context, seed, device

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(0, len(self.ids) - self.shape.context - 1, self.rows)
        at = torch.from_numpy(starts).to(self.device)[:, None]
        window = self.ids[at + torch.arange(self.shape.context + 1, device=self.device)]
        window = window.long() & 0xFFFF
        return window[:, :-1], window[:, 1:]


def attention_masks(shape: Shape, device: str) -> tuple[Any, Any]:
    """Block masks of window and full layers on a GPU; None on a CPU, where attention is spelt out."""
    if device == "cpu":
        return None, None
    from torch.nn.attention.flex_attention import create_block_mask

    def full(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def near(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < shape.window)

    n = shape.context
    return tuple(create_block_mask(f, None, None, n, n, device=device) for f in (near, full))  # type: ignore[return-value]


def learning_rate(progress: float, peak: float) -> float:
    if progress < WARMUP:
        return peak * progress / WARMUP
    done = (progress - WARMUP) / (1 - WARMUP)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


@torch.no_grad()
def held_out_loss(model: MixtureModel, ids: np.ndarray, device: str, limit: int) -> float:
    """Mean loss over consecutive windows, nats a token. Not compiled: attention is spelt out."""
    n = model.shape.context
    count = min(len(ids) - 1, limit) // n
    total, rows = 0.0, 8
    data = torch.from_numpy(ids[: count * n + 1].astype(np.int64)).to(device)
    for at in range(0, count - count % rows or count, rows):
        r = min(rows, count - at)
        x = data[at * n : (at + r) * n].view(r, n)
        y = data[at * n + 1 : (at + r) * n + 1].view(r, n)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            total += float(model.loss(x, y, (None, None))[0]) * r
    return total / (count - count % rows or count)


def optimiser_of(model: MixtureModel, peak: float, device: str) -> torch.optim.Optimizer:
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2 and "bias" not in n]
    plain = [p for n, p in model.named_parameters() if p.ndim < 2 or "bias" in n]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device != "cpu")


def train(args: argparse.Namespace) -> MixtureModel:
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    shape: Shape = SHAPES[args.shape]
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = MixtureModel(shape).to(device)
    peak = args.peak_lr or PEAK_LR[args.shape]
    optimiser = optimiser_of(model, peak, device)
    batch_tokens = args.batch_tokens or BATCH_TOKENS[args.shape]
    batches = Batches(read_ids(args.ids / "train.bin.xz"), shape, batch_tokens, args.seed, device)
    masks = attention_masks(shape, device)
    state_path = args.out / "state.pt"
    step, used, log = 0, 0.0, []
    if args.resume and state_path.exists():
        state = torch.load(state_path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step, used, log = state["step"], state["used"], state["log"]
    forward = model.loss if device == "cpu" else torch.compile(model.loss)
    if device != "cpu":  # compile before the clock starts: the warm-up would be over by then
        x, y = batches.get(step)
        with torch.autocast(device, torch.bfloat16):
            loss, balance, _ = forward(x, y, masks)
        (loss + balance).backward()
        optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    budget = args.minutes * 60
    begun = time.perf_counter() - used
    quantised = False
    while True:
        used = time.perf_counter() - begun
        progress = step / args.steps if args.steps else used / budget
        if progress >= 1 or (args.stop_after and step >= args.stop_after):
            break
        if progress >= 1 - QAT_SHARE and not quantised:
            model.quantise_experts(True)
            quantised = True
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(progress, peak)
        x, y = batches.get(step)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss, balance, share = forward(x, y, masks)
        (loss + BALANCE[args.shape] * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        model.feed_the_starving(share, args.nudge)
        step += 1
        if step % args.log_every == 0:
            row = (step, round(used, 2), float(loss.detach()), float(balance.detach()),
                   float(share.min()), float(share.max()))  # fmt: skip
            log.append(row)
            print("step %d %.0fs loss %.4f balance %.4f share %.4f..%.4f" % row, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step,
         "used": used, "log": log},
        state_path,
    )  # fmt: skip
    (args.out / "log.json").write_text(
        json.dumps({"shape": asdict(shape), "seed": args.seed, "tokens": step * batch_tokens,
                    "columns": ["step", "seconds", "loss", "balance", "min_share", "max_share"],
                    "rows": log})
    )  # fmt: skip
    return model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--steps", type=int, default=0, help="schedule by steps, not by the clock")
    parser.add_argument("--stop-after", type=int, default=0, help="stop early, to resume later")
    parser.add_argument("--batch-tokens", type=int, default=0, help="default: the shape's")
    parser.add_argument("--peak-lr", type=float, default=0.0, help="default: the shape's")
    parser.add_argument(
        "--nudge", type=float, default=NUDGE, help="lift of starving experts; 0: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    model = train(args)
    device = next(model.parameters()).device.type
    for quantised in (False, True):
        model.quantise_experts(quantised)
        for path in sorted(args.ids.glob("held.*.bin.xz")):
            loss = held_out_loss(model, read_ids(path), device, 200_000)
            print(f"held-out {path.name.split('.')[1]}, experts {'MXFP4' if quantised else 'bf16'}: "
                  f"perplexity {math.exp(loss):.3f}", flush=True)  # fmt: skip
    from training.export import export

    export(model, args.ids / "tokenizer.json", args.out / "model")


if __name__ == "__main__":
    main()
