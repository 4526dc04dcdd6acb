"""Stop strings: found wherever the chunks are cut, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from headrace.core.errors import RequestError


def validate_stops(value: object, *, param: str = "stop") -> tuple[str, ...]:
    """Return a request's stop strings as a tuple: None, one string, or a sequence of them.

    Raises:
        RequestError: an element is no string, or is empty (it would stop at once); ``param`` names
            the field.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        items: Sequence[object] = [value]
    elif isinstance(value, (list, tuple)):
        items = cast(Sequence[object], value)
    else:
        raise RequestError(
            f"{param} is {type(value).__name__}; a string or a list of strings is expected",
            param=param,
        )
    stops: list[str] = []
    for i, item in enumerate(items):
        where = param if isinstance(value, str) else f"{param}[{i}]"
        if not isinstance(item, str):
            raise RequestError(
                f"{where} is {type(item).__name__}; a string is expected", param=param
            )
        if not item:
            raise RequestError(
                f"{where} is an empty string, which would end every answer at once",
                hint=f"leave {param} out to go on to the end of the answer",
                param=param,
            )
        stops.append(item)
    return tuple(dict.fromkeys(stops))


class StopMatcher:
    """Looks for stop strings in a text that comes in chunks.

    The match is the one that *ends* first in the whole text; of several that end at the same
    character the longest wins, so that no part of it is left in the output. Chunking never changes
    what is emitted in total, nor which string matched.

    Args:
        stops: what to look for; none may be empty (see :func:`validate_stops`).
        include: emit the matched string too.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        assert all(stops), "empty stop strings are refused by validate_stops"
        self._stops = stops
        self._include = include
        self._held = ""  # the longest end of the text that may become a match
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take a chunk; return the text that is certain now, and the stop string once one matched.

        After a match everything that is pushed is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        text = self._held + text
        end, stop = self._first_match(text)
        if stop is not None:
            self._held = ""
            self.matched = stop
            return text[: end if self._include else end - len(stop)], stop
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Return the text that was held back for a match which never came."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best_end, best = len(text) + 1, None
        for stop in self._stops:
            # A match that ends after the best one so far cannot win: do not look there.
            at = text.find(stop, 0, best_end)
            if at < 0:
                continue
            end = at + len(stop)
            if end < best_end or best is None or len(stop) > len(best):
                best_end, best = end, stop
        return best_end, best

    def _partial(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that starts a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
