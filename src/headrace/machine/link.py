"""The link between host and GPU, by what nvidia-smi says, and what its standard allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from headrace.machine.probe import run_command
from headrace.machine.profile import LinkProfile

# GB/s of one lane and direction: transfers a second x the line code (PCI Express base specifications
# 1.0 to 6.0; generation 6 carries 242 of 256 bytes of a flit).
_LANE_GBPS = {
    1: 2.5e9 * 8 / 10 / 8 / 1e9,
    2: 5.0e9 * 8 / 10 / 8 / 1e9,
    3: 8.0e9 * 128 / 130 / 8 / 1e9,
    4: 16.0e9 * 128 / 130 / 8 / 1e9,
    5: 32.0e9 * 128 / 130 / 8 / 1e9,
    6: 64.0e9 * 242 / 256 / 8 / 1e9,
}


def read_link(run: Callable[[Sequence[str]], str | None] = run_command) -> LinkProfile | None:
    """The first GPU's link at its best; None if nvidia-smi does not say."""
    text = run(
        [
            "nvidia-smi",
            "--query-gpu=pcie.link.gen.max,pcie.link.width.max",
            "--format=csv,noheader",
        ]
    )
    cells = [cell.strip() for cell in (text or "").splitlines()[:1] for cell in cell.split(",")]
    if len(cells) != 2 or not all(cell.isdigit() for cell in cells):
        return None
    return LinkProfile(f"PCIe {cells[0]}.0 x{cells[1]}")


def link_peak_gbps(link: LinkProfile | None) -> float | None:
    """GB/s one way that the link's standard allows, before packets' headers."""
    match = re.fullmatch(r"PCIe ([1-6])\.0 x([0-9]+)", link.name) if link else None
    return None if match is None else _LANE_GBPS[int(match[1])] * int(match[2])
