"""Machines that nobody here has: the catalogue of chips, links and hosts, combined by name.

``rtx-4090`` is the chip with the link and the host that its record names; ``rtx-4090+pcie4x8`` and
``rtx-4090+ddr5-5600-dual`` replace one part, ``ram=192GiB`` the host's memory. Rates are published
peaks, not what a kernel reaches: a plan multiplies them by an engine's efficiencies.

The records are the TOML files in ``catalogue/`` beside this file; each rate has its source there.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.machine.profile import GpuProfile, HostProfile, LinkProfile, MachineProfile, Rate

FOLDER = Path(__file__).with_name("catalogue")
UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}

# What one kernel costs the stream that runs it. A CUDA graph's kernels follow each other within 1 to
# 2 us; without a graph each costs the host about 5 us (NVIDIA developer blog, "Getting started with
# CUDA graphs", 2019: 9.6 us launched one by one, 3.4 us in a graph of 2.9 us kernels, on a V100).
KERNEL_LAUNCH_S = 5e-6
GRAPH_KERNEL_S = 1.5e-6
THREAD_WAKE_S = 10e-6
DISK_GBPS = 7.0

# How a machine is named, for whoever has just got it wrong.
SYNTAX = (
    "one GPU, one link and one host as GPU+LINK+HOST+ram=SIZE, all but the GPU or the host optional: "
    "rtx-4090+pcie4x16+ddr5-5600-dual+ram=192GiB, or rtx-4090 alone; `headrace plan --machine list` prints "
    "the names"
)


@dataclass(frozen=True)
class Part:
    """One record of the catalogue. ``rates``: name -> (value, source), in the file's units. ``specs``: the
    source of memory, multiprocessors and cores; empty for links, which have none."""

    name: str
    kind: str  # "gpu", "link" or "host"
    title: str
    memory_nbytes: int
    rates: Mapping[str, tuple[float, str]]
    raw: Mapping[str, Any]
    specs: str = ""

    @property
    def standing(self) -> str:
        """How sure the record's rates are: "published", or what kinds of doubt its sources state."""
        sources = [source for _, source in self.rates.values()]
        words = [w for w in ("estimate", "unverified") if any(s.startswith(w) for s in sources)]
        return " + ".join(words) or "published"


@cache
def parts() -> dict[str, Part]:
    """Every record by name, in the order of the files."""
    found: dict[str, Part] = {}
    for kind in ("gpu", "link", "host"):
        table = tomllib.loads((FOLDER / f"{kind}s.toml").read_text(encoding="utf-8"))
        for name, raw in table.items():
            rates = {rate: (float(value), source) for rate, (value, source) in raw["rates"].items()}
            memory = memory_nbytes(raw["memory"]) if "memory" in raw else 0
            specs = str(raw.get("specs", ""))
            found[name] = Part(name, kind, raw["title"], memory, rates, raw, specs)
    return found


def memory_nbytes(text: str, param: str = "--machine") -> int:
    """``"16GiB"`` -> bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([MGT]i?B)", text)
    if match is None:
        raise ConfigError(
            f"{param}: {text!r} is not a size",
            hint="a number with one of the units " + ", ".join(UNITS),
            param=param,
        )
    nbytes = round(float(match[1]) * UNITS[match[2]])
    if nbytes < 1:
        raise ConfigError(
            f"{param}: {text!r} is no memory at all",
            hint="a number above 0, such as 64GiB",
            param=param,
        )
    return nbytes


def known_machine(name: str) -> MachineProfile:
    """The machine that ``name`` describes: parts joined by ``+``.

    Raises:
        ConfigError: a part is not in the catalogue, or two parts are of one kind.
    """
    chosen: dict[str, Part] = {}
    ram: int | None = None
    for given in name.split("+"):
        word = given.strip().lower()
        if word.startswith("ram="):
            if ram is not None:
                raise ConfigError(
                    f"--machine: {name!r} gives ram= twice",
                    hint="the host has one memory: give its whole size once",
                    param="--machine",
                )
            ram = memory_nbytes(given.strip()[4:].strip())
            continue
        part = parts().get(word)
        if part is None:
            raise _no_part(given.strip())
        if part.kind in chosen:
            kind = {"gpu": "GPU"}.get(part.kind, part.kind)
            raise ConfigError(
                f"--machine: {chosen[part.kind].name!r} and {word!r} are both a {kind}",
                hint=SYNTAX,
                param="--machine",
            )
        chosen[part.kind] = part
    return _assemble(name, chosen, ram)


def _no_part(word: str) -> ConfigError:
    """What is wrong with a word that names no part, and how machines are put together."""
    said = f"--machine: {word!r} is not in the catalogue" + _nearest(word.lower(), parts())
    key, equals, _ = word.partition("=")
    if not word:
        said = "--machine: a part is missing: nothing stands before, after or between two +"
    elif equals:
        said = f"--machine: {key}= is no property of a machine: only ram=, the host's memory, is"
    elif word.lower() == "this":
        said = "--machine: 'this' stands alone: it is the machine that you sit at, as it is"
    elif re.search(r"[,; ]", word):
        said = f"--machine: {word!r} is not in the catalogue: parts are joined by +"
    return ConfigError(said, hint=SYNTAX, param="--machine")


def _assemble(name: str, chosen: dict[str, Part], ram: int | None) -> MachineProfile:
    gpu = chosen.get("gpu")
    if gpu is not None:
        _check_shared(gpu, chosen)
        chosen.setdefault("link", parts()[gpu.raw["link"]])
        chosen.setdefault("host", parts()[gpu.raw["host"]])
    host = chosen.get("host")
    if host is None or (gpu is None and "link" in chosen):
        raise ConfigError(
            f"--machine: {name!r} has neither a GPU nor a host",
            hint=SYNTAX,
            param="--machine",
        )
    rates = {"dram_read": _rate(*host.rates["dram_read"])}
    rates["cpu_flops_f32"] = _flops(*host.rates["f32"])
    rates["disk_read"] = Rate(DISK_GBPS, "GB/s", "alone", "estimate: an NVMe drive on PCIe 4.0 x4")
    rates["thread_wake"] = Rate(THREAD_WAKE_S, "s", "alone", "estimate")
    if gpu is not None:
        rates["pcie_h2d"] = _rate(*chosen["link"].rates["pcie_h2d"])
        rates["kernel_launch"] = Rate(KERNEL_LAUNCH_S, "s", "alone", "estimate: one by one")
        rates["graph_kernel"] = Rate(GRAPH_KERNEL_S, "s", "alone", "estimate: inside a CUDA graph")
        for rate, (value, source) in gpu.rates.items():
            if rate in ("hbm_read", "link"):
                rates[rate] = _rate(value, source)
            else:
                rates[f"gpu_flops_{rate}"] = _flops(value, source)
    return MachineProfile(
        name="+".join(_as_named(word.strip()) for word in name.split("+")),
        origin="catalogued",
        host=HostProfile(host.title, int(host.raw["cores"]), ram or host.memory_nbytes),
        gpu=None if gpu is None else _gpu(gpu, ram),
        link=None if gpu is None else LinkProfile(chosen["link"].title),
        rates=rates,
    )


def _check_shared(gpu: Part, chosen: Mapping[str, Part]) -> None:
    """A chip that shares the host's memory has the host and the link of its own record, others have not.

    Raises:
        ConfigError: the parts do not go together.
    """
    shared = bool(gpu.raw.get("unified", False))
    for kind in ("link", "host"):
        part = chosen.get(kind)
        own = parts()[gpu.raw[kind]]
        if part is None or part is own or not (shared or part.name == "unified"):
            continue
        raise ConfigError(
            f"--machine: {gpu.name!r} and {part.name!r} do not go together: the chip "
            + (f"shares the memory of {own.name!r}" if shared else "has a memory of its own"),
            hint=f"leave out {part.name}",
            param="--machine",
        )


def _as_named(word: str) -> str:
    """A part as the catalogue writes it; a size as it was given."""
    return word if word.lower().startswith("ram=") else word.lower()


def _gpu(part: Part, ram: int | None) -> GpuProfile:
    """The chip. Where it shares the host's memory, ``ram`` is the size of that one memory."""
    shared = bool(part.raw.get("unified", False))
    return GpuProfile(
        part.title,
        ram if ram is not None and shared else part.memory_nbytes,
        str(part.raw["architecture"]),
        int(part.raw["sms"]),
        shared,
    )


def _rate(gbps: float, source: str) -> Rate:
    return Rate(gbps, "GB/s", "alone", source)


def _flops(tflops: float, source: str) -> Rate:
    return Rate(tflops * 1e3, "GFLOP/s", "alone", source)


def _nearest(word: str, names: Iterable[str]) -> str:
    """The names closest to a mistyped one, as the end of a sentence."""
    near = difflib.get_close_matches(word, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""
