"""Whether the kernels are there, which instruction set they use, and with how many threads."""

from __future__ import annotations

import os

from headrace.core.errors import ConfigError

ISA_VARIABLE = "HEADRACE_ISA"


def available() -> str | None:
    """Return None if the kernels can run here, else why not.

    Raises:
        ConfigError: ``HEADRACE_ISA`` names something that this CPU or build does not have.
    """
    try:
        from headrace.ops.cpu import _native  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        return f"the C++ kernels are not installed, no compiler was found at install ({error})"
    forced = os.environ.get(ISA_VARIABLE, "")
    if forced:
        select_isa(forced)
    return None


def select_isa(name: str) -> None:
    """Use the kernels of one instruction set: "scalar", "avx2", "avx512", "avx512_amx"; "" for the best.

    All of these agree bit for bit in calls of up to 64 rows. In larger ones "avx512_amx" multiplies
    tiles, with two bfloat16 terms for each activation (``docs/adr/0008-matrix-tiles.md``).
    "avx512_bf16" runs the same tiles without AMX, for tests. "avx512_vnni" is a second numerics mode:
    activations as two int8 terms per block of 32 (two bfloat16 terms for bf16 weights). Neither is
    ever a default.
    """
    from headrace.ops.cpu import _native

    problem = _native.select_isa(name)
    if problem:
        raise ConfigError(
            f"{ISA_VARIABLE}={name}: {problem}",
            hint=f"unset {ISA_VARIABLE}, or set it to one of: {_native.supported_isas()}",
        )


def isa() -> str:
    """The instruction set in use."""
    from headrace.ops.cpu import _native

    return _native.isa()


def why_no_tiles() -> str:
    """Why calls of many rows go without AMX tiles; empty if they use them."""
    from headrace.ops.cpu import _native

    return _native.why_no_tiles()


def supported_isas() -> list[str]:
    """The instruction sets that can be used here, best first."""
    from headrace.ops.cpu import _native

    return _native.supported_isas().split()


def set_num_threads(count: int) -> None:
    """Use ``count`` threads, the calling one included. By default, one for each allowed CPU."""
    from headrace.ops.cpu import _native

    if count < 1:
        raise ConfigError(
            f"threads: found {count}, expected at least 1", hint="give --threads a positive number"
        )
    _native.set_num_threads(count)


def num_threads() -> int:
    """Threads that work on a call, the calling one included."""
    from headrace.ops.cpu import _native

    return _native.num_threads()
