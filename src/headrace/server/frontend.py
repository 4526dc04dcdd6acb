"""Text to token ids and back, as the HTTP routes need it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import RequestError

if TYPE_CHECKING:
    from headrace.text.template import ChatTemplate
    from headrace.text.tokenizer import Tokenizer


class TextFrontend(Protocol):
    """The loaded model's tokenizer and chat template. Calls can take long: run them in a thread."""

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt of a conversation, with exactly one begin token if the model has one.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        ...

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens left out."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token; special tokens give their name's bytes."""
        ...


class CheckpointFrontend:
    """The front end of an opened checkpoint: its tokenizer and, if it has one, its template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, model: str) -> CheckpointFrontend:
        """Read the text files of ``model`` (a path or a name that needs no download any more).

        Raises:
            HeadraceError: the checkpoint cannot be opened, or its tokenizer is damaged.
        """
        from headrace.checkpoint.open import open_checkpoint
        from headrace.text.template import ChatTemplate
        from headrace.text.tokenizer import load_tokenizer

        source = open_checkpoint(model).text
        template = None if source.chat_template is None else ChatTemplate(source)
        return cls(load_tokenizer(source), template)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """See ``TextFrontend.encode_chat``."""
        from headrace.text.template import encode_chat

        if self._template is None:
            raise RequestError(
                "this model has no chat template",
                hint="use /v1/completions with the prompt as plain text",
                param="messages",
            )
        variables = template_kwargs or {}
        if continue_final_message:
            return self._encode_unfinished(self._template, messages, variables)
        return encode_chat(
            self._tokenizer,
            self._template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def _encode_unfinished(
        self, template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> list[int]:
        """Return the prompt cut right after the final message's text, before what closes it."""
        text = template.render(messages, add_generation_prompt=False, **variables)
        final: str = messages[-1].get("content") or ""
        for wanted in (final, final.strip()):  # many templates strip what they are given
            at = text.rfind(wanted)
            if wanted and at >= 0:
                text = text[: at + len(wanted)]
                break
        else:
            raise RequestError(
                "the chat template does not show the final message's text: nothing can follow it",
                hint="give the final message a text, or leave continue_final_message out",
                param="continue_final_message",
            )
        ids = self._tokenizer.encode(text)
        bos = self._tokenizer.bos_token_id
        # The template may write the begin token that the tokenizer adds as well.
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """See ``TextFrontend.encode``."""
        return self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``TextFrontend.decode``."""
        return self._tokenizer.decode(list(ids))

    def token_bytes(self, token_id: int) -> bytes:
        """See ``TextFrontend.token_bytes``."""
        return self._tokenizer.token_bytes(token_id)
