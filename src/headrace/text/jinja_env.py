"""The Jinja environment of chat templates.

It is that of Hugging Face's ``apply_chat_template``, so that a model's template gives the same text
here: trimmed blocks, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that keeps
non-ASCII text, and ``{% generation %}`` blocks, which render what they hold. Templates come with
downloaded models and are not trusted: they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}``: marks an answer for training; here it only renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment in which chat templates are compiled."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    # jinja2's own filter escapes HTML
    environment.filters["tojson"] = _tojson  # pyright: ignore[reportUnknownMemberType]
    environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportUnknownMemberType]
    environment.globals["strftime_now"] = _strftime_now  # pyright: ignore[reportUnknownMemberType]
    return environment
