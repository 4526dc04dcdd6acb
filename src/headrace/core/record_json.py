"""Published records to and from JSON, with errors that name the field.

A record is a frozen dataclass; ``msgspec`` checks types and the bounds that its annotations state,
and writes the JSON schemas of docs/reference/schemas from the same annotations.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgspec

from headrace.core.errors import ConfigError

R = TypeVar("R")


def record_to_json(record: Any, *, indent: int | None = 2) -> str:
    """One record as JSON text; fields in the order of their declaration."""
    return json.dumps(msgspec.to_builtins(record), indent=indent, ensure_ascii=False)


def record_from_json(cls: type[R], text: str | bytes, source: str) -> R:
    """Read one record.

    Args:
        cls: the dataclass.
        text: JSON.
        source: what the text is, for messages (a file name).

    Raises:
        ConfigError: not JSON, a field that is missing, unknown or of the wrong type or value, or a
            version that this release does not know.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source} is not JSON: {error}", hint="is it the file that was meant, and whole?"
        ) from None
    return record_from_data(cls, data, source)


def _refuse_constant(text: str) -> None:
    """Python reads NaN and Infinity, which JSON does not have and no field here may be."""
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    """Python reads 1e400 as infinity."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large a number")
    return number


def record_from_data(cls: type[R], data: Any, source: str) -> R:
    """The same for JSON that is parsed already."""
    name = cls.__name__
    known = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    if isinstance(data, Mapping) and "version" in known:
        expected = known["version"].default
        found = cast(Mapping[str, Any], data).get("version", expected)
        if found != expected:
            raise ConfigError(
                f"{source}: version of {name} is {found!r}; this release reads {expected}",
                hint="write it again with this release of Headrace",
                param="version",
            )
    unknown = next(iter(_unknown_fields(cls, data, "$")), None)
    if unknown is not None:
        raise ConfigError(
            f"{source}: {name} has no field {unknown}",
            hint="the JSON schemas in docs/reference/schemas list the fields",
            param=unknown,
        )
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{source} is not a {name}: {_with_key(str(error), cls, data)}",
            hint="the JSON schemas in docs/reference/schemas list the fields",
        ) from None


def _with_key(message: str, cls: type[Any], data: Any) -> str:
    """msgspec's message with the key of a mapping where it says ``[...]`` only.

    The key is the one that is refused when it stands there alone.
    """
    path = re.search(r"`\$((?:\.\w+)*)\[\.\.\.\]", message)
    if path is None or not isinstance(data, dict):
        return message
    whole = copy.deepcopy(cast("dict[str, Any]", data))
    holder: Any = whole
    *above, last = path[1].lstrip(".").split(".")
    for part in above:
        holder = holder[part]
    entries = cast("dict[str, Any]", holder[last])
    for key, value in entries.items():
        holder[last] = {key: value}
        try:
            msgspec.convert(whole, cls)
        except msgspec.ValidationError:
            return message.replace("[...]", f"[{key!r}]", 1)
    return message


def _unknown_fields(kind: Any, data: Any, path: str) -> list[str]:
    """Paths of keys that no field takes; mappings with free keys and lists are walked through."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(data, Mapping):
            return []  # a wrong type: msgspec names it
        hints = get_type_hints(kind)
        found: list[str] = []
        for key, value in cast(Mapping[str, Any], data).items():
            where = f"{path}.{key}"
            found += _unknown_fields(hints[key], value, where) if key in hints else [where]
        return found
    inner = [a for a in get_args(kind) if a is not type(None) and a is not Ellipsis]
    found = []
    if isinstance(data, Mapping) and len(inner) == 2:  # Mapping[str, Record]
        for key, value in cast(Mapping[str, Any], data).items():
            found += _unknown_fields(inner[1], value, f"{path}[{key!r}]")
    elif isinstance(data, list) and inner:  # tuple[Record, ...]
        for index, value in enumerate(cast(list[Any], data)):
            found += _unknown_fields(inner[0], value, f"{path}[{index}]")
    elif isinstance(data, Mapping) and len(inner) == 1:  # Record | None
        found += _unknown_fields(inner[0], data, path)
    return found


def schema_of(cls: type[Any]) -> dict[str, Any]:
    """The JSON schema of a record, closed: keys that are not fields are refused."""
    schema = msgspec.json.schema(cls)
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
