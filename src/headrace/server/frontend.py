"""Text to token ids and back, as the HTTP routes need it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


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
