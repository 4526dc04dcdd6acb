"""Triton's kernels compiled for GPUs that are not here, stage by stage.

Compiling needs no GPU: Triton brings its own assembler. Nothing of Triton is imported before a function
here is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
import subprocess
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

from headrace.core.errors import ConfigError, InternalError, MachineError

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
# Compute capabilities that Triton's kernels here are compiled for: Ampere to Blackwell.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_ERROR_CHARACTERS = 600  # of a compiler's message, which may hold the whole program
_LAUNCH = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Lowered:
    """A compiled kernel: text of each stage, bytes of shared memory, registers and stack bytes a thread."""

    name: str
    arch: str
    triton: str
    texts: dict[str, str]
    shared_nbytes: int
    registers: int
    stack_nbytes: int

    @property
    def matrix_instructions(self) -> tuple[str, ...]:
        """The matrix instructions of its PTX, each once, sorted."""
        return matrix_instructions(self.texts["ptx"])

    @property
    def loops(self) -> list[LoopCount]:
        """Its loops that multiply matrices."""
        return count_loops(self.texts["sass"])


_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[a-zA-Z0-9_.:]+")


def matrix_instructions(ptx: str) -> tuple[str, ...]:
    """The matrix instructions of a program in PTX, each once, sorted."""
    return tuple(sorted(set(_MATRIX.findall(ptx))))


def kernel_names() -> tuple[str, ...]:
    """The kernels that can be shown.

    Raises:
        MachineError: Triton is not installed, or its interpreter is on.
    """
    return tuple(_examples())


def lower(name: str, arch: str, **constants: Any) -> Lowered:
    """Compile a kernel with the operands of a typical call; ``constants`` replace some of them.

    ``num_warps``, ``num_stages`` and ``maxnreg`` among them are those of the launch.

    Raises:
        ConfigError: there is no such kernel or architecture.
        MachineError: Triton is missing, or cannot compile the kernel for it.
    """
    examples = _examples()
    if name not in examples:
        raise ConfigError(
            f"there is no kernel {name!r}", hint=f"known: {', '.join(examples)}", param="NAME"
        )
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"--arch is {arch!r}; supported: {', '.join(ARCHITECTURES)}", param="--arch"
        )
    example = examples[name]
    if example.only not in (None, arch):
        raise ConfigError(
            f"kernel {name} is written for {example.only} alone, --arch is {arch}",
            hint=f"--arch {example.only}",
            param="--arch",
        )
    launch = {"num_warps": example.num_warps, "num_stages": example.num_stages}
    launch |= {k: constants.pop(k) for k in _LAUNCH if k in constants}
    example = replace(example, constants={**example.constants, **constants})
    capability = int(arch.removeprefix("sm_"))
    triton: Any = importlib.import_module("triton")
    target: Any = importlib.import_module("triton.backends.compiler").GPUTarget
    try:
        with redirect_stdout(io.StringIO()):  # it prints whole programs that its assembler refuses
            made = triton.compile(
                example.source(capability), target=target("cuda", capability, 32), options=launch
            )
    except Exception as error:
        reason = str(error)[:_ERROR_CHARACTERS]
        raise MachineError(
            f"Triton {triton.__version__} cannot compile {name} for {arch}: {reason}",
            hint="other architectures may do: --arch sm_90",
        ) from error
    texts = {stage: str(made.asm[stage]) for stage in STAGES if stage in made.asm}
    texts["sass"] = _tool(triton, "nvdisasm", ("-c",), made.asm["cubin"])
    usage = _tool(triton, "cuobjdump", ("--dump-resource-usage",), made.asm["cubin"])
    words = dict(w.split(":", 1) for w in usage.split() if ":" in w and not w.endswith(":"))
    return Lowered(
        name, arch, triton.__version__, texts, made.metadata.shared,
        int(words["REG"]), int(words["STACK"]),
    )  # fmt: skip


def _examples() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        raise MachineError(
            "Triton is not installed", hint="pip install 'headrace[cuda]' brings it; no GPU needed"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise MachineError(
            "kernels are interpreted, not compiled: TRITON_INTERPRET is 1", hint="unset it"
        )
    module: Any = importlib.import_module("headrace.ops.triton.examples")
    return module.EXAMPLES


def _tool(triton: Any, name: str, flags: tuple[str, ...], cubin: bytes) -> str:
    """What one of CUDA's tools, which come inside Triton, says about a binary."""
    path = getattr(triton.knobs.nvidia, name).path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [path, *flags, file.name], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise InternalError(f"{name} failed on a compiled kernel: {done.stderr[-500:]}")
    return done.stdout


@dataclass(frozen=True)
class LoopCount:
    """The instructions of a loop that holds no other one, by name, each once however often it runs."""

    total: int
    by_name: dict[str, int]

    @property
    def num_products(self) -> int:
        """Matrix instructions."""
        return sum(self.by_name.get(name, 0) for name in _PRODUCTS)


_PRODUCTS = ("HMMA", "HGMMA", "QMMA", "QGMMA", "OMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):\s*\n(?:\s*\.[^\n]*\n)*\s*/\*([0-9a-f]{4,})\*/", re.M)


def count_loops(sass: str) -> list[LoopCount]:
    """The innermost loops of a kernel's SASS that multiply matrices, in order."""
    code = [(int(at, 16), name, rest) for at, name, rest in _LINE.findall(sass)]
    labels = {m.group(1): int(m.group(2), 16) for m in _LABEL.finditer(sass)}
    loops: list[tuple[int, int]] = []
    for at, name, rest in code:
        target = re.search(r"\.L_x_\d+", rest) if name.startswith("BRA") else None
        if target is not None and labels.get(target.group(0), at + 1) < at:
            loops.append((labels[target.group(0)], at))
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
    counts: list[LoopCount] = []
    for start, stop in inner:
        names = Counter(name.split(".")[0] for at, name, _ in code if start <= at <= stop)
        counts.append(LoopCount(names.total(), dict(names)))
    return [count for count in counts if count.num_products]
