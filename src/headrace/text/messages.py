"""Chat messages as clients send them, made into what chat templates expect. Pure functions.

Nothing is dropped: what a text model cannot take is refused, naming the message and the part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from headrace.core.errors import RequestError
from headrace.core.nesting import MAX_LEVELS, is_too_deep

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")

# Names under which clients send an assistant's earlier reasoning, and templates look for it.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

# Between the text parts of one message, and between system texts that are folded into one message.
PART_SEPARATOR = "\n"
FOLD_SEPARATOR = "\n\n"


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], *, has_developer_role: bool = False
) -> list[Message]:
    """Return the messages with known roles, text content and parsed tool-call arguments.

    Args:
        messages: as in the chat-completions API: ``role``, ``content`` (string, list of text parts
            or, for an assistant, null), and fields such as ``tool_calls`` and ``name``, which are kept.
        has_developer_role: the template knows the role ``developer``; else it becomes ``system``.

    Raises:
        RequestError: not a list of objects, an unknown role, a part that is not text, content of a
            wrong type, or arguments that are not a JSON object.
    """
    if not messages:
        raise RequestError("messages is empty; at least one is needed", param="messages")
    return [_message(m, f"messages[{i}]", has_developer_role) for i, m in enumerate(messages)]


def _message(message: object, where: str, has_developer_role: bool) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} is {type(message).__name__}; an object is expected", param="messages"
        )
    result: Message = dict(cast(Mapping[str, Any], message))
    role = result.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {role!r}; known roles are {', '.join(ROLES)}", param="messages"
        )
    if role == "developer" and not has_developer_role:
        result["role"] = "system"
    if result.get("content") is None and role != "assistant":
        raise RequestError(f"{where}.content is missing", param="messages")
    result["content"] = text_of_content(result.get("content"), where)
    if result.get("tool_calls") is not None:
        result["tool_calls"] = _tool_calls(result["tool_calls"], where)
    else:
        result.pop("tool_calls", None)  # null: the same as absent
    return {**_reasoning(result, where), **result}


def _reasoning(message: Message, where: str) -> Message:
    """Return a message's reasoning under every name that is in use: templates know one of them."""
    fields = [(name, message.pop(name, None)) for name in REASONING_FIELDS]
    given = [(name, value) for name, value in fields if value is not None]
    for name, value in given:
        if not isinstance(value, str):
            raise RequestError(
                f"{where}.{name} is {type(value).__name__}; a string is expected", param="messages"
            )
    if len({value for _, value in given}) > 1:
        names = " and ".join(name for name, _ in given)
        raise RequestError(
            f"{where} has {names}, which differ; they are names of one field", param="messages"
        )
    return dict.fromkeys(REASONING_FIELDS, given[0][1]) if given else {}


def text_of_content(content: object, where: str) -> str:
    """Return a message's content as one text; null is the empty one.

    The texts of several parts are joined by a newline, as llama.cpp and vLLM do.

    Raises:
        RequestError: a part that is not text (an image, audio, a file), or a wrong type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"{where}.content is {type(content).__name__}; a string, a list of parts or null is "
            "expected",
            param="messages",
        )
    parts = cast(Sequence[object], content)
    return PART_SEPARATOR.join([_part(p, f"{where}.content[{i}]") for i, p in enumerate(parts)])


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = cast(Mapping[str, Any], part).get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise RequestError(
            f"{where} is no content part: an object with a type is expected", param="messages"
        )
    if kind not in ("text", "input_text", "output_text"):
        raise RequestError(
            f"{where} has the type {kind!r}, but this model takes text only",
            hint="send parts of the type text; images, audio and files are not supported",
            param="messages",
        )
    text = cast(Mapping[str, Any], part).get("text")
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.text is {type(text).__name__}; a string is expected", param="messages"
        )
    return text


def _tool_calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(
            f"{where}.tool_calls is {type(calls).__name__}; a list is expected", param="messages"
        )
    result: list[Message] = []
    for i, call in enumerate(cast(Sequence[object], calls)):
        here = f"{where}.tool_calls[{i}]"
        function = cast(Mapping[str, Any], call).get("function") if _is_object(call) else None
        if not _is_object(function):
            raise RequestError(f"{here}.function is missing", param="messages")
        named = dict(cast(Mapping[str, Any], function))
        if not isinstance(named.get("name"), str):
            raise RequestError(f"{here}.function.name is missing", param="messages")
        named["arguments"] = parse_arguments(named.get("arguments"), f"{here}.function.arguments")
        result.append({**cast(Mapping[str, Any], call), "function": named})
    return result


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def parse_arguments(arguments: object, where: str) -> dict[str, Any]:
    """Return tool-call arguments as an object; clients send the object or its JSON text.

    A call without arguments (null, the empty string) has the empty object.

    Raises:
        RequestError: the text is no JSON, or not that of an object, or nested too deeply.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(
                f"{where} is no JSON: {error}",
                hint="send the arguments as the JSON text of an object",
                param="messages",
            ) from error
        except RecursionError as error:
            raise _too_deep(where) from error
    if is_too_deep(arguments):
        raise _too_deep(where)
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"{where} is the JSON of a {type(arguments).__name__}; an object is expected",
            param="messages",
        )
    return dict(cast(Mapping[str, Any], arguments))


def _too_deep(where: str) -> RequestError:
    return RequestError(
        f"{where} has lists and objects more than {MAX_LEVELS} levels deep in each other",
        param="messages",
    )


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool calls' arguments as JSON text, for templates that join it."""

    def convert(call: Message) -> Message:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**m, "tool_calls": [convert(c) for c in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


def is_system(message: Message) -> bool:
    """Whether a message carries instructions rather than a turn."""
    return message["role"] in ("system", "developer")


def fold_systems(messages: Sequence[Message], *, keep_leading: bool) -> list[Message]:
    """Fold system messages in order, for templates that take one at most, at the start.

    Those at the start become one message. A later one becomes the start of the user message that
    follows it, or a user message of its own; the order of the texts never changes.

    Args:
        keep_leading: False folds the leading one into the first user message too.
    """
    leading = 0
    while leading < len(messages) and is_system(messages[leading]):
        leading += 1
    result: list[Message] = []
    pending: list[str] = []
    if keep_leading and leading:
        text = _join(m["content"] for m in messages[:leading])
        result.append({**messages[0], "content": text})
        messages = messages[leading:]
    for message in messages:
        if is_system(message):
            pending.append(message["content"])
        elif pending and message["role"] == "user":
            result.append({**message, "content": _join([*pending, message["content"]])})
            pending = []
        else:
            _flush(result, pending)
            pending = []
            result.append(message)
    _flush(result, pending)
    return result


def _flush(result: list[Message], pending: list[str]) -> None:
    """Put texts that no user message follows at the end: in the user turn there, or a new one."""
    if not pending:
        return
    if result and result[-1]["role"] == "user":
        result[-1] = {**result[-1], "content": _join([result[-1]["content"], *pending])}
    else:
        result.append({"role": "user", "content": _join(pending)})


def _join(texts: Sequence[str] | Any) -> str:
    return FOLD_SEPARATOR.join([t for t in texts if t])


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """Apply ``function`` to every string inside lists and objects; object keys stay as they are."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {key: map_strings(item, function) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, function) for item in cast(Sequence[Any], value)]
    return value
