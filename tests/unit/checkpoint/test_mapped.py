"""Mapped files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.mapped import MappedFile
from headrace.core.errors import CheckpointError


@pytest.mark.skipif(sys.platform != "linux", reason="the commit limit is Linux's")
def test_a_file_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    # A private writable map of this size would be refused if it counted as memory.
    path = tmp_path / "sparse"
    nbytes = 4 << 40
    try:
        with path.open("wb") as file:
            file.truncate(nbytes)
    except OSError:
        pytest.skip("the file system has no sparse files of 4 TiB")
    file = MappedFile(path)
    assert file.nbytes == nbytes
    assert file.bytes[-1] == 0
    assert file.view(nbytes - 8, (2,), np.float32).tolist() == [0.0, 0.0]


def test_writes_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(8)))
    file = MappedFile(path)
    file.view(0, (4,), np.uint8)[:] = 9
    assert file.bytes.tolist() == [9, 9, 9, 9, 4, 5, 6, 7]
    assert path.read_bytes() == bytes(range(8))


def test_empty_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    file = MappedFile(tmp_path / "empty")
    assert file.nbytes == file.bytes.size == 0
    assert file.view(0, (0, 4), np.float32).shape == (0, 4)
    with pytest.raises(CheckpointError, match=r"(?s)absent: cannot be read.*hint: "):
        MappedFile(tmp_path / "absent")
