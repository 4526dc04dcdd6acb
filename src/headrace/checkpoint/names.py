"""From stored names to canonical ones, by a family's patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Whole path pieces only; longer numbers than this count no layers or experts.
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.|$)")


class NameMap:
    """Translates names like ``model.layers.3.mlp.gate.weight`` by patterns with {i} and {e}.

    A name is looked up with its numbers replaced by the placeholders in order, so the cost does not
    grow with the number of patterns.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = patterns

    def canonical(self, stored: str) -> str | None:
        """The canonical name, or None where no pattern fits."""
        numbers = _NUMBER.findall(stored)
        placeholders = iter(("{i}", "{e}"))
        if len(numbers) > 2:
            return None
        ours = self._patterns.get(_NUMBER.sub(lambda _: next(placeholders), stored))
        if ours is None:
            return None
        for placeholder, number in zip(("{i}", "{e}"), numbers, strict=False):
            ours = ours.replace(placeholder, number)
        return ours

    def stored(self, canonical: str) -> str:
        """A stored name of ``canonical``, for messages; itself where there is none."""
        numbers = _NUMBER.findall(canonical)
        placeholders = iter(("{i}", "{e}"))
        if len(numbers) <= 2:
            key = _NUMBER.sub(lambda _: next(placeholders), canonical)
            for theirs, ours in self._patterns.items():
                if ours == key:
                    for placeholder, number in zip(("{i}", "{e}"), numbers, strict=False):
                        theirs = theirs.replace(placeholder, number)
                    return theirs
        return canonical
