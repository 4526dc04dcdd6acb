"""How deep JSON lies in itself. What walks it by recursion (templates, checks, writers) has an end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

# Tool schemas and arguments have some ten levels. Python walks 1000 frames deep, of which the server and
# a template's own loops need their part: 100 levels are far from it.
MAX_LEVELS = 100


def is_too_deep(value: object, levels: int = MAX_LEVELS) -> bool:
    """Whether lists and objects lie in each other more than ``levels`` deep; without recursion."""
    inside: list[object] = [value]
    for _ in range(levels):
        inside = [one for outer in inside if _holds(outer) for one in _parts(outer) if _holds(one)]
        if not inside:
            return False
    return True


def _holds(value: object) -> bool:
    return isinstance(value, (dict, list))


def _parts(value: object) -> Iterable[object]:
    found = cast("dict[str, Any] | list[Any]", value)
    return found.values() if isinstance(found, dict) else found
