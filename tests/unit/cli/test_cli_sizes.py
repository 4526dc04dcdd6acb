"""Sizes as people write them."""

from __future__ import annotations

import pytest

from headrace.cli.sizes import format_size, parse_size
from headrace.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("0.1kB", 100),
        ("7B", 7),
        ("2TB", 2 * 10**12),
        ("64KiB", 65536),
    ],
)
def test_parse(text: str, nbytes: int) -> None:
    assert parse_size(text, "--ram-budget") == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "8", "GiB", "8gib", "8G", "-1GB", "0MB", "1e3MB", "8GiBs", "1,5GB", "0.5B", "8  GB"],
)
def test_refuse(text: str) -> None:
    with pytest.raises(ConfigError, match="--ram-budget") as caught:
        parse_size(text, "--ram-budget")
    assert caught.value.hint is not None


def test_format() -> None:
    assert format_size(98_400_000) == "98.4 MB"
    assert format_size(999) == "999 B"
    assert format_size(25_276_059_648) == "25.3 GB"
    assert format_size(143_771 << 20) == "151 GB"
