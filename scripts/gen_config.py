"""docs/reference/config.md from EngineConfig: every field, its default and its comment."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from headrace.core import config

PAGE = Path("docs/reference/config.md")
HEAD = """\
# Engine configuration

<!-- Written by scripts/gen_config.py from core/config.py: edit the code, then run `make docs`. -->

`EngineConfig` is frozen: `engine.resolve` turns it, the model and the machine into choices, once,
and records the reason of each (`-v` prints them). `None` means that the engine chooses.

| field | type | default | meaning |
| --- | --- | --- | --- |
"""


def pages() -> dict[Path, str]:
    source = inspect.getsource(config.EngineConfig)
    rows: list[str] = []
    for f in dataclasses.fields(config.EngineConfig):
        line = re.search(rf"^    {f.name}: .*?(?:#\s*(.*))?$", source, re.MULTILINE)
        comment = (line[1] if line else None) or ""
        for name in ("KV_FORMATS", "EXPERT_MODES"):
            comment = comment.replace(name, ", ".join(getattr(config, name)))
        default = "required" if f.default is dataclasses.MISSING else f"`{f.default!r}`"
        kind = str(f.type).replace("|", "or")
        rows.append(f"| `{f.name}` | {kind} | {default} | {comment} |")
    return {PAGE: HEAD + "\n".join(rows) + "\n"}
