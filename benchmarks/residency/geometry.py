"""The geometry that the residency benchmarks share: gpt-oss-120b, with random weights."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from headrace.experts.slab import SlabLayout, slab_layout

HIDDEN = 2880
INTERMEDIATE = 2880
EXPERTS = 128
TOP_K = 4
LAYERS = 36
VOCAB = 201_088
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64
WINDOW = 128


def layout(fmt: str = "mxfp4", num_slices: int | None = None) -> SlabLayout:
    return slab_layout(fmt, HIDDEN, INTERMEDIATE, has_bias=True, num_slices=num_slices)


def fill_random(slices: torch.Tensor, where: SlabLayout, seed: int) -> None:
    """Make uint8 [n, slice_nbytes] valid MXFP4 slices in place, on any device.

    Scales near 2 ** -7 keep activations near 1 through a layer; biases are small.
    """
    generator = torch.Generator(slices.device).manual_seed(seed)
    step = 256  # slices at a time, so that little memory is needed beside
    for start in range(0, slices.shape[0], step):
        piece = slices[start : start + step]
        whole = piece.view(torch.int64)
        whole.random_(generator=generator)
        for part in where.parts:
            own = piece[:, part.offset : part.offset + part.nbytes]
            if part.name.endswith("_scales"):
                own.copy_(own % 4 + 118)
            elif part.name.endswith("_bias"):
                values = torch.randn(
                    own.shape[0], part.nbytes // 4, device=slices.device, generator=generator
                )
                own.copy_((values * 0.1).view(torch.uint8))


class Figures:
    """A run's figures by name, printed as they come with the seconds since its start; for ``report``."""

    def __init__(self, **known: Any) -> None:
        self.found: dict[str, Any] = known
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def say(self, name: str, value: Any) -> None:
        self.found[name] = value
        print(f"{self.seconds():6.1f} s  {name}: {value}", flush=True)


def report(name: str, figures: dict[str, Any], out: str | None) -> None:
    """Print the figures as JSON with commit, machine and date; write them to ``out`` too."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = {"host": platform.processor() or platform.machine(), "torch": torch.__version__}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    record = {
        "benchmark": name,
        "commit": commit or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        **figures,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if out:
        Path(out).write_text(text + "\n")


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--out", help="write the JSON here as well")
    return made
