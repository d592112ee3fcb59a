"""Stop strings: found in the text as it streams, on every engine alike.

Engines that know stop strings match them as token sequences and miss the ones that are tokenized differently in
context; matching text has no such gap. The price is hold-back: the end of the text is kept while it may still be the
beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStringFilter:
    """Passes text through up to the first of `stops`.

    Not thread-safe; one for each sequence.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._searches = tuple(map(_Search, stops))
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """What of the text may be shown now; nothing more once a stop string has matched."""
        if not self._searches:
            return text
        if self.matched is not None:
            return ""
        found: list[tuple[int, int, str]] = []
        length = 0
        for search in self._searches:
            end = search.end_in(text)
            if end is not None:
                found.append((end, -len(search.stop), search.stop))
            elif search.length > length:
                length = search.length
        text = self._held + text
        if found:
            # The one that is complete first: the answer does not depend on how the text was cut into pieces.
            end, _, self.matched = min(found)
            end += len(self._held)
            self._held = ""
            return text[:end] if self._include_stop else text[: end - len(self.matched)]
        shown = len(text) - length
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, at the end of a sequence that no stop string ended."""
        held, self._held = self._held, ""
        return held


class _Search:
    """For one stop string, after Knuth, Morris and Pratt: no character is looked at again with the next piece."""

    __slots__ = ("length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Of the longest end of the text so far that begins the stop string."""

    def end_in(self, text: str) -> int | None:
        """Where in `text`, the next piece, the stop string is complete for the first time."""
        stop, length, position = self.stop, self.length, 0
        if len(text) >= len(stop):  # all but its end is for the interpreter's own search, which is much faster
            start = (stop[:length] + text).find(stop)
            if start >= 0:
                return start - length + len(stop)
            length, position = 0, len(text) - len(stop) + 1
        while length < len(stop):
            if not length:  # as nearly always: most of the text is passed over without a look at each character
                position = text.find(stop[0], position)
            if not 0 <= position < len(text):
                self.length = length
                return None
            if text[position] == stop[length]:
                position, length = position + 1, length + 1
            else:
                length = _borders(stop)[length - 1]
        return position


@lru_cache(maxsize=1024)
def _borders(stop: str) -> Sequence[int]:
    """For each beginning of `stop` the length of its longest end, short of all of it, that begins `stop` too."""
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + (stop[length] == character))
    return borders
