"""A model's tokenizer and chat template behind the two calls that the commands need. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.cli.progress import ProgressCallback
from headrace.core.errors import RequestError


class ModelText:
    """Text and conversations to token ids."""

    def __init__(self, tokenizer: Any, source: Any) -> None:
        self.generation_config: dict[str, Any] = dict(source.generation_config)
        self._tokenizer = tokenizer
        self._source = source

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: special tokens recognised, the model's begin token first."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The prompt of a conversation, ready for the model's answer.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        from headrace.text.template import ChatTemplate, encode_chat

        if self._source.chat_template is None:
            raise RequestError(
                "this model has no chat template",
                hint="--raw continues the prompt as plain text",
            )
        return encode_chat(self._tokenizer, ChatTemplate(self._source), list(messages))


def load_text(model: str, progress: ProgressCallback | None) -> ModelText:
    """Open the checkpoint's text files; the weights are mapped and not touched."""
    from headrace.checkpoint.open import open_checkpoint
    from headrace.text.tokenizer import load_tokenizer

    source = open_checkpoint(model, progress=progress).text
    return ModelText(load_tokenizer(source), source)
