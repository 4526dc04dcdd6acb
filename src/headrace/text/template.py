"""Chat templates: the Jinja programs, brought along by models, that make a prompt of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jinja2

from headrace.checkpoint.records import TextSource
from headrace.core.errors import CheckpointError, RequestError
from headrace.text.control_text import encode_marked, mark_control_tokens, unused_characters
from headrace.text.jinja_env import chat_environment
from headrace.text.messages import (
    Message,
    arguments_as_text,
    fold_systems,
    is_system,
    normalise_messages,
)
from headrace.text.tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class _Options:
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **kwargs: Any,
) -> list[int]:
    """Return the prompt's token ids for a conversation; arguments as for ``ChatTemplate.render``.

    There is exactly one BOS where the tokenizer adds one, whether the template writes it or not.
    Control tokens spelled out inside messages and tools stay text: only the template's own are
    control tokens, so that no message can end its own turn and open another.

    Raises:
        RequestError: see ``ChatTemplate.render``.
    """
    conversation = template._conversation(messages)  # pyright: ignore[reportPrivateUsage]
    options = _Options(tools, add_generation_prompt, continue_final_message, kwargs)
    marks = unused_characters([conversation, tools], 2)
    marked = mark_control_tokens([conversation, tools], tokenizer.special_pattern, marks)
    if marked == [conversation, tools]:
        text = template._render(conversation, options)  # pyright: ignore[reportPrivateUsage]
        return tokenizer.with_bos(tokenizer.encode(text, add_special=False))
    conversation, tools = cast("tuple[list[Message], Any]", marked)
    options = _Options(tools, add_generation_prompt, continue_final_message, kwargs)
    text = template._render(conversation, options)  # pyright: ignore[reportPrivateUsage]
    return tokenizer.with_bos(encode_marked(tokenizer, text, marks))


class ChatTemplate:
    """The chat template of a checkpoint.

    It is looked for in chat_template.jinja or what the checkpoint's reader found, then in
    tokenizer_config.json (one text, or several by name), then in the GGUF metadata. Of several,
    ``tool_use`` is used where tools are given and ``default`` otherwise. A checkpoint without one
    gives an object whose ``exists`` is False and whose ``render`` refuses.
    """

    def __init__(self, source: TextSource) -> None:
        self._sources = _template_sources(source)
        self._variables = _special_variables(source)
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._sources)

    @cached_property
    def has_developer_role(self) -> bool:
        """Whether the template itself speaks of a role ``developer``."""
        return any("developer" in text for text in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt's text for a conversation.

        Args:
            messages: as in the chat-completions API; see ``text.messages`` for what is accepted.
            tools: tool definitions, handed to the template as they are.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message, right after its text.
            **kwargs: further variables of the template (``enable_thinking``, ...).

        Raises:
            RequestError: there is no template, the messages are not acceptable, or the template
                itself refuses them or fails; its own message is passed on.
        """
        options = _Options(tools, add_generation_prompt, continue_final_message, kwargs)
        return self._render(self._conversation(messages), options)

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        return normalise_messages(messages, has_developer_role=self.has_developer_role)

    def _render(self, conversation: list[Message], options: _Options) -> str:
        if "messages" in options.variables:
            raise RequestError(
                "messages cannot be set through the template's variables",
                param="chat_template_kwargs",
            )
        if options.continue_final_message and options.add_generation_prompt:
            raise RequestError(
                "a prompt either continues its final message or opens a new turn, not both",
                hint="set add_generation_prompt to false with continue_final_message",
                param="continue_final_message",
            )
        template = self._template(has_tools=bool(options.tools))
        end = None
        if options.continue_final_message:
            end = unused_characters([conversation, *self._sources.values()], 1)
            last = conversation[-1]
            # The space tells whether the template strips what it is given.
            conversation = [*conversation[:-1], {**last, "content": last["content"] + end + " "}]
        variables = {
            **self._variables,
            **options.variables,
            "tools": list(options.tools) if options.tools else None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        text = _render_first(template, conversation, variables)
        return text if end is None else _cut_at(text, end)

    def _template(self, *, has_tools: bool) -> jinja2.Template:
        if not self._sources:
            raise RequestError(
                "this model has no chat template",
                hint="use --raw or /v1/completions, or put a chat_template.jinja in its folder",
                param="messages",
            )
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise RequestError(
                f"this model's chat templates are {', '.join(sorted(self._sources))}; "
                "none is named default",
                param="messages",
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = chat_environment().from_string(self._sources[name])
            except jinja2.TemplateError as error:
                raise RequestError(
                    f"this model's chat template is no valid Jinja: {error}",
                    hint="use --raw or /v1/completions",
                    param="messages",
                ) from error
        return self._compiled[name]


def _render_first(
    template: jinja2.Template, messages: list[Message], variables: Mapping[str, Any]
) -> str:
    """Render the first form of the conversation that the template takes without losing a part."""
    failure: RequestError | None = None
    lossy: str | None = None
    for form in _forms(messages):
        try:
            text = _render_arguments(template, form, variables)
        except RequestError as error:
            failure = failure or error
            continue
        if all(_shown(m["content"], text) for m in messages if is_system(m)):
            return text
        lossy = lossy if lossy is not None else text
    # No form shows every system text literally: the template rewrites them (escapes, say), and the
    # conversation as it came is right.
    if lossy is not None:
        return lossy
    assert failure is not None
    raise failure


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the conversation as it is, then with its system messages folded in order."""
    yield messages
    if any(is_system(m) for m in messages):
        folded = fold_systems(messages, keep_leading=True)
        if folded != messages:
            yield folded
        yield fold_systems(messages, keep_leading=False)


def _shown(content: str, text: str) -> bool:
    return content.strip() in text


def _render_arguments(
    template: jinja2.Template, messages: list[Message], variables: Mapping[str, Any]
) -> str:
    """Render with tool-call arguments as objects, or as JSON text where the template wants that.

    A template that joins arguments as text fails on an object, or writes Python's notation of it;
    either is seen here, and the same conversation is rendered with the text.
    """
    arguments = [
        c["function"]["arguments"] for m in messages for c in m.get("tool_calls", ()) or ()
    ]
    try:
        text = _render(template, messages, variables)
    except RequestError:
        if not arguments:
            raise
    else:
        if not any(a and str(a) in text for a in arguments):
            return text
    return _render(template, arguments_as_text(messages), variables)


def _render(
    template: jinja2.Template, messages: list[Message], variables: Mapping[str, Any]
) -> str:
    try:
        return template.render({**variables, "messages": messages})  # names may be "self"
    except jinja2.TemplateError as error:
        raise RequestError(
            f"the model's chat template refuses the messages: {error.message or error}",
            param="messages",
        ) from error
    except Exception as error:  # a template is a program: it can fail in any way
        raise RequestError(
            f"the model's chat template fails on the messages: {type(error).__name__}: {error}",
            param="messages",
        ) from error


def _cut_at(text: str, end: str) -> str:
    at = text.rfind(end)
    if at < 0:
        raise RequestError(
            "the chat template does not show the final message's text: nothing can follow it",
            hint="leave continue_final_message out",
            param="continue_final_message",
        )
    kept = text[:at]
    return kept if text[at + 1 : at + 2] == " " else kept.rstrip()


def _template_sources(source: TextSource) -> dict[str, str]:
    if source.chat_template:
        return {"default": source.chat_template}
    configured = source.tokenizer_config.get("chat_template")
    if isinstance(configured, str) and configured:
        return {"default": configured}
    if isinstance(configured, list):
        return dict(_named_template(entry) for entry in cast(Sequence[object], configured))
    key = "tokenizer.chat_template"
    gguf = source.gguf or {}
    found = {"default": gguf[key]} if gguf.get(key) else {}
    named = {k[len(key) + 1 :]: v for k, v in gguf.items() if k.startswith(key + ".")}
    return {**named, **found}


def _named_template(entry: object) -> tuple[str, str]:
    if isinstance(entry, Mapping):
        fields = cast(Mapping[str, object], entry)
        name, template = fields.get("name"), fields.get("template")
        if isinstance(name, str) and isinstance(template, str):
            return name, template
    raise CheckpointError(
        f"tokenizer_config.json: chat_template holds {entry!r:.80}; objects with name and template "
        "are expected"
    )


def _special_variables(source: TextSource) -> dict[str, str]:
    """Return ``bos_token`` and its like, which templates may print."""
    variables: dict[str, str] = {}
    gguf = source.gguf or {}
    tokens = gguf.get("tokenizer.ggml.tokens", ())
    for name in _SPECIAL_NAMES:
        configured = source.tokenizer_config.get(f"{name}_token")
        if isinstance(configured, Mapping):
            configured = cast(Mapping[str, Any], configured).get("content")
        gguf_name = {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(name, name)
        token_id = gguf.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if isinstance(configured, str):
            variables[f"{name}_token"] = configured
        elif isinstance(token_id, int) and 0 <= token_id < len(tokens):
            variables[f"{name}_token"] = tokens[token_id]
    return variables
