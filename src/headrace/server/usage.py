"""Token counts as the OpenAI API shows them, the same in plain and streamed replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.core.request import Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return ``usage`` with the part of the prompt that the prefix cache had."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def summed(usages: Iterable[Usage]) -> Usage:
    """Return the counts of several requests as one."""
    listed = list(usages)
    return Usage(
        prompt_tokens=sum(u.prompt_tokens for u in listed),
        completion_tokens=sum(u.completion_tokens for u in listed),
        cached_tokens=sum(u.cached_tokens for u in listed),
    )
