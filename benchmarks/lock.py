"""One at a time: for benchmarks that compile beside each other and measure alone."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path | None) -> Generator[None, None, None]:
    """While others compile beside us, one at a time measures."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
