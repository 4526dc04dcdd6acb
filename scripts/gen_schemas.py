"""The JSON schemas of the published records, from their dataclasses."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.core.record_json import schema_of
from headrace.core.step import StepStats
from headrace.core.trace import RoutingTraceMeta
from headrace.machine.profile import MachineProfile

FOLDER = Path("docs/reference/schemas")
RECORDS = {
    "machine-profile": MachineProfile,
    "routing-trace-meta": RoutingTraceMeta,
    "step-stats": StepStats,
}


def pages() -> dict[Path, str]:
    """File -> text, for every record."""
    return {
        FOLDER / f"{name}.schema.json": json.dumps(schema_of(cls), indent=2) + "\n"
        for name, cls in RECORDS.items()
    }
