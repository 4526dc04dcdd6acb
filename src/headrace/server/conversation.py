"""From the messages of a request to what the model's chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.core.errors import RequestError
from headrace.server.schema import ChatMessage, TemplateFields
from headrace.text.messages import text_of_content

# The template's own arguments; a caller sets them through the messages and the named fields.
_RESERVED_TEMPLATE_NAMES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as objects, with their content as one string each.

    Raises:
        RequestError: a part is not text, or a message has no content.
    """
    listed = [message.model_dump(exclude_unset=True) for message in messages]
    for number, message in enumerate(listed):
        if message.get("content") is None and message["role"] != "assistant":
            # Only an answer's tool calls may stand alone.
            raise RequestError(
                f"messages[{number}] ({message['role']}) has no content",
                hint="give it a text, or leave the message out",
                param=f"messages.{number}.content",
            )
        if "content" in message:
            message["content"] = text_of_content(message["content"], f"messages[{number}]")
    return listed


def template_options(fields: TemplateFields, messages: Sequence[ChatMessage]) -> dict[str, Any]:
    """Return how the conversation is rendered: the prompt's end, the template's variables.

    Raises:
        RequestError: two fields contradict each other.
    """
    variables = dict(fields.chat_template_kwargs or {})
    reserved = [name for name in _RESERVED_TEMPLATE_NAMES if name in variables]
    if reserved:
        raise RequestError(
            f"chat_template_kwargs sets {reserved[0]}, which has a field of its own",
            hint=f"use the field {reserved[0]}",
            param="chat_template_kwargs",
        )
    if fields.reasoning_effort is not None:
        if variables.get("reasoning_effort", fields.reasoning_effort) != fields.reasoning_effort:
            raise RequestError(
                "reasoning_effort and chat_template_kwargs.reasoning_effort differ",
                hint="give one of them",
                param="reasoning_effort",
            )
        variables["reasoning_effort"] = fields.reasoning_effort
    go_on = bool(fields.continue_final_message)
    if go_on and fields.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true",
            hint="a prompt either goes on with the last message or opens a new one",
            param="continue_final_message",
        )
    if go_on and messages[-1].role != "assistant":
        raise RequestError(
            f"the final message is of role {messages[-1].role}; only answers can be continued",
            hint="end the messages with one of role assistant",
            param="continue_final_message",
        )
    return {
        "add_generation_prompt": not go_on and fields.add_generation_prompt is not False,
        "continue_final_message": go_on,
        "template_kwargs": variables,
    }
