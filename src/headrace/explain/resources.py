"""Names of resources for people, and the units in which their work is counted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "tensor": "matrix units",
        "vector": "vector units",
        "special": "exponential units",
        "cpu": "CPU arithmetic",
        "hbm": "GPU memory",
        "pcie": "host link",
        "dram": "host memory",
        "link": "link between GPUs",
        "disk": "disk",
        "host": "host work",
        "launch": "launches",
    }
)
WORK_UNITS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("tensor", "vector", "special", "cpu"), "FLOP"),
        **dict.fromkeys(("hbm", "pcie", "dram", "link", "disk"), "B"),
        "host": "s",
        "launch": "",
        "launches": "",
    }
)
