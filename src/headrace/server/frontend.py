"""Text to token ids and back, as the HTTP routes need it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

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

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the exact bytes that a token adds to the text.

        Control tokens add none; with ``skip_special`` False they give their name's bytes.
        """
        ...


class CheckpointFrontend:
    """The front end of an opened checkpoint: its tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
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
        return cls(load_tokenizer(source), ChatTemplate(source))

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

        return encode_chat(
            self._tokenizer,
            self._template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """See ``TextFrontend.encode``."""
        return self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``TextFrontend.decode``."""
        return self._tokenizer.decode(list(ids))

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """See ``TextFrontend.token_bytes``."""
        return self._tokenizer.token_bytes(token_id, skip_special=skip_special)
