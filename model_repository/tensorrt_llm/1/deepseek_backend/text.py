"""Stop strings: found in the text as it streams, on every engine alike.

Engines that know stop strings match them as token sequences and miss the ones that are tokenized differently in
context; matching text has no such gap. The price is hold-back: the end of the text is kept while it may still be the
beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text through up to the first of `stops`.

    Not thread-safe; one for each sequence.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """What of the text may be shown now; nothing more once a stop string has matched."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        # The one that is complete first: the answer does not depend on how the text was cut into pieces.
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[: start + len(self.matched)] if self._include_stop else text[:start]
        shown = len(text) - self._longest_beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, at the end of a sequence that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
