"""Files that a command writes because a flag named them: looked at before the work, refused in words."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import ConfigError

# The disk's own troubles; ``cli.reporting`` says them for every command.
_DISK = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO))


def check_output(path: Path, flag: str, suffix: str | None = None) -> None:
    """Refuse a file that could not be written, before the work that it is for.

    Raises:
        ConfigError: its name does not end in ``suffix``, it is a folder, or its folder is not there or
            may not be written to.
    """
    if suffix is not None and path.suffix.lower() != suffix:
        raise ConfigError(
            f"{flag} is {str(path)!r}; the picture is {suffix[1:].upper()}, so the name has to end in "
            f"{suffix}",
            hint=f"for example {flag} {path.with_suffix(suffix).name or f'picture{suffix}'}",
            param=flag,
        )
    folder = path.parent
    if path.is_dir():
        raise _refused(path, flag, "it is a folder")
    if not folder.is_dir():
        raise _refused(path, flag, f"there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _refused(path, flag, "it may not be written to")


@contextmanager
def writing(path: Path, flag: str) -> Generator[None]:
    """Say what a failed write means to who named the file.

    Raises:
        ConfigError: it cannot be written; a full or broken disk stays the ``OSError`` that it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK:
            raise
        raise _refused(path, flag, error.strerror or str(error)) from None


def _refused(path: Path, flag: str, why: str) -> ConfigError:
    return ConfigError(
        f"{flag}: {path} cannot be written: {why}",
        hint="name a file in a folder that is there and that you may write to",
        param=flag,
    )
