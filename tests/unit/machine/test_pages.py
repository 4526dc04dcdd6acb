"""Anonymous blocks: alignment, first touch, and memory that really goes back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.checkpoint.mapped import MappedFile
from headrace.core.errors import DoesNotFitError
from headrace.machine import pages
from headrace.machine.pages import (
    HostBlock,
    address_of,
    huge_nbytes,
    touch_for_reading,
    touch_for_writing,
)

MIB = 1 << 20


def test_a_block_is_aligned_and_zero() -> None:
    block = HostBlock(3 * MIB + 4096)
    assert block.address % (2 * MIB) == 0
    assert block.bytes.size == 3 * MIB + 4096
    touch_for_writing(block.address, block.nbytes)
    assert not block.bytes.any()


@pytest.mark.skipif(sys.platform != "linux", reason="needs madvise")
def test_release_gives_the_memory_back_although_views_live() -> None:
    block = HostBlock(64 * MIB)
    view = block.bytes[MIB:]
    block.bytes[:] = 1
    process = psutil.Process()
    before = process.memory_info().rss
    block.release()
    assert process.memory_info().rss < before - 48 * MIB
    assert not view.any()  # no crash, and nothing of what was there


def test_touching_keeps_what_was_written(tmp_path: Path) -> None:
    block = HostBlock(MIB)
    block.bytes[5000] = 7
    touch_for_writing(block.address + 8192, MIB - 8192)
    assert block.bytes[5000] == 7
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 100)
    data = MappedFile(file).bytes
    touch_for_reading(address_of(data) + 100, 20000)
    assert bytes(data[:256]) == bytes(range(256))


def test_without_advice_pages_are_touched_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_advise", lambda *args: False)
    block = HostBlock(MIB)
    assert not block.huge
    touch_for_writing(block.address, block.nbytes)
    touch_for_reading(block.address, block.nbytes)
    block.release()
    assert block.bytes.size == 0


def test_huge_pages_are_counted() -> None:
    block = HostBlock(4 * MIB)
    block.bytes[:] = np.uint8(1)
    counted = huge_nbytes(block)
    assert counted is None or counted % (2 * MIB) == 0


def test_more_than_the_address_space() -> None:
    with pytest.raises(DoesNotFitError, match="refuses"):
        HostBlock(1 << 62)
