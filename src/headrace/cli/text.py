"""A model's tokenizer and chat template behind the two calls that the commands need. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.progress import ProgressCallback
from headrace.core.errors import RequestError

if TYPE_CHECKING:
    from headrace.checkpoint.records import TextSource


class ModelText:
    """Text and conversations to token ids."""

    def __init__(self, source: TextSource) -> None:
        from headrace.text.template import ChatTemplate
        from headrace.text.tokenizer import load_tokenizer

        self.generation_config: dict[str, Any] = dict(source.generation_config)
        self._tokenizer = load_tokenizer(source)
        self._template = ChatTemplate(source)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: special tokens recognised, the model's begin token first."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The prompt of a conversation, ready for the model's answer.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        from headrace.text.template import encode_chat

        if not self._template.exists:
            raise RequestError(
                "this model has no chat template",
                hint="`headrace run --raw` continues a prompt as plain text",
            )
        return encode_chat(self._tokenizer, self._template, list(messages))


def load_text(model: str, progress: ProgressCallback | None) -> ModelText:
    """Open the checkpoint's text files; the weights are mapped and not touched."""
    from headrace.checkpoint.open import open_checkpoint

    return ModelText(open_checkpoint(model, progress=progress).text)
