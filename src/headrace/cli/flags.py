"""Flags that several commands share, and the configuration that they make."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from headrace.cli.sizes import parse_size
from headrace.core.config import DENSE_FORMATS, DEVICES, EXPERT_MODES, KV_FORMATS, EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.request import SamplingParams

BLOCK_TOKENS = (16, 32, 64, 128)
BACKENDS = ("triton", "cpu", "reference")


class StoreOnce(argparse.Action):
    """Stores a flag's value, and refuses a second one, which would silently replace it.

    ``instead``: how to say it where several values are meant. Flags that take a list append.
    """

    instead = ""
    _read_into: argparse.Namespace | None = (
        None  # what the last value went into: one for each command line
    )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self._read_into is namespace and self.option_strings:
            flag = self.option_strings[-1]
            raise ConfigError(
                f"{flag} is given twice: {getattr(namespace, self.dest)} and {values}",
                hint=self.instead or f"give {flag} once",
                param=flag,
            )
        self._read_into = namespace
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints look like every other error here.

    A flag with a value is taken once (``StoreOnce``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("action", None, StoreOnce)
        self.register("action", "store", StoreOnce)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"`{self.prog} --help` lists what it takes")


Commands = Any  # argparse's type of add_subparsers() is private


def add_command(
    commands: Commands, name: str, help: str, function: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add one command: ``help`` is its line in the list and the start of its own page."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(function=function)
    return parser


LARGEST = 2**63 - 1  # what a count can be in the parts that are not Python


def whole_number(flag: str, lowest: int, largest: int = LARGEST) -> Callable[[str], int]:
    """An argparse type: a whole number between the two, and errors that say so."""

    def parse(text: str) -> int:
        # Twenty digits are more than LARGEST has; int() refuses thousands of them in words of its own.
        value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else None
        if value is None or not lowest <= value <= largest:
            upper = "" if largest == LARGEST and len(text) < 19 else f" and at most {largest}"
            raise ConfigError(
                f"{flag} is {text!r}; it must be a whole number of at least {lowest}{upper}",
                param=flag,
            )
        return value

    return parse


def real_number(flag: str, largest: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number from 0 to ``largest``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and 0 <= value <= largest):
            upper = "" if largest == math.inf else f" and at most {largest:g}"
            raise ConfigError(
                f"{flag} is {text!r}; it must be a number of at least 0{upper}", param=flag
            )
        return value

    return parse


def _size(flag: str) -> Callable[[str], int]:
    return lambda text: parse_size(text, flag)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The model and how it runs; the same for every command that loads one."""
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id or alias")
    group = parser.add_argument_group("machine", "left out, Headrace chooses and says why (-v)")
    add = group.add_argument
    add("--context", type=whole_number("--context", 1), metavar="TOKENS", help="longest sequence")
    add("--threads", type=whole_number("--threads", 1), metavar="N", help="CPU threads")
    add(
        "--ram-budget",
        type=_size("--ram-budget"),
        metavar="SIZE",
        help="host memory to use at most, such as 12GiB or 500MB",
    )
    add(
        "--vram-budget",
        type=_size("--vram-budget"),
        metavar="SIZE",
        help="GPU memory to use at most, CUDA's own included",
    )
    add(
        "--pin-budget",
        type=_size("--pin-budget"),
        metavar="SIZE",
        help="host memory to lock for the GPU at most (default: 3/4 of the RAM, under WSL 1/2)",
    )
    add(
        "--expert-disk",
        metavar="FOLDER",
        help="where experts lie that the host's memory cannot hold (slow: used only if needed)",
    )
    add(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where the model runs (default: auto, the GPU if there is one that it fits)",
    )
    add("--dense-format", choices=DENSE_FORMATS, help="what a GPU keeps matrices in")
    add("--kv-format", choices=KV_FORMATS, help="format of cached keys and values")
    add(
        "--experts",
        choices=EXPERT_MODES,
        default="auto",
        help="where the experts of a mixture are computed (default: auto)",
    )
    add(
        "--expert-slots",
        type=whole_number("--expert-slots", 0),
        metavar="N",
        help="places for slices of experts in GPU memory (default: what fits; for benchmarks)",
    )
    add("--block-tokens", type=int, choices=BLOCK_TOKENS, help="tokens in a block of the KV cache")
    add("--backend", choices=BACKENDS, help="force one set of kernels")
    add(
        "--no-prefix-cache",
        action="store_true",
        help="compute every prompt anew, even where its start was seen before",
    )
    add(
        "--repair-nan-scales",
        action="store_true",
        help="set NaN scales of quantised blocks to zero instead of refusing the file",
    )
    add("-v", "--verbose", action="store_true", help="print what was chosen and why")


def engine_config(args: argparse.Namespace, **extra: Any) -> EngineConfig:
    """The configuration that the flags describe."""
    return EngineConfig(
        model=args.model,
        context=args.context,
        threads=args.threads,
        ram_budget_nbytes=args.ram_budget,
        vram_budget_nbytes=args.vram_budget,
        pin_budget_nbytes=args.pin_budget,
        expert_disk=args.expert_disk,
        expert_slots=args.expert_slots,
        kv_format=args.kv_format,
        experts=args.experts,
        block_tokens=args.block_tokens,
        backend=args.backend,
        device=args.device,
        dense_format=args.dense_format,
        prefix_cache=not args.no_prefix_cache,
        repair_nan_scales=args.repair_nan_scales,
        **extra,
    )


def add_sampling_flags(parser: argparse.ArgumentParser, temperature: str) -> None:
    """How tokens are chosen; ``temperature`` says in words what holds when nothing is given."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add(
        "--temperature",
        type=real_number("--temperature"),
        metavar="T",
        help=f"0 takes the most likely token (default: {temperature})",
    )
    add("--top-k", type=whole_number("--top-k", 0), metavar="K", help="only the K most likely")
    add(
        "--top-p",
        type=real_number("--top-p", 1),
        metavar="P",
        help="only the most likely tokens that together have this probability",
    )
    add(
        "--min-p",
        type=real_number("--min-p", 1),
        metavar="P",
        help="only tokens at least this likely, relative to the most likely one",
    )
    add(
        "--seed",
        type=whole_number("--seed", -(2**63), 2**63 - 1),
        metavar="N",
        help="the same seed gives the same text",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; can be repeated",
    )
    add(
        "--max-tokens",
        type=whole_number("--max-tokens", 1),
        metavar="N",
        help="longest answer (default: to the end of the context)",
    )


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """``defaults`` with every flag that was given.

    Raises:
        ConfigError: a probability of 0 to draw from, or an empty stop text.
    """
    if args.top_p == 0:
        raise ConfigError(
            "--top-p is 0; it must be above 0",
            hint="--temperature 0 takes the most likely token",
            param="--top-p",
        )
    if "" in args.stop:
        raise ConfigError("--stop is empty", hint="give the text to stop at", param="--stop")

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return SamplingParams(
        temperature=given(args.temperature, defaults.temperature),
        top_k=given(args.top_k, defaults.top_k),
        top_p=given(args.top_p, defaults.top_p),
        min_p=given(args.min_p, defaults.min_p),
        seed=args.seed,
        stop=tuple(args.stop),
        max_tokens=args.max_tokens,
    )
