"""What goes to standard error: errors with hints, notes, warnings; and the exit codes."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback

from headrace.core.errors import (
    DoesNotFitError,
    HeadraceError,
    InternalError,
    MachineError,
    outcome_of,
)


def prepare_streams() -> None:
    """Let any text be printed, whatever encoding the terminal claims to have."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and (stream.encoding or "").lower() != "utf-8":
            reconfigure(errors="replace")


def note(message: str) -> None:
    """One line to standard error."""
    print(f"headrace: {message}", file=sys.stderr, flush=True)


def configure_logging(verbose: bool) -> None:
    """Send log records to standard error: warnings and errors, with ``verbose`` also infos."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="headrace: %(levelname)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    for name in ("httpx", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it prints by a handler of its own


def as_headrace_error(error: BaseException) -> HeadraceError:
    """Say any exception in our terms."""
    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, MemoryError):
        return DoesNotFitError(
            f"the machine is out of memory{f': {error}' if str(error) else ''}",
            hint="a smaller --context, a smaller model, or more memory",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return MachineError(
            f"cannot write: {error.strerror}" + (f": {error.filename}" if error.filename else ""),
            hint="make room on the disk that the output goes to",
        )
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return InternalError(
            "torch is not installed", hint="run `make setup`, or `pip install torch` (see README)"
        )
    return InternalError(
        f"{type(error).__name__}: {error}",
        hint="this is a fault of Headrace; HEADRACE_TRACEBACK=1 shows where it happened",
    )


def report(error: BaseException) -> int:
    """Print an error, what to do about it, and return the exit code.

    With HEADRACE_TRACEBACK=1 the traceback comes first.
    """
    if os.environ.get("HEADRACE_TRACEBACK") == "1":
        traceback.print_exception(error)
    ours = as_headrace_error(error)
    print(f"headrace: error: {ours.message}", file=sys.stderr)
    if ours.hint:
        print(f"hint: {ours.hint}", file=sys.stderr)
    return outcome_of(ours).exit_code
